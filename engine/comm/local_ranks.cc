#include "engine/comm/local_ranks.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "kernels/check.h"

namespace zero {
namespace {

// How much longer a rank is waited for that others have already waited for in
// vain.
constexpr absl::Duration kGrace = absl::Seconds(1);

// The ranks of this process, and how they ended.
class Runner {
 public:
  Runner(Transport& transport, const LocalRanksOptions& options,
         const MakeDeviceFn& make_device, const RankBody& body)
      : transport_(transport),
        options_(options),
        make_device_(make_device),
        body_(body) {}

  absl::Status Run(const std::vector<int>& ranks) {
    running_ = starting_ = {ranks.begin(), ranks.end()};
    std::vector<std::thread> threads;
    for (const int rank : ranks) {
      threads.emplace_back([this, rank] { RunOne(rank); });
    }
    const absl::Status hang = AwaitAll();
    if (!hang.ok() && options_.on_hang) options_.on_hang(hang);
    for (std::thread& thread : threads) thread.join();
    return Error();
  }

 private:
  void RunOne(int index) {
    // Closing connections at the end may fail as well.
    const absl::Status status =
        CatchExceptions([&] { return ConnectAndRun(index); });
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status.ok()) errors_[index] = status;
    starting_.erase(index);
    running_.erase(index);
    changed_.notify_all();
  }

  absl::Status ConnectAndRun(int index) {
    std::unique_ptr<Device> device;  // the ends have events and memory of it
    Rank rank;
    const absl::Status status = CatchExceptions([&]() -> absl::Status {
      ZERO_ASSIGN_OR_RETURN(device, make_device_(index));
      rank.device = device.get();
      rank.host_link = options_.host_link;
      rank.memory.device_budget = options_.device_budget;
      rank.memory.host_budget = options_.host_budget;
      ZERO_RETURN_IF_ERROR(transport_.Connect(index, &rank));
      for (const Channel channel : kChannels) {
        std::unique_ptr<Communicator>& end = rank.end(channel);
        if (!options_.wrap) break;
        end = options_.wrap(index, ChannelName(channel), std::move(end));
      }
      {
        std::lock_guard<std::mutex> lock(mutex_);
        starting_.erase(index);
      }
      return body_(rank);
    });
    if (status.ok()) return status;
    const bool is_echo = !transport_.status().ok();  // of a known failure
    if (rank.scalar != nullptr) {
      rank.scalar->Abort(status);
    } else {
      transport_.Abort(index, status);
    }
    if (!is_echo) {
      std::lock_guard<std::mutex> lock(mutex_);
      causes_.insert(index);
    }
    return status;
  }

  // The error of the lowest ended rank, which is the one in the summary. It
  // names the rank unless it is an echo or all ranks ended with the same.
  absl::Status Error() const {
    if (errors_.empty()) return absl::OkStatus();
    const auto& [rank, error] = *errors_.begin();
    const bool is_of_all =
        static_cast<int>(errors_.size()) == transport_.world() &&
        absl::c_all_of(errors_, [&error = error](const auto& one) {
          return one.second == error;
        });
    if (is_of_all || causes_.count(rank) == 0) return error;
    return absl::Status(error.code(),
                        absl::StrCat("rank ", rank, ": ", error.message()));
  }

  // Waits until all ranks have ended. Errors: the run's, with the ranks that
  // did not return within the timeout after it.
  absl::Status AwaitAll() {
    const absl::Duration timeout = options_.local.timeout;
    absl::Time deadline = absl::InfiniteFuture();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!running_.empty()) {
      changed_.wait_for(lock, std::chrono::milliseconds(200));
      const bool starting = !starting_.empty();
      lock.unlock();
      const absl::Status failed = transport_.Watch(starting);
      const std::vector<int> missing =
          failed.ok() ? std::vector<int>() : transport_.missing();
      lock.lock();
      absl::Status error = Error();
      error.Update(failed);
      const absl::Time now = absl::Now();
      const bool all_missing = std::includes(missing.begin(), missing.end(),
                                             running_.begin(), running_.end());
      if (!error.ok()) {
        deadline =
            std::min(deadline,
                     now + (all_missing ? std::min(timeout, kGrace) : timeout));
      }
      if (now < deadline || running_.empty()) continue;
      return absl::Status(
          error.code(),
          absl::StrCat(error.message(), "; ",
                       RankNames({running_.begin(), running_.end()}),
                       running_.size() == 1 ? " hangs and is abandoned"
                                            : " hang and are abandoned"));
    }
    return absl::OkStatus();
  }

  Transport& transport_;
  const LocalRanksOptions& options_;
  const MakeDeviceFn& make_device_;
  const RankBody& body_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::set<int> starting_, running_;
  std::set<int> causes_;  // ranks that failed by themselves, before any other
  std::map<int, absl::Status> errors_;
};

class SharedMemory final : public Transport {
 public:
  SharedMemory(int world, const LocalRanksOptions& options)
      : Transport(world),
        options_(options),
        group_(LocalGroup::Make(world, options.local)) {}

  absl::Status Connect(int index, Rank* rank) override {
    const int shards = options_.shards == 0 ? world() : options_.shards;
    for (const Channel channel : kChannels) {
      rank->end(channel) =
          group_->Connect(index, ChannelName(channel),
                          MembersOf(channel, index, world(), shards));
    }
    rank->memory.sharers = options_.SharersOf(index, world());
    rank->missing = [group = group_] { return group->missing(); };
    if (rank->device->kind() == DeviceKind::kCuda) {
      absl::StrAppend(&rank->kind, " ",
                      OnGpus(std::min(world(), options_.num_devices)));
    }
    return absl::OkStatus();
  }
  void Abort(int index, const absl::Status& status) override {
    group_->Abort(index, status);
  }
  absl::Status status() override { return group_->status(); }
  std::vector<int> missing() override { return group_->missing(); }

 private:
  const LocalRanksOptions& options_;
  const std::shared_ptr<LocalGroup> group_;
};

}  // namespace

absl::Status RunRanksOf(Transport& transport, const std::vector<int>& ranks,
                        const LocalRanksOptions& options,
                        const MakeDeviceFn& make_device, const RankBody& body) {
  return Runner(transport, options, make_device, body).Run(ranks);
}

absl::Status RunLocalRanks(int world, const LocalRanksOptions& options,
                           const MakeDeviceFn& make_device,
                           const RankBody& body) {
  ZERO_CHECK(options.shards >= 0 &&
             (options.shards == 0 || world % options.shards == 0))
      << options.shards << " shards do not divide " << world << " ranks";
  SharedMemory memory(world, options);
  std::vector<int> ranks(world);
  std::iota(ranks.begin(), ranks.end(), 0);
  return RunRanksOf(memory, ranks, options, make_device, body);
}

}  // namespace zero
