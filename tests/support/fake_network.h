// Fake processes: networks within one program, over its memory. A message is
// copied when its receiver waits for it, straight from the sender's memory, so
// changing or freeing memory in flight is detected.
#ifndef ZERO_TESTS_SUPPORT_FAKE_NETWORK_H_
#define ZERO_TESTS_SUPPORT_FAKE_NETWORK_H_

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/network.h"

namespace zero {

// The connection of the processes.
class FakeWire {
 public:
  // A message in its sender's memory.
  struct Sent {
    std::vector<MemoryRun> runs;
    bool taken = false;
  };
  // From, to, channel.
  using Lane = std::tuple<int, int, std::string>;

  std::mutex mutex;
  std::condition_variable changed;
  std::map<Lane, std::deque<std::shared_ptr<Sent>>> lanes;
  int64_t num_messages = 0;
  std::string failure;  // ends every exchange from now on
};

class FakeNetwork final : public Network {
 public:
  FakeNetwork(std::shared_ptr<FakeWire> wire, int process, int num_processes)
      : Network(process, num_processes), wire_(std::move(wire)) {}

  std::unique_ptr<Exchange> Begin(const std::string& channel,
                                  std::vector<PeerMessages> messages) override {
    return std::make_unique<FakeExchange>(*this, channel, std::move(messages));
  }

  void Stop() override {
    std::lock_guard<std::mutex> lock(wire_->mutex);
    stopped_ = true;
    wire_->changed.notify_all();
  }

 private:
  class FakeExchange final : public Exchange {
   public:
    FakeExchange(FakeNetwork& network, const std::string& channel,
                 std::vector<PeerMessages> messages)
        : network_(network), wire_(*network.wire_), channel_(channel) {
      std::lock_guard<std::mutex> lock(wire_.mutex);
      for (PeerMessages& peer : messages) {
        if (!peer.receive.empty()) {
          expected_.emplace_back(
              FakeWire::Lane{peer.process, network.process(), channel},
              std::move(peer.receive));
        }
        if (peer.send.empty()) continue;
        ++wire_.num_messages;
        sent_.push_back(std::make_shared<FakeWire::Sent>());
        sent_.back()->runs = std::move(peer.send);
        wire_.lanes[{network.process(), peer.process, channel}].push_back(
            sent_.back());
      }
      wire_.changed.notify_all();
    }

    ~FakeExchange() override {
      // No freed memory is read.
      std::lock_guard<std::mutex> lock(wire_.mutex);
      for (auto& sent : sent_) sent->runs.clear();
    }

    absl::Status Await(absl::Duration timeout) override {
      std::unique_lock<std::mutex> lock(wire_.mutex);
      absl::Status status;
      const auto done = [&] {
        if (network_.stopped_) status = absl::CancelledError("stopped");
        if (!wire_.failure.empty()) {
          status.Update(absl::UnavailableError(wire_.failure));
        }
        while (status.ok() && !expected_.empty()) {
          auto& queue = wire_.lanes[expected_.front().first];
          if (queue.empty()) return false;
          status = Take(*queue.front(), expected_.front().second);
          queue.pop_front();
          expected_.pop_front();
        }
        if (!status.ok()) return true;
        for (const auto& sent : sent_) {
          if (!sent->taken) return false;
        }
        return true;
      };
      if (!wire_.changed.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                  done)) {
        return absl::DeadlineExceededError("late");
      }
      return status;
    }

   private:
    absl::Status Take(FakeWire::Sent& sent, std::vector<MemoryRun>& to) {
      std::string bytes;
      for (const MemoryRun& run : sent.runs) bytes.append(run.data, run.bytes);
      int64_t wanted = 0;
      for (const MemoryRun& run : to) wanted += run.bytes;
      if (wanted != static_cast<int64_t>(bytes.size())) {
        return absl::InternalError(absl::StrCat("a message of ", bytes.size(),
                                                " bytes, want ", wanted));
      }
      const char* from = bytes.data();
      for (const MemoryRun& run : to) {
        std::memcpy(run.data, from, run.bytes);
        from += run.bytes;
      }
      sent.taken = true;
      wire_.changed.notify_all();
      return absl::OkStatus();
    }

    FakeNetwork& network_;
    FakeWire& wire_;
    const std::string channel_;
    std::vector<std::shared_ptr<FakeWire::Sent>> sent_;
    std::deque<std::pair<FakeWire::Lane, std::vector<MemoryRun>>> expected_;
  };

  const std::shared_ptr<FakeWire> wire_;
  bool stopped_ = false;
};

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_FAKE_NETWORK_H_
