#include "kernels/cuda/cudnn_attention.h"

#include <cudnn_frontend.h>

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/packed_attention.h"
#include "kernels/dtype.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

// "attention forward of packed bf16 [B 4, T 1024, H 8, K 2, D 64]"
std::string Describe(const AttentionCall& call) {
  const AttentionShape& s = call.shape;
  const std::string length = s.q_len == s.kv_len
                                 ? absl::StrCat(s.q_len)
                                 : absl::StrCat(s.q_len, " of ", s.kv_len);
  return absl::StrCat("attention ", call.is_backward ? "backward" : "forward",
                      " of ", call.is_packed() ? "packed " : "",
                      DTypeName(s.dtype), " [B ", s.batch, ", T ", length,
                      ", H ", s.num_heads, ", K ", s.num_kv_heads, ", D ",
                      s.head_dim, "]");
}

// ---- Graphs ---------------------------------------------------------------

// The facts that a graph depends on besides its call.
struct Variant {
  bool deterministic;
  int sm;
  int64_t num_sequences;  // 0: not packed, every row is one
};

void SetUp(const AttentionShape& shape, int sm, Graph& graph) {
  graph.set_io_data_type(shape.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16
                                                     : fe::DataType_t::HALF);
  graph.set_intermediate_data_type(fe::DataType_t::FLOAT);
  graph.set_compute_data_type(fe::DataType_t::FLOAT);
  graph.set_sm_version(sm);
}

TensorPtr InputIndex(int64_t id, const char* name, int64_t size,
                     fe::DataType_t type, Graph& graph) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(id)
                          .set_dim({size, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(type));
}
// The tokens of each sequence of a packed graph begin at an offset of their
// own.
void PutOffsets(AttentionOperand id, int64_t num_sequences, Graph& graph,
                fe::graph::Tensor_attributes& tensor) {
  if (num_sequences == 0) return;
  tensor.set_ragged_offset(InputIndex(OffsetsOf(id), "offsets",
                                      num_sequences + 1, fe::DataType_t::INT64,
                                      graph));
}

void Put(const AttentionCall& call, const OperandPlace& place,
         int64_t num_sequences, Graph& graph,
         fe::graph::Tensor_attributes& tensor) {
  const AttentionShape& s = call.shape;
  tensor.set_name(place.name)
      .set_uid(place.id)
      .set_dim({num_sequences > 0 ? num_sequences : s.batch,
                NumHeads(s, place.id), s.q_len, s.head_dim})
      .set_stride(
          {BatchStride(call, place), s.head_dim, TokenStride(call, place), 1});
  PutOffsets(place.id, num_sequences, graph, tensor);
}
// The statistics of a packed graph lie token by token, [B * T, H]: with those
// of each head side by side cuDNN's backward pass goes wrong (its frontend's
// pull request 462).
void PutLse(const AttentionCall& call, int64_t num_sequences, Graph& graph,
            fe::graph::Tensor_attributes& tensor) {
  const int64_t heads = call.shape.num_heads, length = call.shape.q_len;
  const bool packed = num_sequences > 0;
  tensor.set_name("lse")
      .set_uid(kLse)
      .set_data_type(fe::DataType_t::FLOAT)
      .set_dim({packed ? num_sequences : call.shape.batch, heads, length, 1})
      .set_stride({heads * length, packed ? 1 : length, packed ? heads : 1, 1});
  PutOffsets(kLse, num_sequences, graph, tensor);
}

TensorPtr Input(const AttentionCall& call, size_t i, int64_t num_sequences,
                Graph& graph) {
  fe::graph::Tensor_attributes tensor;
  Put(call, call.places[i], num_sequences, graph, tensor);
  return graph.tensor(tensor);
}
void Output(const AttentionCall& call, size_t i, int64_t num_sequences,
            Graph& graph, const TensorPtr& tensor) {
  Put(call, call.places[i], num_sequences, graph, *tensor);
  tensor->set_output(true);
}

