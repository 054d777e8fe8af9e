#include "engine/comm/null.h"

namespace zero {

void NullCommunicator::Abort(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_.Update(status);
}

absl::Status NullCommunicator::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace zero
