// Counts what another communicator is asked for: calls and bytes.
#ifndef ZERO_ENGINE_COMM_COUNTING_H_
#define ZERO_ENGINE_COMM_COUNTING_H_

#include <cstdint>

#include "engine/comm/communicator.h"

namespace zero {

struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;     // sent by this rank: SentBytes
  int64_t received = 0;  // bytes: ReceivedBytes

  CollectiveCount& operator+=(const CollectiveCount& other);
};

// Threads: used by one thread, as the communicator that it wraps.
class CountingCommunicator final : public CommunicatorWrapper {
 public:
  using CommunicatorWrapper::CommunicatorWrapper;

  // Of all that was issued.
  const CollectiveCount& Total() const { return total_; }

  void Run(Stream& stream, Collective collective) override;

 private:
  CollectiveCount total_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_COUNTING_H_
