// The functions of cuBLASLt that kernels/cuda calls, over host memory.
//
// Refuses everything that the library's documentation forbids, and more than a
// library would notice: an algorithm remembers the shape, the epilogue and the
// alignment it was found for and is refused with others; its workspace is
// filled with NaN before the output is written; the first candidate sums in
// another order than the second; and if a preference allows a reduction without
// a fixed order, such a candidate comes first and gives other bits at every
// call.
#include "tests/support/cuda_emulator/fake_cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/cuda_emulator/fake_streams.h"

namespace zero::emulator {
namespace {

constexpr uint32_t kMaxAlignment = 256;
constexpr size_t kSmallWorkspace = size_t{64} << 10;
constexpr int64_t kAuxMultiple = 8;
constexpr uint32_t kAuxAlignment = 16;

std::mutex mutex;
CublasLt limits;

// ---- What the opaque structs hold -----------------------------------------

struct Layout {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
};
struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  int32_t trans_a, trans_b;
  uint32_t epilogue;
  void* bias;
  void* aux;
  int64_t aux_ld;
};
struct Preference {
  uint64_t workspace;
  uint32_t schemes;
  uint32_t align_a, align_b, align_c, align_d;
};
enum class Sum : uint16_t { kForward, kBackward, kUnordered };
struct Algorithm {
  uint64_t of;  // HashOf the problem
  uint64_t workspace;
  uint16_t align_a, align_b, align_c, align_d, align_bias, align_aux;
  Sum sum;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Operation) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class T, class Opaque>
T Load(const Opaque& opaque) {
  T value;
  std::memcpy(&value, &opaque, sizeof(T));
  return value;
}
template <class T, class Opaque>
void Store(const T& value, Opaque& opaque) {
  std::memset(&opaque, 0, sizeof(Opaque));
  std::memcpy(&opaque, &value, sizeof(T));
}

template <class T>
bool Assign(T& to, const void* from, size_t bytes) {
  if (from == nullptr || bytes != sizeof(T)) return false;
  std::memcpy(&to, from, sizeof(T));
  return true;
}

cublasStatus_t Valid(bool valid) {
  return valid ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

// ---- What is allowed ------------------------------------------------------

struct Problem {
  Operation op;
  Layout a, b, c, d;

  int64_t m() const { return static_cast<int64_t>(d.rows); }
  int64_t n() const { return static_cast<int64_t>(d.cols); }
  int64_t k() const {
    return static_cast<int64_t>(op.trans_a == CUBLAS_OP_N ? a.cols : a.rows);
  }
  bool Has(uint32_t bits) const { return (op.epilogue & bits) == bits; }
  bool has_aux() const { return Has(128); }
  bool has_vector() const {
    return Has(CUBLASLT_EPILOGUE_BIAS) || Has(CUBLASLT_EPILOGUE_BGRADB);
  }
};

bool IsShort(cudaDataType_t type) { return type != CUDA_R_32F; }
int64_t BytesOf(cudaDataType_t type) { return IsShort(type) ? 2 : 4; }

cublasStatus_t CheckShapes(const Problem& p) {
  const auto rows = [](const Layout& x, int32_t trans) {
    return trans == CUBLAS_OP_N ? x.rows : x.cols;
  };
  const auto cols = [](const Layout& x, int32_t trans) {
    return trans == CUBLAS_OP_N ? x.cols : x.rows;
  };
  bool valid = rows(p.a, p.op.trans_a) == p.d.rows &&
               cols(p.b, p.op.trans_b) == p.d.cols &&
               cols(p.a, p.op.trans_a) == rows(p.b, p.op.trans_b) &&
               p.c.rows == p.d.rows && p.c.cols == p.d.cols && p.k() > 0;
  for (const Layout* x : {&p.a, &p.b, &p.c, &p.d}) {
    valid = valid && x->rows > 0 && x->cols > 0 &&
            x->ld >= static_cast<int64_t>(x->rows);
  }
  if (p.has_aux()) {
    valid = valid && p.op.aux_ld % kAuxMultiple == 0 && p.op.aux_ld >= p.m();
  }
  return Valid(valid);
}

// The rows of the documentation's table that matter here.
cublasStatus_t CheckTypes(const Problem& p) {
  const bool tf32 = p.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const bool known = p.a.type == CUDA_R_32F || p.a.type == CUDA_R_16BF ||
                     p.a.type == CUDA_R_16F;
  const bool supported =
      known && p.a.type == p.b.type && p.c.type == p.d.type &&
      p.op.scale == CUDA_R_32F &&
      (p.op.compute == CUBLAS_COMPUTE_32F || (tf32 && !IsShort(p.a.type))) &&
      (p.d.type == p.a.type || p.d.type == CUDA_R_32F);
  return supported ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t CheckEpilogue(const Problem& p, const CublasLt& has) {
  bool supported = false;
  switch (p.op.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
      supported = true;
      break;
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      supported = has.has_gelu;
      break;
    case CUBLASLT_EPILOGUE_DGELU:
      supported = has.has_gelu_gradient;
      break;
    case CUBLASLT_EPILOGUE_BGRADB:
      supported = has.has_bias_gradient;
      break;
    default:
      break;
  }
  if (!supported) return has.missing;
  return Valid((!p.has_vector() || p.op.bias != nullptr) &&
               (!p.has_aux() || p.op.aux != nullptr));
}

cublasStatus_t Check(const Problem& p, const CublasLt& has) {
  for (const cublasStatus_t status :
       {CheckShapes(p), CheckTypes(p), CheckEpilogue(p, has)}) {
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return CUBLAS_STATUS_SUCCESS;
}

// Of everything that determines an algorithm, except pointers.
uint64_t HashOf(Problem p) {
  p.op.bias = p.op.aux = nullptr;
  uint64_t hash = 14695981039346656037ull;
  const auto add = [&](uint64_t value) {
    hash = (hash ^ value) * 1099511628211ull;
  };
  for (const Layout* x : {&p.a, &p.b, &p.c, &p.d}) {
    add(x->type);
    add(x->rows);
    add(x->cols);
    add(static_cast<uint64_t>(x->ld));
  }
  add(p.op.compute);
  add(static_cast<uint64_t>(2 * p.op.trans_a + p.op.trans_b));
  add(p.op.epilogue);
  add(static_cast<uint64_t>(p.op.aux_ld));
  return hash;
}

uint16_t AlignmentOf(const void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  if (address == 0) return 1;
  return static_cast<uint16_t>(
      std::min<uintptr_t>(address & -address, kMaxAlignment));
}

bool IsAligned(const void* p, uint16_t alignment) {
  return reinterpret_cast<uintptr_t>(p) % alignment == 0;
}

// Whether strides keep an alignment that was promised for the first element:
// an algorithm with wide loads needs both.
bool IsUnaligned(const Problem& p, const Preference& preference) {
  const auto unaligned = [](const Layout& x, uint32_t promise) {
    return IsShort(x.type) &&
           (promise < 16 || x.ld * BytesOf(x.type) % 16 != 0);
  };
  return unaligned(p.a, preference.align_a) ||
         unaligned(p.b, preference.align_b);
}

std::vector<Algorithm> Candidates(const Problem& p,
                                  const Preference& preference) {
  Algorithm algorithm = {};
  algorithm.of = HashOf(p);
  algorithm.align_a = static_cast<uint16_t>(preference.align_a);
  algorithm.align_b = static_cast<uint16_t>(preference.align_b);
  algorithm.align_c = static_cast<uint16_t>(preference.align_c);
  algorithm.align_d = static_cast<uint16_t>(preference.align_d);
  algorithm.align_bias = p.has_vector() ? AlignmentOf(p.op.bias) : 1;
  algorithm.align_aux = p.has_aux() ? AlignmentOf(p.op.aux) : 1;
  std::vector<Algorithm> candidates;
  const auto add = [&](Sum sum, uint64_t workspace) {
    algorithm.sum = sum;
    algorithm.workspace = workspace;
    candidates.push_back(algorithm);
  };
  const uint32_t unordered =
      CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  if (preference.schemes & unordered) add(Sum::kUnordered, 0);
  add(Sum::kBackward, std::min(preference.workspace, kSmallWorkspace));
  add(Sum::kForward, 0);
  add(Sum::kForward, preference.workspace);
  return candidates;
}

// ---- Arithmetic -----------------------------------------------------------

double Gelu(double x) {
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1 + std::tanh(u));
}
double GeluSlope(double x) {
  const double root = std::sqrt(2 / M_PI);
  const double t = std::tanh(root * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) +
         0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

float Read(const void* data, cudaDataType_t type, int64_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == CUDA_R_16BF ? BF16ToF32(bits) : F16ToF32(bits);
}
void Write(void* data, cudaDataType_t type, int64_t i, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<uint16_t*>(data)[i] =
        type == CUDA_R_16BF ? F32ToBF16(value) : F32ToF16(value);
  }
}

// To 10 bits of mantissa, to nearest.
float ToTf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((bits + 0x1000u) & ~0x1fffu);
}

struct Call {
  Problem problem;
  Algorithm algorithm;
  float alpha, beta;
  const void *a, *b, *c;
  void *d, *workspace;
};

// op(x) with the summed dimension innermost: outer rows of k floats.
std::vector<float> Pack(const void* data, const Layout& x, bool k_is_row,
                        int64_t outer, int64_t k, bool tf32) {
  std::vector<float> packed(static_cast<size_t>(outer * k));
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      const int64_t at = k_is_row ? j + i * x.ld : i + j * x.ld;
      const float value = Read(data, x.type, at);
      packed[static_cast<size_t>(i * k + j)] = tf32 ? ToTf32(value) : value;
    }
  }
  return packed;
}

