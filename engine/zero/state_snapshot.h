// A copy of the model states in the host's memory, from which a checkpoint is
// written while training changes the states.
#ifndef ZERO_ENGINE_ZERO_STATE_SNAPSHOT_H_
#define ZERO_ENGINE_ZERO_STATE_SNAPSHOT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/ledger.h"
#include "engine/zero/state_access.h"
#include "kernels/device.h"

namespace zero {

class StateSnapshot {
 public:
  // Reserves memory for this rank's kept part of `states`, which is in memory
  // of `device` or its host. Device and ledger must outlive the snapshot.
  // Errors: ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<StateSnapshot>> Make(
      const StateAccess& states, Device& device, MemoryLedger* ledger);

  // Copies the states as they are between two steps.
  void Take(StateAccess& states) { states.CopyKept(pieces_); }

  int64_t bytes() const {
    return arena_ == nullptr ? 0 : arena_->capacity_bytes();
  }

  int64_t ResidentBytes() const {
    return arena_ == nullptr ? 0 : arena_->ResidentBytes();
  }

  // StateAccess::KeptPieces, as of the last Take.
  // Threads: readable by any thread, but not during Take.
  const std::vector<StateAccess::KeptPiece>& pieces() const { return pieces_; }

 private:
  StateSnapshot() = default;

  std::unique_ptr<Arena> arena_;
  std::vector<StateAccess::KeptPiece> pieces_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_STATE_SNAPSHOT_H_
