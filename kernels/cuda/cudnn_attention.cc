#include "kernels/cuda/cudnn_attention.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/dtype.h"

namespace zero::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// Bytes that the operands' rows lie on, and that cuDNN plans with.
constexpr int64_t kAlignment = 16;
// cudaMalloc's promise, which cuDNN may rely on for its workspace; an arena's
// is 64 bytes.
constexpr size_t kWorkspaceAlignment = 256;
constexpr int64_t kMaxHeadDim = 256;
// Below, our own kernel is as good, and prompts of every length would each
// build a graph.
constexpr int64_t kMinTokens = 64;

enum Operand : int64_t { kQ = 1, kK, kV, kOut, kLse, kDout, kDq, kDk, kDv };

// Where an operand's heads lie; its pointer comes with each call.
struct Place {
  Operand id;
  const char* name;
  const void* data;
  int64_t batch_stride;
  int64_t token_stride;
};
template <class Ref>
Place PlaceOf(Operand id, const char* name, const Ref& x) {
  return {id, name, x.data, x.batch_stride, x.token_stride};
}
std::vector<Place> PlacesOf(const AttentionForwardArgs& args) {
  return {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
          PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out)};
}
std::vector<Place> PlacesOf(const AttentionBackwardArgs& args) {
  return {PlaceOf(kQ, "q", args.q),          PlaceOf(kK, "k", args.k),
          PlaceOf(kV, "v", args.v),          PlaceOf(kOut, "out", args.out),
          PlaceOf(kDout, "dout", args.dout), PlaceOf(kDq, "dq", args.dq),
          PlaceOf(kDk, "dk", args.dk),       PlaceOf(kDv, "dv", args.dv)};
}
constexpr const char* NameOf(const AttentionForwardArgs&) { return "forward"; }
constexpr const char* NameOf(const AttentionBackwardArgs&) {
  return "backward";
}

// "attention forward of bf16 [B 4, T 1024, H 8, K 2, D 64]"
template <class Args>
std::string Describe(const Args& args) {
  const AttentionShape& s = args.shape;
  const std::string length = s.q_len == s.kv_len
                                 ? absl::StrCat(s.q_len)
                                 : absl::StrCat(s.q_len, " of ", s.kv_len);
  return absl::StrCat("attention ", NameOf(args), " of ", DTypeName(s.dtype),
                      " [B ", s.batch, ", T ", length, ", H ", s.num_heads,
                      ", K ", s.num_kv_heads, ", D ", s.head_dim, "]");
}

// Why cuDNN is not asked, and what to do about it; empty: it is asked.
std::string WhyNotAsked(const AttentionShape& s,
                        const std::vector<Place>& places) {
  if (s.num_kv_heads <= 0 || s.num_heads % s.num_kv_heads != 0) {
    return absl::StrCat("num_kv_heads ", s.num_kv_heads,
                        " does not divide num_heads ", s.num_heads,
                        "; every kv head serves as many query heads");
  }
  if (s.dtype != DType::kBF16 && s.dtype != DType::kF16) {
    return "cuDNN computes bf16 and fp16; train in bf16 to use it";
  }
  if (s.head_dim <= 0 || s.head_dim % 8 != 0) {
    return absl::StrCat("head_dim ", s.head_dim,
                        " is not a multiple of 8; choose one that is");
  }
  if (s.head_dim > kMaxHeadDim) {
    return absl::StrCat("head_dim ", s.head_dim, " is more than ", kMaxHeadDim,
                        "; use more heads that are narrower");
  }
  if (s.q_len != s.kv_len) {
    return "a cache of keys grows with every token, and a graph has one "
           "length; generation runs on our own kernel";
  }
  if (s.q_len < kMinTokens) {
    return absl::StrCat("fewer than ", kMinTokens,
                        " tokens run on our own kernel");
  }
  for (const Place& place : places) {
    for (const int64_t stride : {place.batch_stride, place.token_stride}) {
      if (stride % 8 == 0) continue;
      return absl::StrCat("a stride of ", place.name, " is ", stride,
                          " elements, not a multiple of 8; pad its rows to ",
                          kAlignment, " bytes");
    }
  }
  return "";
}