// In 16 lanes of fp32, then over the lanes in the algorithm's order.
float Dot(const float* a, const float* b, int64_t k, Sum order) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (; i < k; ++i) lanes[i % kLanes] += a[i] * b[i];
  static std::atomic<int> calls{0};
  const int first = order == Sum::kForward    ? 0
                    : order == Sum::kBackward ? kLanes - 1
                                              : calls++ % kLanes;
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j ^ first];
  return sum;
}

float Finish(const Call& call, float sum, int64_t row, int64_t col) {
  const Problem& p = call.problem;
  const int64_t aux = row + col * p.op.aux_ld;
  if (p.Has(CUBLASLT_EPILOGUE_DGELU)) {
    return static_cast<float>(sum * GeluSlope(Read(p.op.aux, p.d.type, aux)));
  }
  if (!p.Has(CUBLASLT_EPILOGUE_GELU)) return sum;
  if (p.has_aux()) Write(p.op.aux, p.d.type, aux, sum);
  return static_cast<float>(Gelu(sum));
}

void SumRowsOfB(const Call& call, const std::vector<float>& b) {
  const Problem& p = call.problem;
  for (int64_t j = 0; j < p.n(); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < p.k(); ++i) {
      sum += b[static_cast<size_t>(j * p.k() + i)];
    }
    Write(p.op.bias, p.d.type, j, static_cast<float>(sum));
  }
}

