#include "engine/comm/counting.h"

#include <utility>

#include "engine/comm/signature.h"

namespace zero {

CollectiveCount& CollectiveCount::operator+=(const CollectiveCount& other) {
  calls += other.calls;
  bytes += other.bytes;
  received += other.received;
  seconds += other.seconds;
  return *this;
}

CountingCommunicator::CountingCommunicator(std::unique_ptr<Communicator> inner,
                                           bool timed)
    : Communicator(inner->rank(), inner->world(), inner->algorithm()),
      inner_(std::move(inner)),
      timed_(timed) {}

CountingCommunicator::~CountingCommunicator() = default;

void CountingCommunicator::Run(Stream& stream, Collective collective) {
  const CollectiveKind kind = collective.kind;
  CollectiveCount& count = counts_[static_cast<size_t>(kind)];
  ++count.calls;
  count.bytes += SentBytes(collective, rank(), world());
  count.received += ReceivedBytes(collective, rank(), world());
  hash_.Update(Signature(collective) + "\n");
  if (!timed_) return inner_->Run(stream, std::move(collective));

  CollectTimes();
  Timed timed{kind, MakeEvent(stream), MakeEvent(stream)};
  stream.Record(*timed.begin);
  inner_->Run(stream, std::move(collective));
  stream.Record(*timed.end);
  running_.push_back(std::move(timed));
}

CollectiveCount CountingCommunicator::Count(CollectiveKind kind) {
  CollectTimes();
  return counts_[static_cast<size_t>(kind)];
}

CollectiveCount CountingCommunicator::Total() {
  CollectTimes();
  CollectiveCount total;
  for (const CollectiveCount& count : counts_) total += count;
  return total;
}

std::unique_ptr<Event> CountingCommunicator::MakeEvent(Stream& stream) {
  if (idle_.empty()) return stream.device().MakeEvent();
  std::unique_ptr<Event> event = std::move(idle_.back());
  idle_.pop_back();
  return event;
}

void CountingCommunicator::CollectTimes() {
  while (!running_.empty() && running_.front().end->IsDone()) {
    Timed& timed = running_.front();
    counts_[static_cast<size_t>(timed.kind)].seconds +=
        timed.end->MillisSince(*timed.begin) * 1e-3;
    idle_.push_back(std::move(timed.begin));
    idle_.push_back(std::move(timed.end));
    running_.pop_front();
  }
}

}  // namespace zero
