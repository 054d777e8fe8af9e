#include "engine/comm/nccl_ranks.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "engine/comm/nccl/nccl.h"

namespace zero {
namespace {

using Body = std::function<absl::Status(const Rank&)>;

// A rank for which others have waited in vain already.
constexpr absl::Duration kGrace = absl::Seconds(1);

// The ranks of this process, and how they ended.
class Ranks {
 public:
  // `where`: the store's address, for whoever waits for other processes;
  // empty: there are none.
  Ranks(int world, std::string kind, std::shared_ptr<Store> store,
        std::string where, const LocalRanksOptions& options,
        const MakeDeviceFn& make_device, const Body& body)
      : world_(world),
        kind_(std::move(kind)),
        store_(std::move(store)),
        where_(std::move(where)),
        options_(options),
        make_device_(make_device),
        body_(body) {}

  absl::Status Run(const std::vector<int>& ranks) {
    ranks_ = ranks;
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
    // What tears connections down at the end may fail as well.
    const absl::Status status =
        CatchExceptions([&] { return Connected(index); });
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status.ok()) errors_[index] = status;
    starting_.erase(index);
    running_.erase(index);
    changed_.notify_all();
  }

  // Of the ranks that have ended, the lowest one's: that of the summary.
  absl::Status Error() const {
    return errors_.empty() ? absl::OkStatus() : errors_.begin()->second;
  }

  absl::Status Connected(int index) {
    std::unique_ptr<Device> device;  // the ends have events and memory of it
    Rank rank;
    const absl::Status status = CatchExceptions([&]() -> absl::Status {
      ZERO_ASSIGN_OR_RETURN(device, make_device_(index));
      rank.device = device.get();
      ZERO_RETURN_IF_ERROR(Connect(index, &rank));
      {
        std::lock_guard<std::mutex> lock(mutex_);
        starting_.erase(index);
      }
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
    rank->kind = absl::StrCat(kind_, ", ", OnGpus(ends.gpus));
    rank->sharers = ends.sharers;
    rank->missing = std::move(ends.missing);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      watches_[index] = std::move(ends.watch_asks_for);
    }
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
    const absl::Duration timeout = options_.local.timeout;
    absl::Time deadline = absl::InfiniteFuture();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!running_.empty()) {
      changed_.wait_for(lock, std::chrono::milliseconds(200));
      const bool starting = !starting_.empty();
      lock.unlock();
      if (starting) LookAtStart();
      absl::Status stored = StoredFailure(*store_);
      if (stored.ok()) stored = LookAtWatches(timeout);
      const std::vector<int> missing =
          stored.ok() ? std::vector<int>() : StoredMissing(*store_);
      lock.lock();
      absl::Status error = Error();
      error.Update(stored);
      const absl::Time now = absl::Now();
      const bool all_missing = std::includes(missing.begin(), missing.end(),
                                             running_.begin(), running_.end());
      if (!error.ok()) {
        deadline =
            std::min(deadline,
                     now + (all_missing ? std::min(timeout, kGrace) : timeout));
      }
      if (now < deadline || running_.empty()) continue;
      return WithHanging(error, {running_.begin(), running_.end()});
    }
    return absl::OkStatus();
  }

