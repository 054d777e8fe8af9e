#include "engine/comm/nccl_ranks.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/nccl/nccl.h"

namespace zero {
namespace {

using Body = std::function<absl::Status(const Rank&)>;

// The ranks of this process, and how they ended.
class Ranks {
 public:
  Ranks(int world, std::string kind, std::shared_ptr<Store> store,
        const LocalRanksOptions& options, const MakeDeviceFn& make_device,
        const Body& body)
      : world_(world),
        kind_(std::move(kind)),
        store_(std::move(store)),
        options_(options),
        make_device_(make_device),
        body_(body) {}

  absl::Status Run(const std::vector<int>& ranks) {
    running_ = {ranks.begin(), ranks.end()};
    std::vector<std::thread> threads;
    for (const int rank : ranks) {
      threads.emplace_back([this, rank] { RunOne(rank); });
    }
    const absl::Status hang = AwaitAll();
    if (!hang.ok() && options_.on_hang) options_.on_hang(hang);
    for (std::thread& thread : threads) thread.join();
    return first_error_;
  }

 private:
  void RunOne(int index) {
    // What tears connections down at the end may fail as well.
    const absl::Status status =
        CatchExceptions([&] { return Connected(index); });
    std::lock_guard<std::mutex> lock(mutex_);
    first_error_.Update(status);
    running_.erase(index);
    changed_.notify_all();
  }

  absl::Status Connected(int index) {
    std::unique_ptr<Device> device;  // the ends have events and memory of it
    Rank rank;
    const absl::Status status = CatchExceptions([&]() -> absl::Status {
      ZERO_ASSIGN_OR_RETURN(device, make_device_(index));
      rank.device = device.get();
      ZERO_RETURN_IF_ERROR(Connect(index, &rank));
      return body_(rank);
    });
    if (status.ok()) return status;
    // An echo of what is known already?
    if (world_ == 1 || !StoredFailure(*store_).ok()) {
      if (rank.scalar != nullptr) rank.scalar->Abort(status);
      return status;
    }
    if (rank.scalar != nullptr) {
      rank.scalar->Abort(status);
    } else {
      StoreFailure(
          *store_,
          absl::Status(status.code(),
                       absl::StrCat("nccl: rank ", index,
                                    " failed to start: ", status.message())))
          .IgnoreError();
    }
    return absl::Status(status.code(),
                        absl::StrCat("rank ", index, ": ", status.message()));
  }

  absl::Status Connect(int index, Rank* rank) {
    ZERO_ASSIGN_OR_RETURN(NcclEnds ends,
                          ConnectNccl(store_, *rank->device,
                                      {.rank = index,
                                       .world = world_,
                                       .shards = options_.shards,
                                       .timeout = options_.local.timeout}));
    const auto wrapped = [&](const char* channel,
                             std::unique_ptr<Communicator> end) {
      if (options_.wrap) end = options_.wrap(index, channel, std::move(end));
      return std::make_unique<CountingCommunicator>(std::move(end));
    };
    rank->gather = wrapped("gather", std::move(ends.gather));
    rank->reduce = wrapped("reduce", std::move(ends.reduce));
    rank->across = wrapped("across", std::move(ends.across));
    rank->scalar = wrapped("scalar", std::move(ends.scalar));
    rank->kind = kind_;
    rank->sharers = ends.sharers;
    rank->agree = [this, index, num_met = 0](const std::string& name,
                                             bool yes) mutable {
      return Agree(index, absl::StrCat(name, " #", ++num_met), yes);
    };
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Agree(int index, const std::string& name, bool yes) {
    ZERO_ASSIGN_OR_RETURN(
        const std::vector<std::string> said,
        ExchangeInStore(*store_, name, index, world_, yes ? "yes" : "no",
                        options_.local.timeout));
    return std::find(said.begin(), said.end(), "no") == said.end();
  }

  // OK when all have ended. An error: of the run, with the ranks that did not
  // come back within the timeout after it.
  absl::Status AwaitAll() {
    const absl::Duration timeout =
        std::min(options_.local.timeout, absl::Hours(24 * 365));
    absl::Time deadline = absl::InfiniteFuture();
    absl::Status error;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!running_.empty()) {
      changed_.wait_for(lock, std::chrono::milliseconds(200));
      error.Update(first_error_);
      if (error.ok()) {
        lock.unlock();
        error.Update(StoredFailure(*store_));
        lock.lock();
      }
      const absl::Time now = absl::Now();
      if (!error.ok()) deadline = std::min(deadline, now + timeout);
      if (now < deadline || running_.empty()) continue;
      return absl::Status(
          error.code(),
          absl::StrCat(error.message(), "; ",
                       RankNames({running_.begin(), running_.end()}),
                       running_.size() == 1 ? " hangs and is left behind"
                                            : " hang and are left behind"));
    }
    return absl::OkStatus();
  }

  const int world_;
  const std::string kind_;
  const std::shared_ptr<Store> store_;
  const LocalRanksOptions& options_;
  const MakeDeviceFn& make_device_;
  const Body& body_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::set<int> running_;
  absl::Status first_error_;
};

}  // namespace

absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device, const Body& body) {
  ZERO_RETURN_IF_ERROR(CheckRanksOfGpus(world, NumCudaDevices()));
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  std::vector<int> all(world);
  std::iota(all.begin(), all.end(), 0);
  return Ranks(world,
               absl::StrCat("threads of this process, connected by ", version),
               std::make_shared<MemoryStore>(), options, make_device, body)
      .Run(all);
}

absl::Status RunNcclProcess(const Launch& launch,
                            const LocalRanksOptions& options,
                            const MakeDeviceFn& make_device, const Body& body) {
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  const absl::Duration timeout = options.local.timeout;
  std::unique_ptr<TcpStoreServer> server;  // ends last: others may still ask
  if (launch.rank == 0) {
    ZERO_ASSIGN_OR_RETURN(server,
                          TcpStoreServer::Listen(launch.store, launch.world));
  }
  ZERO_ASSIGN_OR_RETURN(
      std::shared_ptr<Store> store,
      TcpStore::Connect(launch.store, launch.rank, launch.world, timeout));
  const absl::Status status =
      Ranks(launch.world, absl::StrCat("processes, connected by ", version),
            store, options, make_device, body)
          .Run({launch.rank});
  if (!status.ok()) return status;
  return MeetInStore(*store, "end of the run", launch.rank, launch.world,
                     timeout);
}

}  // namespace zero
