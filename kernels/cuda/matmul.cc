#include "kernels/cuda/matmul.h"

#include <cublasLt.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/workspace.h"
#include "kernels/runs.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

constexpr uint32_t kBestAlignment = 16;
constexpr int kCandidates = 4, kTimedCandidates = 12;
constexpr int kTimedRuns = 5;
constexpr char kRemedy[] =
    "; choose widths that are multiples of 8, or install a newer cuBLAS";

cudaDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    default:
      ZERO_CHECK(dtype == DType::kF16) << dtype << " is not multiplied";
      return CUDA_R_16F;
  }
}

int64_t DepthOf(const Product& p) {
  return p.a_transposed ? p.a.rows : p.a.cols;
}

std::string Describe(const Product& p) {
  const int64_t k = DepthOf(p);
  std::string text =
      absl::StrCat("[", p.c.rows, ", ", k, "] x [", k, ", ", p.c.cols, "] ",
                   DTypeName(p.a.dtype), " into ", DTypeName(p.c.dtype));
  if (p.bias.data != nullptr) absl::StrAppend(&text, " with bias");
  if (p.has_addend()) absl::StrAppend(&text, " with addend");
  if (p.epilogue == Epilogue::kGelu) absl::StrAppend(&text, " with gelu");
  if (p.epilogue == Epilogue::kGeluGradient) {
    absl::StrAppend(&text, " with gelu gradient");
  }
  if (p.a_sums.data != nullptr) absl::StrAppend(&text, " with sums of a");
  return absl::StrCat(text, ", strides ", p.a.ld, ", ", p.b.ld, ", ", p.c.ld);
}

std::string Describe(cublasStatus_t status, const Product& p) {
  return absl::StrCat(cublasLtGetStatusName(status), " for ", Describe(p));
}

// `what`: what the status is about, anything that Describe takes.
#define ZERO_CUBLAS_CHECK(call, what)                       \
  do {                                                      \
    const cublasStatus_t zero_cublas_status = (call);       \
    if (zero_cublas_status != CUBLAS_STATUS_SUCCESS) {      \
      ThrowDeviceError(#call, __FILE__, __LINE__,           \
                       Describe(zero_cublas_status, what)); \
    }                                                       \
  } while (false)

bool Keeps(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % kBestAlignment == 0 &&
         stride_bytes % kBestAlignment == 0;
}
bool Keeps(const ConstMatrix& x) {
  return Keeps(x.data, x.ld * static_cast<int64_t>(DTypeBytes(x.dtype)));
}

// Whether every operand lies on 16 bytes, row by row. A missing one does.
bool KeepsBestAlignment(const Product& p) {
  return Keeps(p.a) && Keeps(p.b) && Keeps(p.c) && Keeps(p.addend()) &&
         (p.gelu_input.data == nullptr || Keeps(p.gelu_input)) &&
         Keeps(p.bias.data, 0) && Keeps(p.a_sums.data, 0);
}

using Key = std::array<int64_t, 16>;

Key KeyOf(const Product& p) {
  const int64_t gelu_ld = p.gelu_input.data == nullptr ? 0 : p.gelu_input.ld;
  return {p.c.rows,
          p.c.cols,
          DepthOf(p),
          p.a.ld,
          p.b.ld,
          p.c.ld,
          p.addend().ld,
          p.accumulate ? 2 : p.residual.data != nullptr,
          gelu_ld,
          static_cast<int64_t>(p.a.dtype),
          static_cast<int64_t>(p.c.dtype),
          2 * p.a_transposed + p.b_transposed,
          p.bias.data != nullptr,
          static_cast<int64_t>(p.epilogue),
          p.a_sums.data != nullptr,
          KeepsBestAlignment(p)};
}

uint32_t EpilogueOf(const Product& p) {
  uint32_t bits = 0;
  if (p.bias.data != nullptr) bits |= CUBLASLT_EPILOGUE_BIAS;
  if (p.epilogue == Epilogue::kGelu) {
    bits |= p.gelu_input.data != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX
                                         : CUBLASLT_EPILOGUE_GELU;
  }
  if (p.epilogue == Epilogue::kGeluGradient) bits |= CUBLASLT_EPILOGUE_DGELU;
  if (p.a_sums.data != nullptr) bits |= CUBLASLT_EPILOGUE_BGRADB;
  if (bits == 0) bits = CUBLASLT_EPILOGUE_DEFAULT;
  return bits;
}

// cuBLASLt's own restriction on the input of its GELU.
bool TakesGeluInput(const Product& p) {
  return p.gelu_input.data == nullptr ||
         (p.gelu_input.ld % 8 == 0 && Keeps(p.gelu_input));
}

