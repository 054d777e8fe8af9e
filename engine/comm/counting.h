// Counts what goes through another communicator: calls, bytes, a hash of the
// sequence and, on request, seconds.
#ifndef ZERO_ENGINE_COMM_COUNTING_H_
#define ZERO_ENGINE_COMM_COUNTING_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/hash.h"
#include "engine/comm/communicator.h"

namespace zero {

struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;     // sent by this rank: SentBytes
  int64_t received = 0;  // bytes: ReceivedBytes
  double seconds = 0;    // on the stream, waiting for other ranks included

  CollectiveCount& operator+=(const CollectiveCount& other);
};

// Threads: used by one thread, as the communicator that it wraps.
class CountingCommunicator final : public Communicator {
 public:
  // With `timed`, two events around every collective measure its seconds.
  explicit CountingCommunicator(std::unique_ptr<Communicator> inner,
                                bool timed = false);
  ~CountingCommunicator() override;

  // Calls and bytes of all that was issued; seconds of all that is done, which
  // is all of it once the streams are synchronized.
  CollectiveCount Count(CollectiveKind kind);
  CollectiveCount Total();

  // Of the signatures of all collectives so far, in order: equal on ranks that
  // issued the same.
  std::string SequenceHash() const { return hash_.HexDigest(); }

  void Run(Stream& stream, Collective collective) override;
  std::shared_ptr<void> Register(void* data, size_t bytes) override {
    return inner_->Register(data, bytes);
  }
  void Abort(const absl::Status& status) override { inner_->Abort(status); }
  absl::Status status() const override { return inner_->status(); }

 private:
  struct Timed {
    CollectiveKind kind;
    std::unique_ptr<Event> begin, end;
  };

  std::unique_ptr<Event> MakeEvent(Stream& stream);
  void CollectTimes();

  const std::unique_ptr<Communicator> inner_;
  const bool timed_;
  std::array<CollectiveCount, kNumCollectiveKinds> counts_;
  Hasher hash_;
  std::deque<Timed> running_;
  std::vector<std::unique_ptr<Event>> idle_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_COUNTING_H_
