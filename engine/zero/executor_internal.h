// What executor.cc (the step), executor_comm.cc (what is sent) and
// executor_states.cc (the model states) share.
#ifndef ZERO_ENGINE_ZERO_EXECUTOR_INTERNAL_H_
#define ZERO_ENGINE_ZERO_EXECUTOR_INTERNAL_H_

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/zero/executor.h"

namespace zero {

using Clock = std::chrono::steady_clock;

inline double Millis(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// One parameter bound to its place in the flat buffers.
struct BoundParameter {
  Parameter* parameter = nullptr;
  int unit = 0;
  int64_t offset = 0;  // in the unit, in elements
  GradSink sink;
  bool used = false;  // some backward pass of this step wrote its gradient
};

// What of a unit this rank updates, in the elements that it holds of the
// optimizer's arrays (FlatState::Held).
struct UnitUpdate {
  // The number of the unit's first element among all of the model: the same
  // for any number of ranks, which the offsets of units are not.
  int64_t first_element = 0;
  std::vector<UpdateRange> ranges;
  // Of every range, where the optimizer needs the norms of whole parameters.
  std::vector<TensorPart> norms;
};

// A UnitUpdate as the optimizer sees it.
struct Executor::UpdateView {
  UpdateState state;
  std::vector<float*> arrays;
  TensorNorms norms;
};

struct Executor::UnitState {
  zero::Unit* unit = nullptr;
  std::vector<std::unique_ptr<BoundParameter>> parameters;
  std::vector<Segment> gaps;  // no gradient is ever written here
  UnitUpdate update;
  // Between forward and backward of one micro-batch:
  Tensor input;  // kept only for recompute
  Tape tape;
  int input_slot = -1, output_slot = -1;
  // Sharded parameters, while gathered: [padded elems].
  Tensor gathered;
  std::unique_ptr<Event> gather_done;
  // What computation must wait for before it reads the parameters, and the
  // name of the unit that it was gathered as.
  struct Awaited {
    Event* event;
    const std::string* name;
  };
  std::vector<Awaited> awaited;
  // Sharded gradients, from the first backward that writes one until they are
  // reduced: [padded elems].
  Tensor gradients;
  int buckets_to_reduce = 0;  // of this micro-step
  bool finished = false;      // gradients are complete, unwritten ones zero
};

// Scalars that live on the device, so that a step never waits for the host.
struct Executor::Scalars {
  double loss_sum;     // of this rank
  double global_loss;  // of all ranks
  double sum_squares;
  float seed;        // d(loss sum): loss scale / valid targets
  float norm;        // unscaled gradient norm
  float grad_scale;  // what the optimizer multiplies gradients by
  uint32_t found_non_finite;
};

template <typename Work>
void Executor::Timed(const Work& work, CountFn count) {
  if (!device_->asynchronous()) {
    const auto begin = Clock::now();
    work();
    return count(begin, Clock::now());
  }
  TimedWork timed{MarkTime(), nullptr, std::move(count)};
  work();
  timed.end = MarkTime();
  timed_.push_back(std::move(timed));
}

template <typename Work>
void Executor::Announced(const Action& action, const Work& work) {
  if (hook_) hook_(action, /*done=*/false);
  const bool in_step = this->in_step();
  const std::string name =
      device_->asynchronous() ? ActionName(action, plan_) : "";
  device_->PushRange(name.c_str());
  if (time_hook_) {
    Timed(work, [this, action, in_step](TimePoint begin, TimePoint end) {
      time_hook_(action, in_step, begin, end);
    });
  } else {
    work();
  }
  device_->PopRange();
  if (hook_) hook_(action, /*done=*/true);
}

template <typename T>
T Executor::ReadScalar(const T* device_value) {
  if (device_->kind() == DeviceKind::kMeta) return T{};
  return *static_cast<const T*>(ReadNumbers(device_value, sizeof(T)));
}

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_EXECUTOR_INTERNAL_H_
