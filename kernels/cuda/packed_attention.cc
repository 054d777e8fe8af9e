#include "kernels/cuda/packed_attention.h"

#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/packed_sequences.h"
#include "kernels/dtype.h"

namespace zero::cuda {

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
