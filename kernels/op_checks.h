// An op's argument checks, the same on every backend.
#ifndef ZERO_KERNELS_OP_CHECKS_H_
#define ZERO_KERNELS_OP_CHECKS_H_

#include <initializer_list>
#include <string>

#include "kernels/check.h"
#include "kernels/ops.h"

namespace zero {

struct TypedData {
  template <class View>
  TypedData(const View& view) : data(view.data), dtype(view.dtype) {}
  const void* data;  // null: absent
  DType dtype;
};

// "GeluBackward: args.x, args.dy, args.dx are of bf16, bf16, fp32, not of one
// dtype".
inline void CheckOneDType(const char* op, const char* names,
                          std::initializer_list<TypedData> operands) {
  const DType dtype = operands.begin()->dtype;
  for (const TypedData& operand : operands) {
    if (operand.data == nullptr || operand.dtype == dtype) continue;
    std::string dtypes;
    for (const TypedData& one : operands) {
      dtypes += std::string(dtypes.empty() ? "" : ", ") +
                (one.data == nullptr ? "none" : DTypeName(one.dtype));
    }
    ZERO_CHECK(false) << op << ": " << names << " are of " << dtypes
                      << ", not of one dtype";
  }
}

inline void CheckUpdateState(const char* op, const UpdateState& state) {
  ZERO_CHECK(state.master.data != nullptr || state.param.dtype == DType::kF32)
      << op << ": " << state.param.dtype << " parameters need fp32 masters";
  ZERO_CHECK(!state.splits_master() ||
             (state.param.dtype == DType::kBF16 && !state.stochastic_rounding))
      << op << ": only bf16 parameters rounded to nearest are part of their "
      << "masters";
  ZERO_CHECK(!state.stochastic_rounding || state.param.dtype != DType::kF32)
      << op << ": fp32 parameters are not rounded";
  ZERO_CHECK(state.grad.dtype == DType::kF32 ||
             state.grad.dtype == state.param.dtype)
      << op << ": " << state.grad.dtype << " gradients of " << state.param.dtype
      << " parameters; want fp32 or their dtype";
}

inline void CheckCast(const CastArgs& args) {
  const DType from = args.src.dtype, to = args.dst.dtype;
  const DType narrow = from == DType::kF32 ? to : from;
  ZERO_CHECK(from == to || ((from == DType::kF32 || to == DType::kF32) &&
                            (narrow == DType::kBF16 || narrow == DType::kF16)))
      << "Cast: " << from << " to " << to
      << "; want fp32 to or from bf16 or fp16";
}

inline void CheckPieces(const char* op, const TablePieces& pieces) {
  ZERO_CHECK(pieces.period % 64 == 0 && pieces.begin % 64 == 0 &&
             pieces.elems % 64 == 0 && pieces.first % 64 == 0)
      << op << ": pieces of " << pieces.elems << " elements at " << pieces.begin
      << " of " << pieces.period;
}

inline void CheckPieces(const EmbeddingForwardArgs& args) {
  if (args.pieces.period == 0) return;
  ZERO_CHECK(args.ids != nullptr && args.position_ids == nullptr &&
             args.first == 0 && args.table.ld == args.table.cols)
      << "EmbeddingForward: pieces are read in row-major order, alone";
  CheckPieces("EmbeddingForward", args.pieces);
}

inline void CheckPieces(const EmbeddingBackwardArgs& args) {
  if (args.pieces.period == 0) return;
  ZERO_CHECK(args.accumulate && args.dtable.ld == args.dtable.cols)
      << "EmbeddingBackward: pieces are added to, in row-major order";
  CheckPieces("EmbeddingBackward", args.pieces);
}

}  // namespace zero

// All operands present (the first always is) have one dtype.
#define ZERO_CHECK_ONE_DTYPE(...) \
  ::zero::CheckOneDType(__func__, #__VA_ARGS__, {__VA_ARGS__})

#endif  // ZERO_KERNELS_OP_CHECKS_H_
