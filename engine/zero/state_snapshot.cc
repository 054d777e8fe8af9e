#include "engine/zero/state_snapshot.h"

#include <utility>

#include "engine/base/status.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// Calls visit(tensor) for the tensors of all pieces: first the values, then the
// rests, so that neighbours in the states are neighbours here, and
// StateAccess::CopyKept copies them as one.
template <typename Pieces, typename Visit>
void ForEachTensor(Pieces& pieces, const Visit& visit) {
  for (auto& piece : pieces) visit(piece.values);
  for (auto& piece : pieces) {
    if (piece.rest.defined()) visit(piece.rest);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateSnapshot>> StateSnapshot::Make(
    const StateAccess& states, Device& device, MemoryLedger* ledger) {
  std::unique_ptr<StateSnapshot> snapshot(new StateSnapshot);
  snapshot->pieces_ = states.KeptPieces();
  int64_t bytes = 0;
  ForEachTensor(snapshot->pieces_, [&](const Tensor& tensor) {
    bytes += RoundUp(tensor.bytes(), Arena::kAlignment);
  });
  if (bytes == 0) return snapshot;  // another group's ranks write
  ZERO_ASSIGN_OR_RETURN(
      snapshot->arena_,
      Arena::Make(device, MemoryKind::kHost, bytes,
                  "copy of the model states for checkpoints", ledger));
  snapshot->arena_->Touch();
  ForEachTensor(snapshot->pieces_, [&](Tensor& tensor) {
    tensor = Tensor::Empty(*snapshot->arena_, tensor.shape(), tensor.dtype(),
                           MemoryCategory::kSnapshot);
  });
  return snapshot;
}

}  // namespace zero
