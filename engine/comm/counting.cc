#include "engine/comm/counting.h"

#include <utility>

namespace zero {

CollectiveCount& CollectiveCount::operator+=(const CollectiveCount& other) {
  calls += other.calls;
  bytes += other.bytes;
  received += other.received;
  return *this;
}

CountingCommunicator::CountingCommunicator(std::unique_ptr<Communicator> inner)
    : Communicator(inner->rank(), inner->world(), inner->algorithm()),
      inner_(std::move(inner)) {}

void CountingCommunicator::Run(Stream& stream, Collective collective) {
  total_ += {.calls = 1,
             .bytes = SentBytes(collective, rank(), world()),
             .received = ReceivedBytes(collective, rank(), world())};
  inner_->Run(stream, std::move(collective));
}

}  // namespace zero
