// Values of the model states in host memory, between steps.
// Order: all ranks make the same calls, in the same order.
#ifndef ZERO_ENGINE_ZERO_STATE_READER_H_
#define ZERO_ENGINE_ZERO_STATE_READER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/zero/model_states.h"
#include "engine/zero/rank_numbers.h"
#include "engine/zero/wire.h"
#include "kernels/device.h"

namespace zero {

class StateReader {
 public:
  // Memory of a segment that is gathered to read it comes from `arena`.
  StateReader(const Rank& rank, const Plan& plan, const ModelStates& states,
              Wire& wire, RankNumbers& numbers, Stream& compute, Stream* gather)
      : rank_(&rank),
        plan_(&plan),
        states_(&states),
        wire_(&wire),
        numbers_(&numbers),
        compute_(&compute),
        gather_(gather) {}

  // fp32 values [begin, begin + count) of a parameter, from
  // ModelStates::readable. Cheapest in plan order, where neighbours share what
  // is gathered. `out` is not touched on the meta device.
  absl::Status Read(const Parameter& parameter, int64_t begin, int64_t count,
                    float* out, Arena& arena);
  // Forgets what was gathered: the states are about to change.
  void Drop() { staged_ = Tensor(); }

  // The first parameter (in plan order) of which an element of `state` is not
  // finite on any rank, or "". Of those that are trained.
  absl::StatusOr<std::string> FirstNonFinite(const FlatState& state,
                                             const char* name, Arena& arena);

 private:
  absl::Status Stage(const SegmentRef& ref, Arena& arena);
  void Download(const Tensor& from, float* out);
  bool IsFinite(const BoundParameter& bound, const FlatState& state,
                const Tensor& count);

  const Rank* rank_;
  const Plan* plan_;
  const ModelStates* states_;
  Wire* wire_;
  RankNumbers* numbers_;
  Stream* compute_;
  Stream* gather_;
  Tensor staged_;  // a whole segment of a sharded state
  SegmentRef staged_ref_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_STATE_READER_H_