// Sets the attributes that both directions share. Sequences have as many
// queries as keys, so that the diagonal begins at the top left of each.
template <class Attributes>
void PutMask(const AttentionCall& call, int64_t num_sequences, Graph& graph,
             Attributes& attributes) {
  attributes.set_attn_scale(call.shape.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  if (num_sequences == 0) return;
  const auto lengths = [&](AttentionOperand id, const char* name) {
    return InputIndex(id, name, num_sequences, fe::DataType_t::INT32, graph);
  };
  attributes.set_padding_mask(true)
      .set_seq_len_q(lengths(kQueryLengths, "query lengths"))
      .set_seq_len_kv(lengths(kKeyLengths, "key lengths"));
}

void MakeForward(const AttentionCall& call, const Variant& variant,
                 Graph& graph) {
  const int64_t n = variant.num_sequences;
  fe::graph::SDPA_attributes attributes;
  attributes.set_name("attention").set_generate_stats(call.has_lse());
  PutMask(call, n, graph, attributes);
  auto [out, lse] =
      graph.sdpa(Input(call, 0, n, graph), Input(call, 1, n, graph),
                 Input(call, 2, n, graph), attributes);
  Output(call, 3, n, graph, out);
  if (!call.has_lse()) return;
  PutLse(call, n, graph, *lse);
  lse->set_output(true);
}

void MakeBackward(const AttentionCall& call, const Variant& variant,
                  Graph& graph) {
  const int64_t n = variant.num_sequences;
  fe::graph::SDPA_backward_attributes attributes;
  attributes.set_name("attention backward")
      .set_deterministic_algorithm(variant.deterministic);
  PutMask(call, n, graph, attributes);
  if (n > 0) {
    // Without this the workspace is for T tokens of every sequence.
    attributes.set_max_total_seq_len_q(call.num_tokens())
        .set_max_total_seq_len_kv(call.num_tokens());
  }
  fe::graph::Tensor_attributes lse;
  PutLse(call, n, graph, lse);
  auto [dq, dk, dv] = graph.sdpa_backward(
      Input(call, 0, n, graph), Input(call, 1, n, graph),
      Input(call, 2, n, graph), Input(call, 3, n, graph),
      Input(call, 4, n, graph), graph.tensor(lse), attributes);
  Output(call, 5, n, graph, dq);
  Output(call, 6, n, graph, dk);
  Output(call, 7, n, graph, dv);
}

// The text of cuDNN's error; "" if there is none.
std::string Complaint(fe::error_t error) {
  return error.is_good() ? "" : error.get_message();
}

// Returns an error's text instead of throwing: the frontend does both.
template <class Fn>
std::string Guarded(const Fn& fn) {
  try {
    return fn();
  } catch (const std::exception& e) {
    return e.what();
  }
}

// handle may be null, where there is no device.
std::string Validate(const AttentionCall& call, const Variant& variant,
                     cudnnHandle_t handle, Graph& graph) {
  return Guarded([&] {
    SetUp(call.shape, variant.sm, graph);
    (call.is_backward ? MakeBackward : MakeForward)(call, variant, graph);
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
  size_t graph_bytes = 0;      // of cuDNN's own workspace
  size_t workspace_bytes = 0;  // of the call's
};

// Everything that a graph depends on.
using Key = std::vector<int64_t>;

Key KeyOf(const AttentionCall& call, int64_t num_sequences) {
  const AttentionShape& s = call.shape;
  Key key = {static_cast<int64_t>(s.dtype),
             s.batch,
             s.q_len,
             s.num_heads,
             s.num_kv_heads,
             s.head_dim,
             std::bit_cast<int32_t>(s.scale),
             call.has_lse(),
             num_sequences};
  for (const OperandPlace& place : call.places) {
    key.insert(key.end(), {place.batch_stride, place.token_stride});
  }
  return key;  // longer for the backward pass, so never taken for the other's
}

char* AlignWorkspace(void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return reinterpret_cast<char*>(RoundUp(address, kWorkspaceAlignment));
}

bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kOperandAlignment == 0;
}

}  // namespace

struct AttentionPlans::State {
  CudnnRules rules = {};
  cudnnHandle_t handle = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans;  // null: cuDNN refuses
  std::vector<std::string> notes;

  void Note(std::string note) {
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) {
      notes.push_back(std::move(note));
    }
  }
  void NoteOwnKernel(const AttentionCall& call, const std::string& why) {
    Note(absl::StrCat(Describe(call), " runs on our own kernel: ", why));
  }

  bool Takes(const AttentionCall& call) const {
    return handle != nullptr && IsAsked(call, rules);
  }

  // The plan of a call for which cuDNN is asked; null where it refuses.
  Plan* Find(const AttentionCall& call, int64_t num_sequences) {
    const auto [it, is_new] = plans.try_emplace(KeyOf(call, num_sequences));
    if (is_new) it->second = Build(call, num_sequences);
    return it->second.get();
  }

  std::unique_ptr<Plan> Build(const AttentionCall& call,
                              int64_t num_sequences) {
    auto plan = std::make_unique<Plan>();
    std::string complaint =
        Validate(call, {rules.deterministic, SmVersion(), num_sequences},
                 handle, plan->graph);
    if (complaint.empty()) complaint = Compile(plan->graph);
    int64_t bytes = 0;
    if (complaint.empty()) {
      complaint = Complaint(plan->graph.get_workspace_size(bytes));
    }
    if (!complaint.empty()) {
      NoteOwnKernel(
          call, absl::StrCat(CudnnVersionText(rules.version), ": ", complaint));
      return nullptr;
    }
    plan->graph_bytes = static_cast<size_t>(bytes);
    const size_t total =
        call.is_packed() ? SpaceOf(call, num_sequences, plan->graph_bytes).end
                         : plan->graph_bytes;
    plan->workspace_bytes = total == 0 ? 0 : total + kWorkspaceAlignment - 1;
    return plan;
  }

  // The largest workspace of the call's graphs: which of them runs depends on
  // the packing, and the workspace must not. All of them are built, since what
  // cuDNN adds to the frontend's parts may depend on the number of sequences.
  std::optional<size_t> Bytes(const AttentionCall& call) {
    if (!Takes(call)) {
      NoteShape(call);
      return std::nullopt;
    }
    std::optional<size_t> bytes;
    for (const int64_t num_sequences : GraphsOf(call)) {
      const Plan* const plan = Find(call, num_sequences);
      if (plan == nullptr) continue;
      bytes = std::max(bytes.value_or(0), plan->workspace_bytes);
    }
    return bytes;
  }

  // Adds a note where a model's own shape or layout keeps training off the
  // tensor cores. A few tokens need no note.
  void NoteShape(const AttentionCall& call) {
    const AttentionShape& s = call.shape;
    if (s.dtype == DType::kF32 || s.q_len != s.kv_len) return;
    if (s.q_len < kMinCudnnTokens) return;
    std::string why;
    if (!IsAsked(call, rules, &why)) NoteOwnKernel(call, why);
  }

  // Notes the first operand that cuDNN cannot read where it lies. The
  // statistics of a packed graph lie in the workspace.
  bool AreAligned(const AttentionCall& call) {
    const auto check = [&](const char* name, const void* data) {
      if (IsAligned(data)) return true;
      NoteOwnKernel(call, absl::StrCat(name, " is not at a multiple of ",
                                       kOperandAlignment, " bytes; align it"));
      return false;
    };
    for (const OperandPlace& place : call.places) {
      if (!check(place.name, place.data)) return false;
    }
    return call.is_packed() || check("lse", call.lse);
  }

  // The number of sequences of the graph that runs the call; nullopt where
  // none has as many.
  std::optional<int64_t> Choose(const AttentionCall& call) {
    const std::vector<int64_t> graphs = GraphsOf(call);
    if (!call.is_packed()) return graphs.front();
    for (const int64_t num_sequences : graphs) {
      if (call.packed.count <= num_sequences) return num_sequences;
    }
    NoteOwnKernel(
        call, absl::StrCat("more than ", graphs.back(),
                           " sequences; pack longer ones, or fewer in a row"));
    return std::nullopt;
  }

  bool Run(cudaStream_t stream, const AttentionCall& call,
           Workspace workspace) {
    if (!Takes(call)) return false;
    const std::optional<int64_t> num_sequences = Choose(call);
    if (!num_sequences.has_value()) return false;
    Plan* const plan = Find(call, *num_sequences);
    if (plan == nullptr || !AreAligned(call)) return false;
    ZERO_CHECK_GE(workspace.bytes, plan->workspace_bytes) << Describe(call);
    char* data = AlignWorkspace(workspace.data);
    OperandPointers pointers = PointersOf(call);
    if (call.is_packed()) {
      const PackedSpace space =
          SpaceOf(call, *num_sequences, plan->graph_bytes);
      BeforePacked(stream, call, *num_sequences, space, data, pointers);
      data += space.graph;
    }
    const std::string complaint = Guarded([&] {
      const cudnnStatus_t status = cudnnSetStream(handle, stream);
      if (status != CUDNN_STATUS_SUCCESS) {
        return std::string(cudnnGetErrorString(status));
      }
      return Complaint(plan->graph.execute(handle, pointers, data));
    });
    if (!complaint.empty()) {
      ThrowDeviceError(
          Describe(call).c_str(), __FILE__, __LINE__,
          absl::StrCat(CudnnVersionText(rules.version), ": ", complaint));
    }
    if (call.is_packed()) AfterPacked(stream, call, pointers);
    return true;
  }
};