// ---- Graphs ---------------------------------------------------------------

void SetUp(const AttentionShape& shape, int sm, Graph& graph) {
  graph.set_io_data_type(shape.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16
                                                     : fe::DataType_t::HALF);
  graph.set_intermediate_data_type(fe::DataType_t::FLOAT);
  graph.set_compute_data_type(fe::DataType_t::FLOAT);
  graph.set_sm_version(sm);
}

// Queries have H heads, keys and values K.
bool IsOfKeys(Operand id) {
  return id == kK || id == kV || id == kDk || id == kDv;
}

void Put(const AttentionShape& shape, const Place& place,
         fe::graph::Tensor_attributes& tensor) {
  tensor.set_name(place.name)
      .set_uid(place.id)
      .set_dim({shape.batch,
                IsOfKeys(place.id) ? shape.num_kv_heads : shape.num_heads,
                shape.q_len, shape.head_dim})
      .set_stride({place.batch_stride, shape.head_dim, place.token_stride, 1});
}
void PutLse(const AttentionShape& shape, fe::graph::Tensor_attributes& tensor) {
  const int64_t length = shape.q_len;
  tensor.set_name("lse")
      .set_uid(kLse)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({shape.batch, shape.num_heads, length, 1})
      .set_stride({shape.num_heads * length, length, 1, 1});
}

TensorPtr Input(const AttentionShape& shape, const Place& place, Graph& graph) {
  fe::graph::Tensor_attributes tensor;
  Put(shape, place, tensor);
  return graph.tensor(tensor);
}
void Output(const AttentionShape& shape, const Place& place,
            const TensorPtr& tensor) {
  Put(shape, place, *tensor);
  tensor->set_output(true);
}

void MakeGraph(const AttentionForwardArgs& args, bool /*deterministic*/, int sm,
               Graph& graph) {
  SetUp(args.shape, sm, graph);
  const std::vector<Place> at = PlacesOf(args);
  const bool with_lse = args.lse != nullptr;
  auto [out, lse] = graph.sdpa(
      Input(args.shape, at[0], graph), Input(args.shape, at[1], graph),
      Input(args.shape, at[2], graph),
      fe::graph::SDPA_attributes()
          .set_name("attention")
          .set_generate_stats(with_lse)
          .set_attn_scale(args.shape.scale)
          .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0));
  Output(args.shape, at[3], out);
  if (!with_lse) return;
  PutLse(args.shape, *lse);
  lse->set_output(true);
}

void MakeGraph(const AttentionBackwardArgs& args, bool deterministic, int sm,
               Graph& graph) {
  SetUp(args.shape, sm, graph);
  const std::vector<Place> at = PlacesOf(args);
  fe::graph::Tensor_attributes lse;
  PutLse(args.shape, lse);
  auto [dq, dk, dv] = graph.sdpa_backward(
      Input(args.shape, at[0], graph), Input(args.shape, at[1], graph),
      Input(args.shape, at[2], graph), Input(args.shape, at[3], graph),
      Input(args.shape, at[4], graph), graph.tensor(lse),
      fe::graph::SDPA_backward_attributes()
          .set_name("attention backward")
          .set_attn_scale(args.shape.scale)
          .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
          .set_diagonal_band_right_bound(0)
          .set_deterministic_algorithm(deterministic));
  Output(args.shape, at[5], dq);
  Output(args.shape, at[6], dk);
  Output(args.shape, at[7], dv);
}

// "" or what cuDNN says.
std::string Complaint(fe::error_t error) {
  return error.is_good() ? "" : error.get_message();
}

// Says what is wrong instead of throwing: the frontend does both.
template <class Fn>
std::string Guarded(const Fn& fn) {
  try {
    return fn();
  } catch (const std::exception& e) {
    return e.what();
  }
}

