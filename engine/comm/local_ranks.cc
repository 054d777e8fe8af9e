#include "engine/comm/local_ranks.h"

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

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
  const auto connect = [&](const char* channel) {
    std::unique_ptr<Communicator> end = group.Connect(index, channel);
    if (options.wrap) end = options.wrap(index, channel, std::move(end));
    return std::make_unique<CountingCommunicator>(std::move(end));
  };
  rank.gather = connect("gather");
  rank.reduce = connect("reduce");
  rank.scalar = connect("scalar");
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
