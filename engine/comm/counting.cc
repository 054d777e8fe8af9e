#include "engine/comm/counting.h"

#include <utility>

namespace zero {

CollectiveCount& CollectiveCount::operator+=(const CollectiveCount& other) {
  calls += other.calls;
  bytes += other.bytes;
  received += other.received;
  return *this;
}

void CountingCommunicator::Run(Stream& stream, Collective collective) {
  total_ += {.calls = 1,
             .bytes = SentBytes(collective, rank(), world()),
             .received = ReceivedBytes(collective, rank(), world())};
  inner_->Run(stream, std::move(collective));
}

}  // namespace zero