// "Not for this product", by any of the names that cuBLASLt has for it; all
// else is an error of the device or of memory.
bool IsRefusal(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED ||
         status == CUBLAS_STATUS_INVALID_VALUE ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

struct Plan {
  bool found = false;
  cublasStatus_t refusal = CUBLAS_STATUS_NOT_SUPPORTED;  // where not found
  bool timed = false;
  double millis = 0;      // where timed
  int row_sums_pay = -1;  // of RowSumsPay; -1: not asked yet
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t a, b, addend, c;
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes = 0;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;  // until one ran

  void Take(const cublasLtMatmulHeuristicResult_t& candidate) {
    algo = candidate.algo;
    workspace_bytes = candidate.workspaceSize;
  }
};

template <class T>
void Set(Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const Product& p) {
  ZERO_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&plan.desc, attribute,
                                                   &value, sizeof(value)),
                    p);
}

template <class T>
void Set(cublasLtMatmulPreferenceOpaque_t& preference,
         cublasLtMatmulPreferenceAttributes_t attribute, const T& value,
         const Product& p) {
  ZERO_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute,
                                                         &value, sizeof(value)),
                    p);
}

// Our row-major matrix, as stored, is cuBLASLt's column-major transpose.
void SetLayout(cublasLtMatrixLayoutOpaque_t& layout, const ConstMatrix& x,
               const Product& p) {
  ZERO_CUBLAS_CHECK(cublasLtMatrixLayoutInit(
                        &layout, TypeOf(x.dtype), static_cast<uint64_t>(x.cols),
                        static_cast<uint64_t>(x.rows), x.ld),
                    p);
}

void* Writable(const void* data) { return const_cast<void*>(data); }

// The vector of an epilogue: what is read (bias) or written (a_sums).
void* VectorOf(const Product& p) {
  return p.bias.data != nullptr ? Writable(p.bias.data) : p.a_sums.data;
}

void SetPointers(Plan& plan, void* vector, void* gelu_input, const Product& p) {
  if (vector != nullptr) {
    Set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector, p);
  }
  if (gelu_input != nullptr) {
    Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, gelu_input, p);
  }
}

// c^T = b^T a^T in column-major order: our b is cuBLASLt's A.
void SetOperation(Plan& plan, const Product& p, bool allow_tf32) {
  const bool tf32 = allow_tf32 && p.a.dtype == DType::kF32;
  ZERO_CUBLAS_CHECK(
      cublasLtMatmulDescInit(
          &plan.desc, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
          CUDA_R_32F),
      p);
  const int32_t a = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t b = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  Set(plan, CUBLASLT_MATMUL_DESC_TRANSA, a, p);
  Set(plan, CUBLASLT_MATMUL_DESC_TRANSB, b, p);
  Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, EpilogueOf(p), p);
  if (p.gelu_input.data != nullptr) {
    Set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.gelu_input.ld, p);
  }
  SetLayout(plan.a, p.b, p);
  SetLayout(plan.b, p.a, p);
  SetLayout(plan.c, p.c, p);
  SetLayout(plan.addend, p.addend(), p);  // needed without an addend, too
}

// The heuristic reads alignment from preferences and, for the vectors of an
// epilogue, from the pointers: it gets ones that keep the promise and no more.
void SetAlignments(cublasLtMatmulPreferenceOpaque_t& preference, Plan& plan,
                   const Product& p) {
  const bool best = KeepsBestAlignment(p);
  const auto promise = [&](DType dtype) {
    return best ? kBestAlignment : static_cast<uint32_t>(DTypeBytes(dtype));
  };
  const uint32_t in = promise(p.a.dtype), out = promise(p.c.dtype);
  Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, in, p);
  Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, in, p);
  Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out, p);
  Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out, p);
  const auto pointer = [&](uint32_t alignment, const void* data) {
    return data == nullptr
               ? nullptr
               : reinterpret_cast<void*>(static_cast<uintptr_t>(alignment));
  };
  SetPointers(plan, pointer(out, VectorOf(p)),
              pointer(kBestAlignment, p.gelu_input.data), p);
}

// The part of a workspace that cuBLASLt may have.
Workspace LibraryPart(const Workspace& workspace) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace.data);
  const size_t skipped = RoundUp(begin, kLibraryAlignment) - begin;
  if (workspace.bytes <= skipped) return {};
  return {static_cast<char*>(workspace.data) + skipped,
          workspace.bytes - skipped};
}

