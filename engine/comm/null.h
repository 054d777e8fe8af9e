// A communicator that moves nothing: for a world of one, and for the meta
// device, on which a step runs without data. Its Total counts what a run would
// send.
#ifndef ZERO_ENGINE_COMM_NULL_H_
#define ZERO_ENGINE_COMM_NULL_H_

#include <mutex>

#include "engine/comm/communicator.h"

namespace zero {

class NullCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;

  void Run(Stream&, Collective) override {}
  void Abort(const absl::Status& status) override {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_.Update(status);
  }
  absl::Status status() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  absl::Status failure_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NULL_H_
