// The end of a step: the gradient norm over all ranks, and the optimizer on
// this rank's part.
//
// Nothing here waits. States in the host's memory are summed and updated there,
// on the host's stream; all else stays on the device. Ranks exchange a few
// float64 numbers, gathered and added in rank order: the same bits at every
// stage.
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
  // `host` may be null if the host updates nothing. All must outlive the
  // updater.
  Updater(const Rank& rank, const Plan& plan, const ModelStates& states,
          RankNumbers& numbers, Stream& compute, Stream* host,
          const ExecutorOptions& options);

  void Take(const HomeArenas& arenas);

  // Sums the squares of a unit's gradients on the host.
  void SumSquares(int unit);

  // Computes the sums over ranks, the norm and the gradients' factor, from
  // scalars->loss_sum and the reduced gradients. `scalars` is on the device,
  // and also used by this step's updates.
  void Norm(const StepInput& input, StepScalars* scalars);
  // Runs the optimizer's first pass over a unit, or over a segment of one
  // updated from a disk; after all of them, computes norms of whole parameters.
  void Moments(int unit, int segment, const StepInput& input);
  void TensorNorms();
  // Runs the optimizer's step on a unit, or on such a segment.
  void Update(int unit, int segment, const StepInput& input);

 private:
  struct View;
  // Numbers of a step, in the memory where a unit is updated.
  struct Numbers {
    StepScalars* scalars = nullptr;
    // The sum of squares of this rank's shard of every segment.
    Tensor squares;
    // Two sums of every tensor, and of every slot.
    Tensor totals, slots;
  };

  bool any_on_host() const { return on_host_.squares.defined(); }
  const Numbers& NumbersOf(int unit) const {
    return plan_->UpdatesOnHost(unit) ? on_host_ : on_device_;
  }
  // The work of one optimizer call: contiguous elements of a unit, numbered
  // among those stored here.
  struct Piece {
    Segment local;
    UnitUpdate update;
  };
  // The runs of an action on a unit, or on a segment of one on a disk, that has
  // something to update.
  std::vector<const Piece*> PiecesOf(int unit, int segment) const;
  View ViewOf(int unit, int segment, const Piece& piece,
              const StepInput& input) const;
  // Runs work(ops, stream) where a unit is updated.
  template <typename Work>
  void Run(bool on_host, Work work);
  std::vector<SquaredSpan> SpansOf(int unit) const;
  void AddRows(const std::vector<Tensor>& rows, const Tensor& dst);
  // Whether this rank's shards are counted: other groups have the same shards,
  // so only the first group counts.
  bool CountsShards() const { return rank_->rank() < plan_->owners.owners; }

  const Rank* rank_;
  Ops* ops_;
  const Plan* plan_;
  const ModelStates* states_;
  RankNumbers* numbers_;
  Stream* compute_;
  Stream* host_;
  const ExecutorOptions& options_;
  const UpdatePlan updates_;
  // The pieces of each unit: its segments if updated from a disk, its phases if
  // gradients are lent, else all of it.
  std::vector<std::vector<Piece>> pieces_;
  Numbers on_device_, on_host_;
  Tensor host_scalars_;
  // Every rank's squares and loss; two sums per tensor.
  Tensor rank_squares_, rank_losses_, rank_totals_;
  Tensor host_slots_;  // on the device, a copy of on_host_.slots' own ranges
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_UPDATER_H_