// handle may be null, where there is no device.
template <class Args>
std::string Validate(const Args& args, bool deterministic, int sm,
                     cudnnHandle_t handle, Graph& graph) {
  return Guarded([&] {
    MakeGraph(args, deterministic, sm, graph);
    std::string complaint = Complaint(graph.validate());
    if (!complaint.empty()) return complaint;
    return Complaint(graph.build_operation_graph(handle));
  });
}

std::string Compile(Graph& graph) {
  return Guarded([&] {
    std::string complaint =
        Complaint(graph.create_execution_plans({fe::HeurMode_t::A}));
    if (!complaint.empty()) return complaint;
    complaint = Complaint(graph.check_support());
    if (!complaint.empty()) return complaint;
    return Complaint(
        graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
  });
}

std::string VersionText() {
  const size_t version = cudnnGetVersion();
  return absl::StrCat("cuDNN ", version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

template <class Args>
absl::Status ValidateWithoutDevice(const Args& args, bool deterministic,
                                   int sm) {
  const std::string why = WhyNotAsked(args.shape, PlacesOf(args));
  if (!why.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(args), ": ", why));
  }
  Graph graph;
  const std::string complaint =
      Validate(args, deterministic, sm, nullptr, graph);
  if (complaint.empty()) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(Describe(args), ": ", VersionText(), " refuses it on sm_",
                   sm, ": ", complaint));
}

// The device that is current.
int SmVersion() {
  int device = 0, major = 0, minor = 0;
  ZERO_CUDA_CHECK(cudaGetDevice(&device));
  ZERO_CUDA_CHECK(cudaDeviceGetAttribute(
      &major, cudaDevAttrComputeCapabilityMajor, device));
  ZERO_CUDA_CHECK(cudaDeviceGetAttribute(
      &minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

struct Plan {
  Graph graph;
  size_t workspace_bytes = 0;
};

// All that a graph depends on.
using Key = std::vector<int64_t>;

template <class Args>
Key KeyOf(const Args& args, const std::vector<Place>& places) {
  const AttentionShape& s = args.shape;
  Key key = {static_cast<int64_t>(s.dtype),
             s.batch,
             s.q_len,
             s.num_heads,
             s.num_kv_heads,
             s.head_dim,
             std::bit_cast<int32_t>(s.scale),
             args.lse != nullptr};
  for (const Place& place : places) {
    key.insert(key.end(), {place.batch_stride, place.token_stride});
  }
  return key;  // longer for the backward pass, so never taken for the other's
}

void* AlignWorkspace(void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) /
                                 kWorkspaceAlignment * kWorkspaceAlignment);
}

bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0;
}

}  // namespace

struct AttentionPlans::State {
  bool deterministic = false;
  cudnnHandle_t handle = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans;  // null: cuDNN refuses
  std::vector<std::string> notes;

