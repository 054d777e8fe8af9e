// The input and the output of a step.
#ifndef ZERO_ENGINE_ZERO_STEP_H_
#define ZERO_ENGINE_ZERO_STEP_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace zero {

// One micro-batch in host memory. B rows of T tokens.
struct HostBatch {
  int64_t batch = 0;                    // B
  int64_t length = 0;                   // T
  const int32_t* tokens = nullptr;      // [B * T]
  const int32_t* targets = nullptr;     // [B * T]; < 0: ignored
  const int32_t* positions = nullptr;   // [B * T]
  const int64_t* sample_ids = nullptr;  // [B] global, keys of dropout
  // Set for rows with several sequences; null: each row is one
  // (PackedSequences).
  const int32_t* offsets = nullptr;  // [B * T + 1]
  int64_t num_sequences = 0;
};

// The facts about a step that only the caller knows.
struct StepInput {
  absl::Span<const HostBatch> micro_batches;
  int64_t num_valid_targets = 0;  // over the whole step and all ranks
  float lr = 0;
  float beta1 = -1;  // < 0: the optimizer's own (OneCycle cycles it)
  float loss_scale = 1;
  int64_t optimizer_step = 1;  // from 1; skipped steps do not count
  uint64_t dropout_key = 0;
  uint64_t rounding_key = 0;  // of (seed, step), for stochastic rounding
  // Set for a step that begins before the results of the previous one are
  // known: if that one was skipped, this one is too, and changes nothing.
  bool inherits_skip = false;
  // The host's update of this step runs during the next step
  // (ScheduleOptions::delayed_update). With ExecutorOptions::delayed_updates.
  bool delayed_update = false;
};

struct StepOutput {
  double loss = 0;       // mean over valid targets of all ranks
  double grad_norm = 0;  // before clipping, loss scale removed
  // A gradient was not finite; nothing was updated, but see
  // ExecutorOptions::update_before_norm.
  bool skipped = false;
  // The first parameter, in plan order, with a non-finite gradient on any rank;
  // "": only the norm of all gradients is not finite. Set for a skipped step
  // that no other began after.
  std::string non_finite = {};
};

// Scalars of a step that live on the device, so that it never waits for the
// host.
struct StepScalars {
  double loss_sum;     // of this rank
  double global_loss;  // of all ranks
  double sum_squares;
  float seed;        // d(loss sum): loss scale / valid targets
  float norm;        // unscaled gradient norm
  float grad_scale;  // what the optimizer multiplies gradients by
  uint32_t found_non_finite;
};

// The collective of every step that follows all its reductions.
inline constexpr char kStepCollective[] = "norm and loss";

// The memory that a rehearsal on the meta device measures and a run reserves.
struct TransientBytes {
  // Activations, workspace, gathered parameters and gradients.
  int64_t device = 0;
  // The largest batch, or a piece of the weights, in host memory: twice.
  int64_t upload = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_STEP_H_