// A timed pair of events.
class Stopwatch {
 public:
  Stopwatch() {
    ZERO_CUDA_CHECK(cudaEventCreate(&start_));
    ZERO_CUDA_CHECK(cudaEventCreate(&stop_));
  }
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }

  // Milliseconds of one `work`, after one to warm up.
  template <class Work>
  double Time(cudaStream_t stream, const Work& work) {
    work();
    ZERO_CUDA_CHECK(cudaEventRecord(start_, stream));
    for (int i = 0; i < kTimedRuns; ++i) work();
    ZERO_CUDA_CHECK(cudaEventRecord(stop_, stream));
    ZERO_CUDA_CHECK(cudaEventSynchronize(stop_));
    float millis = 0;
    ZERO_CUDA_CHECK(cudaEventElapsedTime(&millis, start_, stop_));
    return millis / kTimedRuns;
  }

 private:
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
};

}  // namespace

struct MatmulPlans::Impl {
  Ops& ops;
  CudaOptions options;
  cublasLtHandle_t handle = nullptr;
  bool accumulates_into_f32 = false;
  int64_t num_runs = 0;
  std::map<Key, Plan> plans;

  Plan& PlanOf(const Product& p);
  Plan* SupportedPlanOf(const Product& p);
  void Find(Plan& plan, const Product& p);
  cublasStatus_t Multiply(Plan& plan, const Product& p, Matrix c,
                          Workspace workspace, cudaStream_t stream);
  cublasStatus_t MultiplyFirst(Plan& plan, const Product& p,
                               Workspace workspace, cudaStream_t stream);
  void Time(Plan& plan, const Product& p, Workspace workspace,
            cudaStream_t stream);
  void PickFastest(Plan& plan, const Product& p, Matrix c, Workspace workspace,
                   cudaStream_t stream);
  bool AddsApart(const Product& p) const;
  void RunAndAdd(Stream& stream, const Product& p, Workspace workspace);
  void Run(Stream& stream, const Product& p, Workspace workspace);
  void RunPlan(Plan& plan, const Product& p, Workspace workspace,
               cudaStream_t stream);
  bool RowSumsPay(Plan& plan, const Product& p, Workspace workspace,
                  cudaStream_t stream, absl::FunctionRef<void()> separately);
  bool Probe();
};

Plan& MatmulPlans::Impl::PlanOf(const Product& p) {
  const auto [at, is_new] = plans.try_emplace(KeyOf(p));
  if (is_new) Find(at->second, p);
  return at->second;
}

// Null if cuBLASLt has no algorithm for the product as it is.
Plan* MatmulPlans::Impl::SupportedPlanOf(const Product& p) {
  if (AddsApart(p)) return nullptr;
  Plan& plan = PlanOf(p);
  return plan.found ? &plan : nullptr;
}

void MatmulPlans::Impl::Find(Plan& plan, const Product& p) {
  if (!TakesGeluInput(p)) return;
  SetOperation(plan, p, options.allow_tf32);
  // SM_COUNT_TARGET is not set, though a collective beside the product takes
  // SMs: the heuristic picks tiles and split-K by it, so bits would depend on
  // whether there are collectives, or a GPU alone would leave SMs idle for
  // none.
  cublasLtMatmulPreferenceOpaque_t preference;
  ZERO_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference), p);
  const uint64_t bytes = LibraryBytes(p.c);
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  Set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes, p);
  Set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes, p);
  SetAlignments(preference, plan, p);
  std::vector<cublasLtMatmulHeuristicResult_t> results(
      options.time_algorithms ? kTimedCandidates : kCandidates);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, &plan.desc, &plan.a, &plan.b, &plan.addend, &plan.c, &preference,
      static_cast<int>(results.size()), results.data(), &found);
  if (IsRefusal(status)) {
    plan.refusal = status;
    return;
  }
  if (status != CUBLAS_STATUS_SUCCESS) {
    ThrowDeviceError("cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__,
                     Describe(status, p));
  }
  results.resize(static_cast<size_t>(found));
  std::erase_if(results,
                [](const auto& r) { return r.state != CUBLAS_STATUS_SUCCESS; });
  if (results.empty()) return;
  plan.found = true;
  plan.candidates = std::move(results);
  plan.Take(plan.candidates[0]);
}

