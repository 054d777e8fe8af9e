// The end of a step: the gradient norm of all ranks, and the optimizer on what
// this rank owns.
//
// Everything stays on the device, so that no step waits for the host. Ranks
// exchange a few float64 numbers, gathered and added in rank order: the same
// bits at every stage.
#ifndef ZERO_ENGINE_ZERO_UPDATER_H_
#define ZERO_ENGINE_ZERO_UPDATER_H_

#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/model_states.h"
#include "engine/zero/options.h"
#include "engine/zero/plan.h"
#include "engine/zero/rank_numbers.h"
#include "engine/zero/step.h"
#include "engine/zero/update_plan.h"
#include "kernels/device.h"

namespace zero {

class Updater {
 public:
  // All must outlive the updater.
  Updater(const Rank& rank, const Plan& plan, const ModelStates& states,
          RankNumbers& numbers, Stream& compute,
          const ExecutorOptions& options);

  void Take(Arena& arena);

  // Sums of the ranks, the norm and what gradients are multiplied by, from
  // scalars->loss_sum and the reduced gradients. `scalars` is on the device,
  // and used by the updates of this step too.
  void Norm(const StepInput& input, StepScalars* scalars);
  // The optimizer's first pass: norms of whole parameters.
  void Moments(const StepInput& input);
  // The optimizer's step on a unit.
  void Update(int unit, const StepInput& input);

 private:
  struct View;

  View ViewOf(int unit, const StepInput& input) const;
  void AddRows(const Tensor& rows, const Tensor& dst);
  // Ranks of the first group count their pieces; others have the same ones.
  bool CountsPieces() const { return rank_->rank() < plan_->owners.owners; }

  const Rank* rank_;
  Ops* ops_;
  const Plan* plan_;
  const ModelStates* states_;
  RankNumbers* numbers_;
  Stream* compute_;
  const ExecutorOptions& options_;
  const UpdatePlan updates_;
  StepScalars* scalars_ = nullptr;
  // Squares of this rank's piece of every segment; of every rank the squares,
  // and the loss.
  Tensor norm_sums_;
  // Two sums of every slot; of every tensor; of every rank and tensor.
  Tensor tensor_sums_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_UPDATER_H_