void Multiply(const Call& call) {
  const Problem& p = call.problem;
  const int64_t m = p.m(), n = p.n(), k = p.k();
  const bool tf32 = p.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const std::vector<float> a =
      Pack(call.a, p.a, p.op.trans_a == CUBLAS_OP_T, m, k, tf32);
  const std::vector<float> b =
      Pack(call.b, p.b, p.op.trans_b == CUBLAS_OP_N, n, k, tf32);
  if (call.algorithm.workspace > 0) {
    std::memset(call.workspace, 0xff, call.algorithm.workspace);
  }
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      float sum = call.alpha * Dot(&a[static_cast<size_t>(i * k)],
                                   &b[static_cast<size_t>(j * k)], k,
                                   call.algorithm.sum);
      if (call.beta != 0) {
        sum += call.beta * Read(call.c, p.c.type, i + j * p.c.ld);
      }
      if (p.Has(CUBLASLT_EPILOGUE_BIAS)) {
        sum += Read(p.op.bias, p.d.type, i);
      }
      Write(call.d, p.d.type, i + j * p.d.ld, Finish(call, sum, i, j));
    }
  }
  if (p.Has(CUBLASLT_EPILOGUE_BGRADB)) SumRowsOfB(call, b);
}

cublasStatus_t CheckCall(const Call& call, size_t workspace_bytes,
                         const CublasLt& has) {
  const Problem& p = call.problem;
  const Algorithm& algorithm = call.algorithm;
  const bool accumulates_short =
      call.beta != 0 && p.d.type == CUDA_R_32F && IsShort(p.a.type);
  if (algorithm.of != HashOf(p) ||
      (accumulates_short && !has.accumulates_into_f32) ||
      (algorithm.sum == Sum::kBackward && !has.runs_first)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool aligned =
      IsAligned(call.a, algorithm.align_a) &&
      IsAligned(call.b, algorithm.align_b) &&
      IsAligned(call.c, algorithm.align_c) &&
      IsAligned(call.d, algorithm.align_d) &&
      (!p.has_vector() || IsAligned(p.op.bias, algorithm.align_bias)) &&
      (!p.has_aux() ||
       IsAligned(p.op.aux,
                 std::max<uint16_t>(kAuxAlignment, algorithm.align_aux)));
  const bool in_place = call.c == call.d;
  return Valid(aligned && call.a != nullptr && call.b != nullptr &&
               call.c != nullptr && call.d != nullptr &&
               (!in_place || p.c.ld == p.d.ld) &&
               workspace_bytes >= algorithm.workspace &&
               (algorithm.workspace == 0 || call.workspace != nullptr) &&
               IsAligned(call.workspace, kMaxAlignment));
}

CublasLt Limits() {
  const std::lock_guard<std::mutex> lock(mutex);
  return limits;
}

bool WasToldToFail(const char* name) { return Called(name) != cudaSuccess; }

}  // namespace

