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
#include "kernels/cuda/packed_sequences.h"
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

// Tokens of the sequences for which a packed graph of its own is built: a graph
// launches blocks for q_len tokens of as many sequences as it has, so the
// shorter they may be, the more blocks find nothing to do. Shorter ones than
// the last on average run on our own kernel.
constexpr int64_t kTokensOfSequences[] = {256, 32};
// Before it, gradients of packed sequences could be wrong on Hopper, whose
// workspace was not cleared (TransformerEngine's issue 2186).
constexpr size_t kPackedVersion = 91800;

enum Operand : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDq,
  kDk,
  kDv,
  kQueryLengths,  // of packed sequences
  kKeyLengths,
};
// The id of an operand's table of offsets, in a packed graph.
constexpr int64_t OffsetsOf(Operand id) { return 100 + id; }

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

// A call of either direction.
struct Call {
  bool is_backward;
  AttentionShape shape;
  PackedSequences packed;
  std::vector<Place> places;
  const float* lse;  // null: not wanted
  float* new_lse;    // the same, where the call writes it

  bool is_packed() const { return packed.positions != nullptr; }
  bool has_lse() const { return is_backward || lse != nullptr; }
  int64_t num_tokens() const { return shape.batch * shape.q_len; }
};
Call CallOf(const AttentionForwardArgs& args) {
  return {false,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out)},
          args.lse,
          args.lse};
}
Call CallOf(const AttentionBackwardArgs& args) {
  return {true,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out),
           PlaceOf(kDout, "dout", args.dout), PlaceOf(kDq, "dq", args.dq),
           PlaceOf(kDk, "dk", args.dk), PlaceOf(kDv, "dv", args.dv)},
          args.lse,
          nullptr};
}

