#include "engine/comm/local_ranks.h"

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Remembers the first error: later ones are its echo.
class FirstError {
 public:
  void Update(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    first_.Update(status);
  }
  absl::Status Get() const { return first_; }

 private:
  std::mutex mutex_;
  absl::Status first_;
};

void RunRank(LocalGroup& group, int index, const LocalRanksOptions& options,
             const MakeDeviceFn& make_device,
             const std::function<absl::Status(const Rank&)>& body,
             FirstError* error) {
  Rank rank;
  const auto connect = [&](const char* channel, std::vector<int> members) {
    std::unique_ptr<Communicator> end =
        group.Connect(index, channel, std::move(members));
    if (options.wrap) end = options.wrap(index, channel, std::move(end));
    return std::make_unique<CountingCommunicator>(std::move(end));
  };
  const int shards = options.shards == 0 ? group.world() : options.shards;
  std::vector<int> within, across;
  for (int other = 0; other < group.world(); ++other) {
    if (other / shards == index / shards) within.push_back(other);
    if (other % shards == index % shards) across.push_back(other);
  }
  rank.gather = connect("gather", within);
  rank.reduce = connect("reduce", within);
  rank.across = connect("across", across);
  rank.scalar = connect("scalar", {});
  absl::StatusOr<std::unique_ptr<Device>> device = make_device(index);
  absl::Status status = device.status();
  if (status.ok()) {
    rank.device = device->get();
    status = body(rank);
  }
  if (!status.ok()) {
    if (group.world() > 1 && rank.status().ok()) {
      status = absl::Status(
          status.code(), absl::StrCat("rank ", index, ": ", status.message()));
    }
    error->Update(status);
    rank.scalar->Abort(status);
  }
}

}  // namespace

absl::Status RunLocalRanks(
    int world, const LocalRanksOptions& options,
    const MakeDeviceFn& make_device,
    const std::function<absl::Status(const Rank& rank)>& body) {
  ZERO_CHECK(options.shards >= 0 &&
             (options.shards == 0 || world % options.shards == 0))
      << options.shards << " shards do not divide " << world << " ranks";
  const std::shared_ptr<LocalGroup> group =
      LocalGroup::Make(world, options.local);
  FirstError error;
  std::vector<std::thread> threads;
  for (int index = 1; index < world; ++index) {
    threads.emplace_back([&, index] {
      RunRank(*group, index, options, make_device, body, &error);
    });
  }
  RunRank(*group, 0, options, make_device, body, &error);
  for (std::thread& thread : threads) thread.join();
  return error.Get();
}

}  // namespace zero
