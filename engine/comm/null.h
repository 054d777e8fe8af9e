// A communicator that does nothing: for the meta device, on which a step runs
// without data. Wrapped in `counting` it tells what a run would send.
#ifndef ZERO_ENGINE_COMM_NULL_H_
#define ZERO_ENGINE_COMM_NULL_H_

#include <mutex>

#include "engine/comm/communicator.h"

namespace zero {

class NullCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;

  void Run(Stream&, Collective) override {}
  void Abort(const absl::Status& status) override;
  absl::Status status() const override;

 private:
  mutable std::mutex mutex_;
  absl::Status failure_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NULL_H_