  void Note(std::string note) {
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) {
      notes.push_back(std::move(note));
    }
  }

  // Null where cuDNN does not take the call.
  template <class Args>
  Plan* Find(const Args& args) {
    const std::vector<Place> places = PlacesOf(args);
    if (handle == nullptr || !WhyNotAsked(args.shape, places).empty()) {
      return nullptr;
    }
    const auto [it, is_new] = plans.try_emplace(KeyOf(args, places));
    if (is_new) it->second = Build(args);
    return it->second.get();
  }

  template <class Args>
  std::unique_ptr<Plan> Build(const Args& args) {
    auto plan = std::make_unique<Plan>();
    std::string complaint =
        Validate(args, deterministic, SmVersion(), handle, plan->graph);
    if (complaint.empty()) complaint = Compile(plan->graph);
    int64_t bytes = 0;
    if (complaint.empty()) {
      complaint = Complaint(plan->graph.get_workspace_size(bytes));
    }
    if (!complaint.empty()) {
      Note(absl::StrCat(Describe(args), " runs on our own kernel: ",
                        VersionText(), ": ", complaint));
      return nullptr;
    }
    plan->workspace_bytes =
        bytes == 0 ? 0 : static_cast<size_t>(bytes) + kWorkspaceAlignment - 1;
    return plan;
  }

  template <class Args>
  std::optional<size_t> Bytes(const Args& args) {
    NoteWidth(args);
    const Plan* const plan = Find(args);
    if (plan == nullptr) return std::nullopt;
    return plan->workspace_bytes;
  }

  // Says so where a model's own shape keeps training off the tensor cores.
  template <class Args>
  void NoteWidth(const Args& args) {
    const AttentionShape& s = args.shape;
    if (s.dtype == DType::kF32 || s.q_len != s.kv_len) return;
    if (s.head_dim % 8 == 0 && s.head_dim <= kMaxHeadDim) return;
    Note(absl::StrCat(Describe(args), " runs on our own kernel: ",
                      WhyNotAsked(s, PlacesOf(args))));
  }

  template <class Args>
  bool Run(cudaStream_t stream, const Args& args, Workspace workspace) {
    Plan* const plan = Find(args);
    if (plan == nullptr || !IsAligned(args.lse)) return false;
    std::unordered_map<int64_t, void*> pointers;
    for (const Place& place : PlacesOf(args)) {
      if (!IsAligned(place.data)) return false;
      pointers[place.id] = const_cast<void*>(place.data);
    }
    if (args.lse != nullptr) pointers[kLse] = const_cast<float*>(args.lse);
    ZERO_CHECK_GE(workspace.bytes, plan->workspace_bytes) << Describe(args);
    const std::string complaint = Guarded([&] {
      const cudnnStatus_t status = cudnnSetStream(handle, stream);
      if (status != CUDNN_STATUS_SUCCESS) {
        return std::string(cudnnGetErrorString(status));
      }
      return Complaint(plan->graph.execute(handle, pointers,
                                           AlignWorkspace(workspace.data)));
    });
    if (!complaint.empty()) {
      ThrowDeviceError(Describe(args).c_str(), __FILE__, __LINE__,
                       absl::StrCat(VersionText(), ": ", complaint));
    }
    return true;
  }
};

// The handle is made here and not on first use, so that its memory counts as
// the device's own and not as a step's.
AttentionPlans::AttentionPlans(bool deterministic)
    : state_(std::make_unique<State>()) {
  state_->deterministic = deterministic;
  const cudnnStatus_t status = cudnnCreate(&state_->handle);
  if (status == CUDNN_STATUS_SUCCESS) return;
  state_->handle = nullptr;
  state_->Note(absl::StrCat("attention runs on our own kernel: ", VersionText(),
                            " does not start: ", cudnnGetErrorString(status)));
}

AttentionPlans::~AttentionPlans() {
  state_->plans.clear();
  if (state_->handle != nullptr) cudnnDestroy(state_->handle);
}

std::optional<size_t> AttentionPlans::WorkspaceBytes(
    const AttentionForwardArgs& args) {
  return state_->Bytes(args);
}
std::optional<size_t> AttentionPlans::WorkspaceBytes(
    const AttentionBackwardArgs& args) {
  return state_->Bytes(args);
}

bool AttentionPlans::Forward(cudaStream_t stream,
                             const AttentionForwardArgs& args,
                             Workspace workspace) {
  return state_->Run(stream, args, workspace);
}
bool AttentionPlans::Backward(cudaStream_t stream,
                              const AttentionBackwardArgs& args,
                              Workspace workspace) {
  return state_->Run(stream, args, workspace);
}

std::string AttentionPlans::notes() const {
  return absl::StrJoin(state_->notes, "; ");
}

absl::Status ValidateCudnnAttention(const AttentionForwardArgs& args, int sm) {
  return ValidateWithoutDevice(args, /*deterministic=*/false, sm);
}
absl::Status ValidateCudnnAttention(const AttentionBackwardArgs& args,
                                    bool deterministic, int sm) {
  return ValidateWithoutDevice(args, deterministic, sm);
}

}  // namespace zero::cuda
