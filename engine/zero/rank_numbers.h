// The few numbers that all ranks agree on: norm, loss, counts, votes.
//
// They are only ever gathered, on the compute stream; every rank then sums them
// itself, in rank order, so all get the same bits.
// Order: all ranks make the same calls, in the same order.
#ifndef ZERO_ENGINE_ZERO_RANK_NUMBERS_H_
#define ZERO_ENGINE_ZERO_RANK_NUMBERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/step_clock.h"
#include "kernels/device.h"

namespace zero {

enum class ReduceOp { kSum, kMax };

class RankNumbers {
 public:
  RankNumbers(const Rank& rank, Stream& compute, StepClock& clock)
      : rank_(&rank),
        device_(rank.device),
        compute_(&compute),
        clock_(&clock) {}

  // Takes its memory on the device.
  void Take(Arena& arena);
  // Takes memory on the host, enough to read `read_bytes` at a time.
  absl::Status Reserve(int64_t read_bytes);

  // Gathers every rank's part of each of `numbers` [world * n]; this rank's
  // own part is in place.
  // Wire: (world - 1) * n * itemsize bytes per rank and element of `numbers`.
  void Gather(const std::string& name, const std::vector<Tensor>& numbers);

  // Reduces `values` over the ranks, in place: Start, then Finish. For kMax
  // they must be finite.
  absl::Status AllReduce(const std::string& name, ReduceOp op,
                         absl::Span<double> values);
  // Waits until all ranks have come here: Rank::agree where there is one.
  absl::Status Meet(const std::string& name);
  // Starts a reduction after what was launched so far and before what is
  // launched later. There is one at a time: another Start replaces one that was
  // not finished, once the device is done with it. At most kMaxValues.
  void Start(const std::string& name, ReduceOp op,
             absl::Span<const double> values);
  // Waits for these numbers, but not for a step begun after them.
  absl::Status Finish(absl::Span<double> values);
  // Every rank's values of the last finished reduction: [world * values]. Empty
  // in a world of one.
  absl::Span<const double> brought() const { return brought_; }

  // Gathers every rank's ScheduleHash, into memory of `arena`.
  // Errors: FailedPrecondition on all ranks if they are not equal, with the
  //         ranks that differ from rank 0.
  absl::Status CheckSchedule(const std::string& hash, Arena& arena);

  // Copies from the device, after all computation, and waits. The next call
  // reuses the memory.
  const void* Read(const void* from, int64_t bytes);
  // Reads a tensor of any size. On the meta device `to` is not touched.
  void Read(const Tensor& from, float* to);
  template <typename T>
  T ReadScalar(const T* device_value) {
    if (device_->kind() == DeviceKind::kMeta) return T{};
    return *static_cast<const T*>(Read(device_value, sizeof(T)));
  }
  // The event that marks the end of the last Read.
  Event& read() { return *read_; }

 private:
  static constexpr int64_t kMaxValues = 12;

  bool alone() const {
    return rank_->world() == 1 || device_->kind() == DeviceKind::kMeta;
  }

  const Rank* rank_;
  Device* device_;
  Stream* compute_;
  StepClock* clock_;
  Tensor agreed_;  // [world * kMaxValues], float64
  Buffer host_agreed_;
  std::unique_ptr<Event> agreed_read_;
  ReduceOp op_ = ReduceOp::kSum;
  absl::Span<const double> brought_;  // in host_agreed_
  Buffer host_;
  std::unique_ptr<Event> read_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_RANK_NUMBERS_H_
