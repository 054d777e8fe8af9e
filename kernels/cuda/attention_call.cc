#include "kernels/cuda/attention_call.h"

#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/packed_sequences.h"
#include "kernels/cuda/sizes.h"
#include "kernels/dtype.h"

namespace zero::cuda {
namespace {

OperandPlace PlaceOf(AttentionOperand id, const char* name,
                     const MutableHeadsRef& x) {
  return {id, name, x.data, x.batch_stride, x.token_stride};
}
OperandPlace PlaceOf(AttentionOperand id, const char* name, const HeadsRef& x) {
  return {id, name, const_cast<void*>(x.data), x.batch_stride, x.token_stride};
}

bool IsOfKeys(AttentionOperand id) {
  return id == kK || id == kV || id == kDk || id == kDv;
}

// In packed graphs cuDNN sums dq in fp32 at the strides of dq, and where query
// heads share one of keys, it keeps the dk and dv of each query head at the
// strides of dk and dv times the number that share. For those of a packed
// projection that is many times the gradients' size: they are written side by
// side, then, and copied.
bool IsStaged(const AttentionCall& call, const OperandPlace& place) {
  const AttentionShape& s = call.shape;
  if (!call.is_packed()) return false;
  if (place.id == kDq) {
    return place.token_stride >= 2 * s.num_heads * s.head_dim;
  }
  return (place.id == kDk || place.id == kDv) && s.num_heads != s.num_kv_heads;
}

}  // namespace

AttentionCall CallOf(const AttentionForwardArgs& args) {
  return {false,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out)},
          args.lse};
}
AttentionCall CallOf(const AttentionBackwardArgs& args) {
  return {true,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out),
           PlaceOf(kDout, "dout", args.dout), PlaceOf(kDq, "dq", args.dq),
           PlaceOf(kDk, "dk", args.dk), PlaceOf(kDv, "dv", args.dv)},
          const_cast<float*>(args.lse)};
}

int64_t NumHeads(const AttentionShape& shape, AttentionOperand id) {
  return IsOfKeys(id) ? shape.num_kv_heads : shape.num_heads;
}

int64_t TokenStride(const AttentionCall& call, const OperandPlace& place) {
  return IsStaged(call, place)
             ? NumHeads(call.shape, place.id) * call.shape.head_dim
             : place.token_stride;
}
int64_t BatchStride(const AttentionCall& call, const OperandPlace& place) {
  return IsStaged(call, place) ? call.shape.q_len * TokenStride(call, place)
                               : place.batch_stride;
}

PackedSpace SpaceOf(const AttentionCall& call, int64_t num_sequences,
                    size_t graph_bytes) {
  const AttentionShape& s = call.shape;
  size_t end = 0;
  const auto take = [&end](int64_t count, size_t item) {
    const size_t at = end;
    end += RoundUp(static_cast<size_t>(count) * item, kWorkspaceAlignment);
    return at;
  };
  const auto num_tables = static_cast<int64_t>(call.places.size()) + 1;
  PackedSpace space;
  space.lengths = take(num_sequences, sizeof(int32_t));
  space.elements =
      take(num_tables * OffsetTableStride(num_sequences), sizeof(int64_t));
  space.lse =
      take(call.has_lse() ? call.num_tokens() * s.num_heads : 0, sizeof(float));
  for (const OperandPlace& place : call.places) {
    if (!IsStaged(call, place)) continue;
    space.staged[place.id] =
        take(call.num_tokens() * TokenStride(call, place), DTypeBytes(s.dtype));
  }
  space.graph = take(static_cast<int64_t>(graph_bytes), 1);
  space.end = end;
  return space;
}

OperandPointers PointersOf(const AttentionCall& call) {
  OperandPointers pointers;
  for (const OperandPlace& place : call.places) {
    pointers[place.id] = place.data;
  }
  if (call.lse != nullptr) pointers[kLse] = call.lse;
  return pointers;
}

void BeforePacked(cudaStream_t stream, const AttentionCall& call,
                  int64_t num_sequences, const PackedSpace& space,
                  char* workspace, OperandPointers& pointers) {
  const AttentionShape& s = call.shape;
  SequenceTables tables = {};
  tables.offsets = call.packed.offsets;
  tables.num_sequences = num_sequences;
  tables.lengths = reinterpret_cast<int32_t*>(workspace + space.lengths);
  tables.elements = reinterpret_cast<int64_t*>(workspace + space.elements);
  const auto add_table = [&](AttentionOperand id, int64_t token_stride) {
    ZERO_CHECK_LT(tables.num_tables, kMaxOffsetTables);
    pointers[OffsetsOf(id)] =
        tables.elements + tables.num_tables * OffsetTableStride(num_sequences);
    tables.token_strides[tables.num_tables++] = token_stride;
  };
  for (const OperandPlace& place : call.places) {
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

void AfterPacked(cudaStream_t stream, const AttentionCall& call,
                 const OperandPointers& pointers) {
  const AttentionShape& s = call.shape;
  if (!call.is_backward && call.has_lse()) {
    TransposeStatistics(stream, static_cast<const float*>(pointers.at(kLse)),
                        s.batch, s.q_len, s.num_heads, call.lse);
  }
  const size_t item = DTypeBytes(s.dtype);
  for (const OperandPlace& place : call.places) {
    if (!IsStaged(call, place)) continue;
    const size_t row = static_cast<size_t>(TokenStride(call, place)) * item;
    ZERO_CUDA_CHECK(cudaMemcpy2DAsync(
        place.data, static_cast<size_t>(place.token_stride) * item,
        pointers.at(place.id), row, row, static_cast<size_t>(call.num_tokens()),
        cudaMemcpyDeviceToDevice, stream));
  }
}

}  // namespace zero::cuda