// "attention forward of packed bf16 [B 4, T 1024, H 8, K 2, D 64]"
std::string Describe(const Call& call) {
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

std::string VersionText() {
  const size_t version = cudnnGetVersion();
  return absl::StrCat("cuDNN ", version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

// Of packed sequences alone; as WhyNotAsked.
std::string WhyNotPacked(const Call& call, bool deterministic) {
  if (cudnnGetVersion() < kPackedVersion) {
    return absl::StrCat(VersionText(),
                        " may give wrong gradients of packed sequences; "
                        "install 9.18 or newer");
  }
  if (call.is_backward && deterministic) {
    return "a fixed order of summation takes cuDNN memory for T x T scores of "
           "every sequence; allow any order, or do not pack";
  }
  for (const Place& place : call.places) {
    if (place.batch_stride == call.shape.q_len * place.token_stride) continue;
    return absl::StrCat("rows of ", place.name, " are ", place.batch_stride,
                        " elements apart and not T times its ",
                        place.token_stride, " of a token; leave no gap");
  }
  return "";
}

// Why cuDNN is not asked, and what to do about it; empty: it is asked.
std::string WhyNotAsked(const Call& call, bool deterministic) {
  const AttentionShape& s = call.shape;
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
  for (const Place& place : call.places) {
    for (const int64_t stride : {place.batch_stride, place.token_stride}) {
      if (stride % 8 == 0) continue;
      return absl::StrCat("a stride of ", place.name, " is ", stride,
                          " elements, not a multiple of 8; pad its rows to ",
                          kAlignment, " bytes");
    }
  }
  return call.is_packed() ? WhyNotPacked(call, deterministic) : "";
}

// ---- Packed sequences -----------------------------------------------------

// The numbers of sequences that packed graphs have, ascending. Those that a
// batch does not have are of no queries and no keys, behind its last token, as
// in TransformerEngine's graphs.
std::vector<int64_t> SequencesOfGraphs(const Call& call) {
  std::vector<int64_t> numbers;
  for (const int64_t tokens : kTokensOfSequences) {
    const int64_t n = std::max(call.shape.batch, call.num_tokens() / tokens);
    if (numbers.empty() || n > numbers.back()) numbers.push_back(n);
  }
  return numbers;
}

// Queries have H heads, keys and values K.
bool IsOfKeys(Operand id) {
  return id == kK || id == kV || id == kDk || id == kDv;
}
int64_t NumHeads(const AttentionShape& shape, Operand id) {
  return IsOfKeys(id) ? shape.num_kv_heads : shape.num_heads;
}

// In packed graphs cuDNN sums dq in fp32 at the strides of dq, and where query
// heads share one of keys, it keeps the dk and dv of each query head at the
// strides of dk and dv times the number that share. For those of a packed
// projection that is many times the gradients' size: they are written side by
// side, then, and copied.
bool IsStaged(const Call& call, const Place& place) {
  const AttentionShape& s = call.shape;
  if (!call.is_packed()) return false;
  if (place.id == kDq)
    return place.token_stride >= 2 * s.num_heads * s.head_dim;
  return (place.id == kDk || place.id == kDv) && s.num_heads != s.num_kv_heads;
}

// Elements between the tokens of an operand as the graph sees it.
int64_t TokenStride(const Call& call, const Place& place) {
  return IsStaged(call, place)
             ? NumHeads(call.shape, place.id) * call.shape.head_dim
             : place.token_stride;
}
int64_t BatchStride(const Call& call, const Place& place) {
  return IsStaged(call, place) ? call.shape.q_len * TokenStride(call, place)
                               : place.batch_stride;
}

// The parts of a packed call's workspace: bytes from its start.
struct PackedSpace {
  size_t lengths, elements, lse, graph, end;
  std::unordered_map<int64_t, size_t> staged;  // by operand
};
PackedSpace SpaceOf(const Call& call, int64_t num_sequences,
                    size_t graph_bytes) {
  const AttentionShape& s = call.shape;
  size_t end = 0;
  const auto take = [&end](int64_t count, size_t item) {
    const size_t at = end;
    const size_t bytes = static_cast<size_t>(count) * item;
    end += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
           kWorkspaceAlignment;
    return at;
  };
  const auto num_tables = static_cast<int64_t>(call.places.size()) + 1;
  PackedSpace space;
  space.lengths = take(num_sequences, sizeof(int32_t));
  space.elements = take(num_tables * (num_sequences + 1), sizeof(int64_t));
  space.lse =
      take(call.has_lse() ? call.num_tokens() * s.num_heads : 0, sizeof(float));
  for (const Place& place : call.places) {
    if (!IsStaged(call, place)) continue;
    space.staged[place.id] =
        take(call.num_tokens() * TokenStride(call, place), DTypeBytes(s.dtype));
  }
  space.graph = take(static_cast<int64_t>(graph_bytes), 1);
  space.end = end;
  return space;
}

// ---- Graphs ---------------------------------------------------------------

// What a graph depends on beside its call.
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
// In a packed graph the tokens of sequence i begin at an offset of their own.
void PutOffsets(Operand id, int64_t num_sequences, Graph& graph,
                fe::graph::Tensor_attributes& tensor) {
  if (num_sequences == 0) return;
  tensor.set_ragged_offset(InputIndex(OffsetsOf(id), "offsets",
                                      num_sequences + 1, fe::DataType_t::INT64,
                                      graph));
}

void Put(const Call& call, const Place& place, int64_t num_sequences,
         Graph& graph, fe::graph::Tensor_attributes& tensor) {
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
void PutLse(const Call& call, int64_t num_sequences, Graph& graph,
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

TensorPtr Input(const Call& call, size_t i, int64_t num_sequences,
                Graph& graph) {
  fe::graph::Tensor_attributes tensor;
  Put(call, call.places[i], num_sequences, graph, tensor);
  return graph.tensor(tensor);
}
void Output(const Call& call, size_t i, int64_t num_sequences, Graph& graph,
            const TensorPtr& tensor) {
  Put(call, call.places[i], num_sequences, graph, *tensor);
  tensor->set_output(true);
}

// What both directions have in common. Sequences have as many queries as keys,
// so that the diagonal begins at the top left of each.
template <class Attributes>
void PutMask(const Call& call, int64_t num_sequences, Graph& graph,
             Attributes& attributes) {
  attributes.set_attn_scale(call.shape.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  if (num_sequences == 0) return;
  const auto lengths = [&](Operand id, const char* name) {
    return InputIndex(id, name, num_sequences, fe::DataType_t::INT32, graph);
  };
  attributes.set_padding_mask(true)
      .set_seq_len_q(lengths(kQueryLengths, "query lengths"))
      .set_seq_len_kv(lengths(kKeyLengths, "key lengths"));
}

void MakeForward(const Call& call, const Variant& variant, Graph& graph) {
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

void MakeBackward(const Call& call, const Variant& variant, Graph& graph) {
  const int64_t n = variant.num_sequences;
  fe::graph::SDPA_backward_attributes attributes;
  attributes.set_name("attention backward")
      .set_deterministic_algorithm(variant.deterministic);
  PutMask(call, n, graph, attributes);
  if (n > 0) {
    // Else its workspace is for T tokens of every sequence.
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
std::string Validate(const Call& call, const Variant& variant,
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

// The graphs of a call, by their numbers of sequences.
std::vector<int64_t> GraphsOf(const Call& call) {
  return call.is_packed() ? SequencesOfGraphs(call) : std::vector<int64_t>{0};
}

absl::Status ValidateWithoutDevice(const Call& call, bool deterministic,
                                   int sm) {
  const std::string why = WhyNotAsked(call, deterministic);
  if (!why.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(call), ": ", why));
  }
  for (const int64_t num_sequences : GraphsOf(call)) {
    Graph graph;
    const std::string complaint =
        Validate(call, {deterministic, sm, num_sequences}, nullptr, graph);
    if (complaint.empty()) continue;
    return absl::UnimplementedError(
        absl::StrCat(Describe(call), ": ", VersionText(), " refuses it on sm_",
                     sm, ": ", complaint));
  }
  return absl::OkStatus();
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

// All that a graph depends on.
using Key = std::vector<int64_t>;

Key KeyOf(const Call& call, int64_t num_sequences) {
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
  for (const Place& place : call.places) {
    key.insert(key.end(), {place.batch_stride, place.token_stride});
  }
  return key;  // longer for the backward pass, so never taken for the other's
}

char* AlignWorkspace(void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return reinterpret_cast<char*>((address + kWorkspaceAlignment - 1) /
                                 kWorkspaceAlignment * kWorkspaceAlignment);
}

bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0;
}

// ---- Runs -----------------------------------------------------------------

using Pointers = std::unordered_map<int64_t, void*>;

Pointers PointersOf(const Call& call) {
  Pointers pointers;
  for (const Place& place : call.places) {
    pointers[place.id] = const_cast<void*>(place.data);
  }
  if (call.lse != nullptr) pointers[kLse] = const_cast<float*>(call.lse);
  return pointers;
}

// Computes what a packed graph reads into its workspace and points it there.
void BeforePacked(cudaStream_t stream, const Call& call, int64_t num_sequences,
                  const PackedSpace& space, char* workspace,
                  Pointers& pointers) {
  const AttentionShape& s = call.shape;
  SequenceTables tables = {};
  tables.offsets = call.packed.offsets;
  tables.num_sequences = num_sequences;
  tables.lengths = reinterpret_cast<int32_t*>(workspace + space.lengths);
  tables.elements = reinterpret_cast<int64_t*>(workspace + space.elements);
  const auto add_table = [&](Operand id, int64_t token_stride) {
    pointers[OffsetsOf(id)] =
        tables.elements + tables.num_tables * (num_sequences + 1);
    tables.token_strides[tables.num_tables++] = token_stride;
  };
  for (const Place& place : call.places) {
    add_table(place.id, TokenStride(call, place));
  }
  pointers[kQueryLengths] = pointers[kKeyLengths] = tables.lengths;
  if (call.has_lse()) {
    add_table(kLse, s.num_heads);
    float* const lse = reinterpret_cast<float*>(workspace + space.lse);
    pointers[kLse] = lse;
    if (call.is_backward) {
      TransposeStatistics(stream, call.lse, s.batch, s.num_heads, s.q_len, lse);
    }
  }
  for (const auto& [id, at] : space.staged) pointers[id] = workspace + at;
  FillSequenceTables(stream, tables);
}

// Brings what a packed graph has written to where the call wants it.
void AfterPacked(cudaStream_t stream, const Call& call,
                 const Pointers& pointers) {
  const AttentionShape& s = call.shape;
  if (call.new_lse != nullptr) {
    TransposeStatistics(stream, static_cast<const float*>(pointers.at(kLse)),
                        s.batch, s.q_len, s.num_heads, call.new_lse);
  }
  const size_t item = DTypeBytes(s.dtype);
  for (const Place& place : call.places) {
    if (!IsStaged(call, place)) continue;
    const size_t row = static_cast<size_t>(TokenStride(call, place)) * item;
    ZERO_CUDA_CHECK(cudaMemcpy2DAsync(
        const_cast<void*>(place.data),
        static_cast<size_t>(place.token_stride) * item, pointers.at(place.id),
        row, row, static_cast<size_t>(call.num_tokens()),
        cudaMemcpyDeviceToDevice, stream));
  }
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
  void NoteOwnKernel(const Call& call, const std::string& why) {
    Note(absl::StrCat(Describe(call), " runs on our own kernel: ", why));
  }

  // Null where cuDNN does not take the call.
  Plan* Find(const Call& call, int64_t num_sequences) {
    if (handle == nullptr || !WhyNotAsked(call, deterministic).empty()) {
      return nullptr;
    }
    const auto [it, is_new] = plans.try_emplace(KeyOf(call, num_sequences));
    if (is_new) it->second = Build(call, num_sequences);
    return it->second.get();
  }

  std::unique_ptr<Plan> Build(const Call& call, int64_t num_sequences) {
    auto plan = std::make_unique<Plan>();
    std::string complaint = Validate(
        call, {deterministic, SmVersion(), num_sequences}, handle, plan->graph);
    if (complaint.empty()) complaint = Compile(plan->graph);
    int64_t bytes = 0;
    if (complaint.empty()) {
      complaint = Complaint(plan->graph.get_workspace_size(bytes));
    }
    if (!complaint.empty()) {
      NoteOwnKernel(call, absl::StrCat(VersionText(), ": ", complaint));
      return nullptr;
    }
    plan->graph_bytes = static_cast<size_t>(bytes);
    const size_t total =
        call.is_packed() ? SpaceOf(call, num_sequences, plan->graph_bytes).end
                         : plan->graph_bytes;
    plan->workspace_bytes = total == 0 ? 0 : total + kWorkspaceAlignment - 1;
    return plan;
  }

  // The largest of the call's graphs': which of them runs depends on what is
  // packed, and the workspace does not.
  std::optional<size_t> Bytes(const Call& call) {
    NoteShape(call);
    std::optional<size_t> bytes;
    for (const int64_t num_sequences : GraphsOf(call)) {
      const Plan* const plan = Find(call, num_sequences);
      if (plan == nullptr) continue;
      bytes = std::max(bytes.value_or(0), plan->workspace_bytes);
    }
    return bytes;
  }

  // Says so where a model's own shape or layout keeps training off the tensor
  // cores. Of a few tokens there is nothing to say.
  void NoteShape(const Call& call) {
    const AttentionShape& s = call.shape;
    if (s.dtype == DType::kF32 || s.q_len != s.kv_len) return;
    if (s.q_len < kMinTokens) return;
    const std::string why = WhyNotAsked(call, deterministic);
    if (!why.empty()) NoteOwnKernel(call, why);
  }

  // Notes the first operand that cuDNN cannot read where it lies. The
  // statistics of a packed graph lie in the workspace.
  bool AreAligned(const Call& call) {
    const auto check = [&](const char* name, const void* data) {
      if (IsAligned(data)) return true;
      NoteOwnKernel(call, absl::StrCat(name, " does not lie on a multiple of ",
                                       kAlignment, " bytes; align it"));
      return false;
    };
    for (const Place& place : call.places) {
      if (!check(place.name, place.data)) return false;
    }
    return call.is_packed() || check("lse", call.lse);
  }

  // The number of sequences of the graph that runs the call; nullopt where
  // none has as many.
  std::optional<int64_t> Choose(const Call& call) {
    const std::vector<int64_t> graphs = GraphsOf(call);
    if (!call.is_packed()) return graphs.front();
    for (const int64_t num_sequences : graphs) {
      if (call.packed.count <= num_sequences) return num_sequences;
    }
    NoteOwnKernel(call, absl::StrCat("more than ", graphs.back(),
                                     " sequences; pack longer ones, or rows "
                                     "of fewer"));
    return std::nullopt;
  }

  bool Run(cudaStream_t stream, const Call& call, Workspace workspace) {
    if (handle == nullptr || !WhyNotAsked(call, deterministic).empty()) {
      return false;
    }
    const std::optional<int64_t> num_sequences = Choose(call);
    if (!num_sequences.has_value()) return false;
    Plan* const plan = Find(call, *num_sequences);
    if (plan == nullptr || !AreAligned(call)) return false;
    ZERO_CHECK_GE(workspace.bytes, plan->workspace_bytes) << Describe(call);
    char* data = AlignWorkspace(workspace.data);
    Pointers pointers = PointersOf(call);
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
      ThrowDeviceError(Describe(call).c_str(), __FILE__, __LINE__,
                       absl::StrCat(VersionText(), ": ", complaint));
    }
    if (call.is_packed()) AfterPacked(stream, call, pointers);
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
  return state_->Bytes(CallOf(args));
}
std::optional<size_t> AttentionPlans::WorkspaceBytes(
    const AttentionBackwardArgs& args) {
  return state_->Bytes(CallOf(args));
}

bool AttentionPlans::Forward(cudaStream_t stream,
                             const AttentionForwardArgs& args,
                             Workspace workspace) {
  return state_->Run(stream, CallOf(args), workspace);
}
bool AttentionPlans::Backward(cudaStream_t stream,
                              const AttentionBackwardArgs& args,
                              Workspace workspace) {
  return state_->Run(stream, CallOf(args), workspace);
}

std::string AttentionPlans::notes() const {
  return absl::StrJoin(state_->notes, "; ");
}

absl::Status ValidateCudnnAttention(const AttentionForwardArgs& args, int sm) {
  return ValidateWithoutDevice(CallOf(args), /*deterministic=*/false, sm);
}
absl::Status ValidateCudnnAttention(const AttentionBackwardArgs& args,
                                    bool deterministic, int sm) {
  return ValidateWithoutDevice(CallOf(args), deterministic, sm);
}

}  // namespace zero::cuda