// c: p.c, or where an accumulated product is timed.
cublasStatus_t MatmulPlans::Impl::Multiply(Plan& plan, const Product& p,
                                           Matrix c, Workspace workspace,
                                           cudaStream_t stream) {
  SetPointers(plan, VectorOf(p), p.gelu_input.data, p);
  const Workspace library = LibraryPart(workspace);
  ZERO_CHECK_LE(plan.workspace_bytes, library.bytes);
  const float alpha = 1, beta = p.has_addend() ? 1 : 0;
  const bool apart = p.residual.data != nullptr;
  const void* const addend = apart ? p.residual.data : c.data;
  return cublasLtMatmul(handle, &plan.desc, &alpha, p.b.data, &plan.a, p.a.data,
                        &plan.b, &beta, addend, &plan.addend, c.data, &plan.c,
                        &plan.algo, library.data, plan.workspace_bytes, stream);
}

// Multiplies with the first candidate that the product does not refuse, and
// keeps that one.
cublasStatus_t MatmulPlans::Impl::MultiplyFirst(Plan& plan, const Product& p,
                                                Workspace workspace,
                                                cudaStream_t stream) {
  const auto candidates = std::move(plan.candidates);
  plan.candidates.clear();
  cublasStatus_t first = CUBLAS_STATUS_SUCCESS;
  for (const auto& candidate : candidates) {
    plan.Take(candidate);
    const cublasStatus_t status = Multiply(plan, p, p.c, workspace, stream);
    if (!IsRefusal(status)) return status;
    if (first == CUBLAS_STATUS_SUCCESS) first = status;
  }
  return first;
}

void MatmulPlans::Impl::PickFastest(Plan& plan, const Product& p, Matrix c,
                                    Workspace workspace, cudaStream_t stream) {
  Stopwatch stopwatch;
  const auto candidates = std::move(plan.candidates);
  plan.candidates.clear();
  size_t best = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    plan.Take(candidates[i]);
    // An algorithm that the heuristic offers and the product then refuses is
    // left out.
    if (Multiply(plan, p, c, workspace, stream) != CUBLAS_STATUS_SUCCESS) {
      continue;
    }
    const double millis = stopwatch.Time(stream, [&] {
      ZERO_CUBLAS_CHECK(Multiply(plan, p, c, workspace, stream), p);
    });
    if (plan.timed && millis >= plan.millis) continue;
    plan.timed = true;
    plan.millis = millis;
    best = i;
  }
  plan.Take(candidates[best]);
}

// An accumulated product is timed on memory of its own: runs would add up.
// Where there is none nothing is timed.
void MatmulPlans::Impl::Time(Plan& plan, const Product& p, Workspace workspace,
                             cudaStream_t stream) {
  if (!options.time_algorithms || plan.candidates.empty()) return;
  Matrix c = p.c;
  void* memory = nullptr;
  if (p.accumulate) {
    const size_t bytes = static_cast<size_t>(c.rows) *
                         static_cast<size_t>(c.ld) * DTypeBytes(c.dtype);
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
      cudaGetLastError();  // clears it
      return;
    }
    c.data = memory;
  }
  PickFastest(plan, p, c, workspace, stream);
  if (memory != nullptr) ZERO_CUDA_CHECK(cudaFree(memory));
}

bool MatmulPlans::Impl::AddsApart(const Product& p) const {
  return !accumulates_into_f32 && p.has_addend() && p.c.dtype == DType::kF32 &&
         p.a.dtype != DType::kF32;
}

void MatmulPlans::Impl::RunAndAdd(Stream& stream, const Product& p,
                                  Workspace workspace) {
  Product apart = p;
  apart.accumulate = false;
  apart.residual = {};
  apart.c.data = workspace.data;
  const size_t bytes = ApartBytes(p.c);
  Run(stream, apart,
      {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes});
  const Runs runs = RunsOf({apart.c, p.addend(), p.c});
  for (int64_t i = 0; i < runs.count; ++i) {
    ops.Add(stream, {RunOf(p.addend(), runs, i), RunOf(apart.c, runs, i),
                     RunOf(p.c, runs, i)});
  }
}

void MatmulPlans::Impl::Run(Stream& stream, const Product& p,
                            Workspace workspace) {
  if (p.c.rows == 0 || p.c.cols == 0) return;
  ZERO_CHECK_GT(DepthOf(p), 0);
  if (AddsApart(p)) {
    RunAndAdd(stream, p, workspace);
    return;
  }
  Plan& plan = PlanOf(p);
  if (!plan.found) {
    ThrowDeviceError(
        "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__,
        absl::StrCat("no algorithm for ", Describe(p), " (",
                     cublasLtGetStatusName(plan.refusal), ")", kRemedy));
  }
  RunPlan(plan, p, workspace, HandleOf(stream));
}