  // A watch that CUDA does not let go on can not tell of any timeout. OK, or
  // the failure of the run.
  absl::Status LookAtWatches(absl::Duration timeout) {
    std::vector<int> stuck;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [rank, asks_for] : watches_) {
        if (asks_for() >= timeout) stuck.push_back(rank);
      }
    }
    if (stuck.empty()) return absl::OkStatus();
    return StoreFailure(
        *store_,
        absl::UnavailableError(absl::StrCat(
            "nccl: ", RankNames(stuck),
            ": the watch is stuck in a CUDA call for ",
            absl::FormatDuration(timeout),
            "; see dmesg and nvidia-smi for what ails the GPU",
            ranks_.size() == 1
                ? ""
                : ", or start the ranks by torchrun or srun: threads of one "
                  "process can stop each other there")),
        stuck);
  }

  // While ranks of this process are not connected yet.
  void LookAtStart() {
    const Patience& patience = options_.patience;
    const bool tells = !told_ && patience.tell && !where_.empty() &&
                       absl::Now() >= start_ + patience.tell_after;
    if (!patience.ends() && !tells) return;
    const auto all_missing = MissingInStore(*store_, kNcclStartUp, world_);
    if (!all_missing.ok()) return;
    std::vector<int> missing;
    std::set_difference(all_missing->begin(), all_missing->end(),
                        ranks_.begin(), ranks_.end(),
                        std::back_inserter(missing));
    const std::string whom =
        missing.empty() ? "NCCL connected the ranks"
                        : absl::StrCat("it waited for ", RankNames(missing),
                                       " of ", world_);
    if (patience.ends()) {
      StoreFailure(*store_, absl::CancelledError(absl::StrCat(
                                "nccl: rank ", ranks_.front(),
                                " was stopped by a signal while ", whom)))
          .IgnoreError();
      return;
    }
    const std::string timeout = absl::StrCat(
        " (timeout ", absl::FormatDuration(options_.local.timeout), ")");
    if (!missing.empty()) {
      patience.tell(absl::StrCat("waiting for ", RankNames(missing), " of ",
                                 world_, " at ", where_, timeout,
                                 StoredRefusal(*store_)));
      told_ = true;
    } else if (all_missing->empty()) {
      patience.tell(
          absl::StrCat("all ranks are here; NCCL connects them", timeout));
      told_ = true;
    }
  }

  const int world_;
  const std::string kind_;
  const std::shared_ptr<Store> store_;
  const std::string where_;
  const LocalRanksOptions& options_;
  const MakeDeviceFn& make_device_;
  const Body& body_;

  const absl::Time start_ = absl::Now();
  std::vector<int> ranks_;  // of this process
  bool told_ = false;       // for whom or what it waits

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::set<int> starting_, running_;
  std::map<int, absl::Status> errors_;
  // By rank: NcclEnds::watch_asks_for.
  std::map<int, std::function<absl::Duration()>> watches_;
};

// Rank 0 says what all must have, the others compare.
absl::Status CheckAlike(Store& store, int rank,
                        const std::vector<std::string>& own,
                        absl::Duration timeout, const Patience& patience) {
  constexpr char kKey[] = "alike";
  if (rank == 0) return store.Put(kKey, absl::StrJoin(own, "\n"));
  const absl::StatusOr<std::string> text = Await(
      store, kKey, absl::StrCat("nccl: rank ", rank, ": the config of rank 0"),
      timeout, patience);
  if (absl::IsCancelled(text.status())) {
    return StoreFailure(store, text.status());
  }
  ZERO_RETURN_IF_ERROR(text.status());
  const std::vector<std::string> wanted = absl::StrSplit(*text, '\n');
  for (size_t i = 0; i < std::max(own.size(), wanted.size()); ++i) {
    const std::string has = i < own.size() ? own[i] : "";
    const std::string want = i < wanted.size() ? wanted[i] : "";
    if (has == want) continue;
    return StoreFailure(
        store, absl::InvalidArgumentError(absl::StrCat(
                   "nccl: rank ", rank, " differs from rank 0: it has \"", has,
                   "\", rank 0 \"", want,
                   "\"; start all ranks of the same program with the same "
                   "config")));
  }
  return absl::OkStatus();
}

}  // namespace

void LoadKernelsEarly() {
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
}

absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device, const Body& body) {
  ZERO_RETURN_IF_ERROR(CheckRanksOfGpus(world, NumCudaDevices()));
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  std::vector<int> all(world);
  std::iota(all.begin(), all.end(), 0);
  return Ranks(world,
               absl::StrCat("threads of this process, connected by ", version),
               std::make_shared<MemoryStore>(), /*where=*/"", options,
               make_device, body)
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
      TcpStore::Connect(launch.store, launch.rank, launch.world, timeout,
                        options.patience));
  std::vector<std::string> alike = options.alike;
  alike.push_back(version);
  ZERO_RETURN_IF_ERROR(
      CheckAlike(*store, launch.rank, alike, timeout, options.patience));
  // One process speaks for all that wait.
  const std::string where =
      launch.rank == 0 ? AddressText(launch.store) : std::string();
  const absl::Status status =
      Ranks(launch.world, absl::StrCat("processes, connected by ", version),
            store, where, options, make_device, body)
          .Run({launch.rank});
  if (!status.ok()) return status;
  return MeetInStore(*store, "end of the run", launch.rank, launch.world,
                     timeout);
}

}  // namespace zero