// The handle is made here and not on first use, so that its memory counts as
// the device's own and not as a step's.
AttentionPlans::AttentionPlans(bool deterministic)
    : state_(std::make_unique<State>()) {
  state_->rules = {deterministic, cudnnGetVersion()};
  const cudnnStatus_t status = cudnnCreate(&state_->handle);
  if (status == CUDNN_STATUS_SUCCESS) return;
  state_->handle = nullptr;
  state_->Note(absl::StrCat("attention runs on our own kernel: ",
                            CudnnVersionText(state_->rules.version),
                            " does not start: ", cudnnGetErrorString(status)));
}

AttentionPlans::~AttentionPlans() {
  state_->plans.clear();
  if (state_->handle != nullptr) cudnnDestroy(state_->handle);
}

std::optional<size_t> AttentionPlans::WorkspaceBytes(
    const AttentionCall& call) {
  return state_->Bytes(call);
}
bool AttentionPlans::Run(cudaStream_t stream, const AttentionCall& call,
                         Workspace workspace) {
  return state_->Run(stream, call, workspace);
}

std::vector<std::string> AttentionPlans::notes() const { return state_->notes; }

absl::Status ValidateCudnnAttention(const AttentionCall& call,
                                    bool deterministic,
                                    const CudnnTarget& target) {
  std::string why;
  if (!IsAsked(call, {deterministic, target.version}, &why)) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(call), ": ", why));
  }
  for (const int64_t num_sequences : GraphsOf(call)) {
    Graph graph;
    const std::string complaint = Validate(
        call, {deterministic, target.sm, num_sequences}, nullptr, graph);
    if (complaint.empty()) continue;
    return absl::UnimplementedError(
        absl::StrCat(Describe(call), ": ", CudnnVersionText(cudnnGetVersion()),
                     " refuses it on sm_", target.sm, ": ", complaint));
  }
  return absl::OkStatus();
}

}  // namespace zero::cuda