void MatmulPlans::Impl::RunPlan(Plan& plan, const Product& p,
                                Workspace workspace, cudaStream_t stream) {
  Time(plan, p, workspace, stream);
  const cublasStatus_t status = plan.candidates.empty()
                                    ? Multiply(plan, p, p.c, workspace, stream)
                                    : MultiplyFirst(plan, p, workspace, stream);
  if (status != CUBLAS_STATUS_SUCCESS) {
    ThrowDeviceError(
        "cublasLtMatmul", __FILE__, __LINE__,
        absl::StrCat(Describe(status, p), IsRefusal(status) ? kRemedy : ""));
  }
  ++num_runs;
}

bool MatmulPlans::Impl::RowSumsPay(Plan& plan, const Product& p,
                                   Workspace workspace, cudaStream_t stream,
                                   absl::FunctionRef<void()> separately) {
  if (plan.row_sums_pay < 0) {
    Product plain = p;
    plain.a_sums = {};
    Plan& without = PlanOf(plain);
    Time(plan, p, workspace, stream);
    Time(without, plain, workspace, stream);
    plan.row_sums_pay =
        plan.timed && without.timed &&
        plan.millis < without.millis + Stopwatch().Time(stream, separately);
  }
  return plan.row_sums_pay == 1;
}

// Runs one product of 64 x 64 zeros on a stream of its own.
bool MatmulPlans::Impl::Probe() {
  constexpr int64_t kSize = 64;
  constexpr size_t kOperandBytes = kSize * kSize * 4;
  const size_t library_bytes = size_t{1} << 20;
  cudaStream_t stream = nullptr;
  void* memory = nullptr;
  ZERO_CUDA_CHECK(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
  ZERO_CUDA_CHECK(cudaMalloc(&memory, 2 * kOperandBytes + library_bytes));
  ZERO_CUDA_CHECK(cudaMemsetAsync(memory, 0, 2 * kOperandBytes, stream));
  Product p;
  p.a = {memory, DType::kBF16, kSize, kSize, kSize};
  p.b = p.a;
  p.c = {static_cast<char*>(memory) + kOperandBytes, DType::kF32, kSize, kSize,
         kSize};
  p.accumulate = true;
  Plan plan;
  Find(plan, p);
  const bool works =
      plan.found &&
      MultiplyFirst(
          plan, p,
          {static_cast<char*>(memory) + 2 * kOperandBytes, library_bytes},
          stream) == CUBLAS_STATUS_SUCCESS;
  ZERO_CUDA_CHECK(cudaStreamSynchronize(stream));
  ZERO_CUDA_CHECK(cudaFree(memory));
  ZERO_CUDA_CHECK(cudaStreamDestroy(stream));
  return works;
}

MatmulPlans::MatmulPlans(Ops& ops, const CudaOptions& options)
    : impl_(new Impl{.ops = ops, .options = options, .plans = {}}) {
  const cublasStatus_t status = cublasLtCreate(&impl_->handle);
  if (status != CUBLAS_STATUS_SUCCESS) {
    ThrowDeviceError("cublasLtCreate", __FILE__, __LINE__,
                     cublasLtGetStatusName(status));
  }
  impl_->accumulates_into_f32 = impl_->Probe();
}

MatmulPlans::~MatmulPlans() { cublasLtDestroy(impl_->handle); }

size_t MatmulPlans::WorkspaceBytes(const Product& p) const {
  return ProductBytes(p.c, impl_->AddsApart(p));
}

void MatmulPlans::Run(Stream& stream, const Product& p, Workspace workspace) {
  impl_->Run(stream, p, workspace);
}

bool MatmulPlans::TryRun(Stream& stream, const Product& p,
                         Workspace workspace) {
  Plan* const plan = impl_->SupportedPlanOf(p);
  if (plan == nullptr) return false;
  impl_->RunPlan(*plan, p, workspace, HandleOf(stream));
  return true;
}

bool MatmulPlans::RunIfRowSumsPay(Stream& stream, const Product& p,
                                  Workspace workspace,
                                  absl::FunctionRef<void()> separately) {
  if (!impl_->options.time_algorithms) return false;
  Plan* const plan = impl_->SupportedPlanOf(p);
  if (plan == nullptr ||
      !impl_->RowSumsPay(*plan, p, workspace, HandleOf(stream), separately)) {
    return false;
  }
  impl_->RunPlan(*plan, p, workspace, HandleOf(stream));
  return true;
}

bool MatmulPlans::AccumulatesIntoF32() const {
  return impl_->accumulates_into_f32;
}

int64_t MatmulPlans::num_plans() const {
  return static_cast<int64_t>(impl_->plans.size());
}
int64_t MatmulPlans::num_runs() const { return impl_->num_runs; }

}  // namespace zero::cuda