void SetCublasLt(const CublasLt& what) {
  const std::lock_guard<std::mutex> lock(mutex);
  limits = what;
}

}  // namespace zero::emulator

using namespace zero::emulator;  // NOLINT: the functions below are C

extern "C" {

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (WasToldToFail(__func__)) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = reinterpret_cast<cublasLtHandle_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<char*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout,
                                                 size_t, cudaDataType type,
                                                 uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  Store(Layout{type, rows, cols, ld}, *layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc,
                                               size_t,
                                               cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  Operation op = {};
  op.compute = compute;
  op.scale = scale;
  op.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  Store(op, *desc);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
    const void* value, size_t bytes) {
  Operation op = Load<Operation>(*desc);
  bool valid = false;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      valid = Assign(op.trans_a, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_TRANSB:
      valid = Assign(op.trans_b, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      valid = Assign(op.epilogue, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      valid = Assign(op.bias, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      valid = Assign(op.aux, value, bytes);
      break;
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      valid = Assign(op.aux_ld, value, bytes);
      break;
    default:
      break;
  }
  Store(op, *desc);
  return Valid(valid);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(
    cublasLtMatmulPreference_t preference, size_t) {
  Store(Preference{0, CUBLASLT_REDUCTION_SCHEME_MASK, kMaxAlignment,
                   kMaxAlignment, kMaxAlignment, kMaxAlignment},
        *preference);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference,
    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
    size_t bytes) {
  Preference p = Load<Preference>(*preference);
  bool valid = false;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      valid = Assign(p.workspace, value, bytes);
      break;
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      valid = Assign(p.schemes, value, bytes);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      valid = Assign(p.align_a, value, bytes);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      valid = Assign(p.align_b, value, bytes);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      valid = Assign(p.align_c, value, bytes);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      valid = Assign(p.align_d, value, bytes);
      break;
    default:
      break;
  }
  Store(p, *preference);
  return Valid(valid);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
    int requested, cublasLtMatmulHeuristicResult_t results[], int* returned) {
  *returned = 0;
  if (WasToldToFail(__func__)) return CUBLAS_STATUS_INTERNAL_ERROR;
  const Problem problem = {Load<Operation>(*desc), Load<Layout>(*a),
                           Load<Layout>(*b), Load<Layout>(*c),
                           Load<Layout>(*d)};
  const CublasLt has = Limits();
  const Preference wanted = Load<Preference>(*preference);
  const cublasStatus_t status = Check(problem, has);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (IsUnaligned(problem, wanted) && !has.has_unaligned) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  for (const Algorithm& algorithm : Candidates(problem, wanted)) {
    if (*returned == requested) break;
    cublasLtMatmulHeuristicResult_t& result = results[(*returned)++];
    result = {};
    Store(algorithm, result.algo);
    result.workspaceSize = algorithm.workspace;
    result.state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                              const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout,
                              void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm,
                              void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  if (WasToldToFail(__func__)) return CUBLAS_STATUS_EXECUTION_FAILED;
  Call call = {};
  call.problem = {Load<Operation>(*desc), Load<Layout>(*a_layout),
                  Load<Layout>(*b_layout), Load<Layout>(*c_layout),
                  Load<Layout>(*d_layout)};
  call.algorithm = Load<Algorithm>(*algorithm);
  call.alpha = *static_cast<const float*>(alpha);
  call.beta = *static_cast<const float*>(beta);
  call.a = a;
  call.b = b;
  call.c = c;
  call.d = d;
  call.workspace = workspace;
  const CublasLt has = Limits();
  for (const cublasStatus_t status :
       {Check(call.problem, has), CheckCall(call, workspace_bytes, has)}) {
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  const cudaError_t error = Enqueue(stream, [call] { Multiply(call); });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                              : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
