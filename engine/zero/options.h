// How an executor trains: a config without its files and ranks.
#ifndef ZERO_ENGINE_ZERO_OPTIONS_H_
#define ZERO_ENGINE_ZERO_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/types/optional.h"
#include "engine/base/block_io.h"
#include "engine/base/recompute.h"
#include "engine/zero/schedule.h"
#include "kernels/dtype.h"
#include "optim/optimizer.h"

namespace zero {

// The file of states on a disk, and how it is read and written.
struct SwapOptions {
  std::string path;  // folder: "nvme_path"
  // Changes error detection.
  bool checksums = true;
  // Changes speed.
  int64_t block_bytes = int64_t{1} << 20;
  bool uring = true;
  BlockIoOptions io;
};

struct ExecutorOptions {
  // Changes results.
  DType param_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;    // gradients accumulate in it
  bool stochastic_rounding = false;  // of masters to 16-bit parameters
  OptimizerSpec optimizer;
  bool decay_all = false;   // weight decay on vectors too
  float max_grad_norm = 0;  // 0: no clipping
  // Changes memory and speed.
  // Stores only the bits of a master that its bf16 parameter lacks: same
  // results.
  bool split_master = true;
  bool overlap = true;  // of communication with computation
  // Steps may have a delayed update (StepInput): the host keeps a second copy
  // of parameters and of the gradients that it reads.
  bool delayed_updates = false;
  // The host updates a unit as soon as it has its gradients
  // (ScheduleOptions::update_before_norm): StepOutput::skipped then says that a
  // gradient was not finite, but parameters may have been updated with it.
  // REQUIRES: no clipping, no loss scale.
  bool update_before_norm = false;
  GatherPolicy gather;
  Recompute recompute = Recompute::kOff;
  // Most logits of a micro-batch kept from forward to backward by parts of the
  // vocabulary; more are recomputed. Below 0: an eighth of the states.
  int64_t max_kept_logits_bytes = -1;
  int64_t max_positions = 0;  // length of the rotary tables
  bool train = true;          // false: no gradients, no optimizer state
  SwapOptions swap;           // for plans with states on a disk

  // The stored masters' dtype; none: parameters are fp32.
  absl::optional<DType> master_dtype() const {
    if (param_dtype == DType::kF32) return absl::nullopt;
    // A parameter rounded stochastically, or to less range, is not part of its
    // master.
    return split_master && param_dtype == DType::kBF16 && !stochastic_rounding
               ? DType::kU16
               : DType::kF32;
  }
  // Bytes of an element's master and optimizer arrays.
  int64_t optimizer_bytes() const {
    const auto master = master_dtype();
    return 4 * optimizer.StateFloatsPerElement() +
           (master ? static_cast<int64_t>(DTypeBytes(*master)) : 0);
  }

  ScheduleOptions schedule_options(int64_t micro_steps,
                                   bool delayed_update = false) const {
    return {.micro_steps = micro_steps,
            .overlap = overlap,
            .gather = gather,
            .tensor_norms = optimizer.needs_tensor_norms(),
            .delayed_update = delayed_update,
            .update_before_norm = update_before_norm};
  }
};

// Bytes of the model states on a rank that owns some.
inline int64_t StateBytes(const Plan& plan, const ExecutorOptions& options) {
  const StatePlacement& placement = plan.placement;
  return plan.StateElems(plan.padded_elems, placement.parameters) *
             static_cast<int64_t>(DTypeBytes(options.param_dtype)) +
         plan.StateElems(plan.trained_elems, placement.gradients) *
             static_cast<int64_t>(DTypeBytes(options.grad_dtype)) +
         plan.StateElems(plan.trained_elems, placement.optimizer) *
             options.optimizer_bytes();
}
inline int64_t MaxKeptLogitsBytes(const Plan& plan,
                                  const ExecutorOptions& options) {
  return options.max_kept_logits_bytes >= 0 ? options.max_kept_logits_bytes
                                            : StateBytes(plan, options) / 8;
}

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_OPTIONS_H_
