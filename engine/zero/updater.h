// The end of a step: the gradient norm of all ranks, and the optimizer on what
// this rank owns.
//
// Nothing here waits. What the plan has in the host's memory is summed and
// updated there, on the stream of the host; all else stays on the device. Ranks
// exchange a few float64 numbers, gathered and added in rank order: the same
// bits at every stage.
#ifndef ZERO_ENGINE_ZERO_UPDATER_H_
#define ZERO_ENGINE_ZERO_UPDATER_H_

#include <utility>
#include <vector>

#include "engine/comm/rank.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/model_states.h"
#include "engine/zero/options.h"
#include "engine/zero/plan.h"
#include "engine/zero/rank_numbers.h"
#include "engine/zero/step.h"
#include "engine/zero/update_plan.h"
#include "kernels/device.h"

namespace zero {

// Runs work(ops, stream) on the device's host, in the order of `stream`, which
// has the role kHost.
template <typename Work>
void EnqueueOnHost(Device& device, Stream& stream, Work work) {
  stream.Enqueue([ops = &device.host().ops(), &stream, work = std::move(work)] {
    work(*ops, stream);
  });
}

class Updater {
 public:
  // `host` may be null where the host updates nothing. All must outlive the
  // updater.
  Updater(const Rank& rank, const Plan& plan, const ModelStates& states,
          RankNumbers& numbers, Stream& compute, Stream* host,
          const ExecutorOptions& options);

  void Take(const HomeArenas& arenas);

  // Squares of a unit's gradients on the host.
  void SumSquares(int unit);

  // Sums of the ranks, the norm and what gradients are multiplied by, from
  // scalars->loss_sum and the reduced gradients. `scalars` is on the device,
  // and used by the updates of this step too.
  void Norm(const StepInput& input, StepScalars* scalars);
  // The optimizer's first pass over a unit, or over a segment of one that is
  // updated from a disk; and behind all of them norms of whole parameters.
  void Moments(int unit, int segment, const StepInput& input);
  void TensorNorms();
  // The optimizer's step on a unit, or on a segment likewise.
  void Update(int unit, int segment, const StepInput& input);

 private:
  struct View;
  // Numbers of a step, in the memory where a unit is updated.
  struct Numbers {
    StepScalars* scalars = nullptr;
    // Of this rank's piece of every segment, the sum of squares.
    Tensor squares;
    // Two sums of every tensor, and of every slot.
    Tensor totals, slots;
  };

  bool any_on_host() const { return on_host_.squares.defined(); }
  const Numbers& NumbersOf(int unit) const {
    return plan_->UpdatesOnHost(unit) ? on_host_ : on_device_;
  }
  // What one call of the optimizer updates: elements of a unit that lie
  // together, counted among those that are here.
  struct Piece {
    Segment local;
    UnitUpdate update;
  };
  // Those of an action on a unit, or on a segment of one on a disk, which has
  // something to update.
  std::vector<const Piece*> PiecesOf(int unit, int segment) const;
  View ViewOf(int unit, int segment, const Piece& piece,
              const StepInput& input) const;
  // Runs work(ops, stream) where a unit is updated.
  template <typename Work>
  void Run(bool on_host, Work work);
  std::vector<SquaredSpan> SpansOf(int unit) const;
  void AddRows(const std::vector<Tensor>& rows, const Tensor& dst);
  // Ranks of the first group count their pieces; others have the same ones.
  bool CountsPieces() const { return rank_->rank() < plan_->owners.owners; }

  const Rank* rank_;
  Ops* ops_;
  const Plan* plan_;
  const ModelStates* states_;
  RankNumbers* numbers_;
  Stream* compute_;
  Stream* host_;
  const ExecutorOptions& options_;
  const UpdatePlan updates_;
  // By unit: of one that is updated from a disk its segments, of one whose
  // gradients are lent its phases, else all of it.
  std::vector<std::vector<Piece>> pieces_;
  Numbers on_device_, on_host_;
  Tensor host_scalars_;
  // Of every rank the squares, and the loss; two sums of every tensor.
  Tensor rank_squares_, rank_losses_, rank_totals_;
  Tensor host_slots_;  // on the device, a copy of on_host_.slots' own ranges
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_UPDATER_H_
