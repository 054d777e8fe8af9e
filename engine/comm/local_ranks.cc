#include "engine/comm/local_ranks.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "kernels/check.h"

namespace zero {
namespace {

// How ranks end, as seen by the thread that waits for them.
class Endings {
 public:
  explicit Endings(int world) : ended_(world) {}

  // Of what the ranks say the first error counts: later ones are its echo.
  void Say(const absl::Status& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    first_error_.Update(error);
    changed_.notify_all();
  }
  void End(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_[rank] = true;
    changed_.notify_all();
  }
  absl::Status first_error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return first_error_;
  }

  // Waits for all ranks; returns those that hang.
  std::vector<int> Await(const LocalGroup& group, absl::Duration timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock,
                  [&] { return Running().empty() || !first_error_.ok(); });
    const absl::Time failed = absl::Now();
    const std::vector<int> missing = group.missing();
    while (true) {
      const std::vector<int> running = Running();
      // Others have waited long enough for a missing one already.
      const bool all_missing = std::includes(missing.begin(), missing.end(),
                                             running.begin(), running.end());
      const absl::Time deadline =
          failed +
          (all_missing ? std::min(timeout, absl::Seconds(1)) : timeout);
      if (running.empty() || absl::Now() >= deadline) return running;
      changed_.wait_until(lock, absl::ToChronoTime(deadline));
    }
  }

 private:
  std::vector<int> Running() const {
    std::vector<int> running;
    for (size_t rank = 0; rank < ended_.size(); ++rank) {
      if (!ended_[rank]) running.push_back(static_cast<int>(rank));
    }
    return running;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> ended_;
  absl::Status first_error_;
};

void RunRank(LocalGroup& group, int index, const LocalRanksOptions& options,
             const MakeDeviceFn& make_device,
             const std::function<absl::Status(const Rank&)>& body,
             Endings* endings) {
  std::unique_ptr<Device> device;  // the ends have events and memory of it
  Rank rank;
  const auto connect = [&](const char* channel, std::vector<int> members) {
    std::unique_ptr<Communicator> end =
        group.Connect(index, channel, std::move(members));
    if (options.wrap) end = options.wrap(index, channel, std::move(end));
    return std::make_unique<CountingCommunicator>(std::move(end));
  };
  const int shards = options.shards == 0 ? group.world() : options.shards;
  const Members members = MembersWith(index, group.world(), shards);
  rank.gather = connect("gather", members.within);
  rank.reduce = connect("reduce", members.within);
  rank.across = connect("across", members.across);
  rank.scalar = connect("scalar", {});
  rank.sharers = options.SharersOf(index, group.world());
  rank.missing = [&group] { return group.missing(); };
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(device, make_device(index));
    rank.device = device.get();
    if (device->kind() == DeviceKind::kCuda) {
      absl::StrAppend(&rank.kind, " ",
                      OnGpus(std::min(group.world(), options.num_devices)));
    }
    return body(rank);
  });
  if (status.ok()) return;
  const bool is_own = group.world() > 1 && rank.status().ok();
  endings->Say(
      is_own ? absl::Status(status.code(), absl::StrCat("rank ", index, ": ",
                                                        status.message()))
             : status);
  rank.scalar->Abort(status);
}

}  // namespace

absl::Status WithHanging(const absl::Status& error,
                         const std::vector<int>& ranks) {
  return absl::Status(
      error.code(),
      absl::StrCat(error.message(), "; ", RankNames(ranks),
                   ranks.size() == 1 ? " hangs and is left behind"
                                     : " hang and are left behind"));
}

std::string OnGpus(int num_gpus) {
  return absl::StrCat("on ", num_gpus, num_gpus == 1 ? " GPU" : " GPUs");
}

absl::Status RunLocalRanks(
    int world, const LocalRanksOptions& options,
    const MakeDeviceFn& make_device,
    const std::function<absl::Status(const Rank& rank)>& body) {
  ZERO_CHECK(options.shards >= 0 &&
             (options.shards == 0 || world % options.shards == 0))
      << options.shards << " shards do not divide " << world << " ranks";
  const std::shared_ptr<LocalGroup> group =
      LocalGroup::Make(world, options.local);
  Endings endings(world);
  if (world == 1) {
    RunRank(*group, 0, options, make_device, body, &endings);
    return endings.first_error();
  }
  std::vector<std::thread> threads;
  for (int index = 0; index < world; ++index) {
    threads.emplace_back([&, index] {
      RunRank(*group, index, options, make_device, body, &endings);
      endings.End(index);
    });
  }
  const std::vector<int> hanging = endings.Await(*group, options.local.timeout);
  if (!hanging.empty() && options.on_hang) {
    options.on_hang(WithHanging(endings.first_error(), hanging));
  }
  for (std::thread& thread : threads) thread.join();
  return endings.first_error();
}

}  // namespace zero
