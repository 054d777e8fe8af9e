#include "engine/comm/nccl_ranks.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "engine/comm/nccl/nccl.h"

namespace zero {
namespace {

class NcclTransport final : public Transport {
 public:
  // `ranks`: those of this process. `where`: the store's address, to report
  // while waiting for other processes; empty: none.
  NcclTransport(int world, std::vector<int> ranks, std::string kind,
                std::shared_ptr<Store> store, std::string where,
                const LocalRanksOptions& options)
      : Transport(world),
        ranks_(std::move(ranks)),
        kind_(std::move(kind)),
        store_(std::move(store)),
        where_(std::move(where)),
        options_(options) {}

  absl::Status Connect(int index, Rank* rank) override {
    rank->kind = kind_ + ",";
    ZERO_ASSIGN_OR_RETURN(std::function<absl::Duration()> watch_in_driver,
                          ConnectNccl(store_,
                                      {.rank = index,
                                       .world = world(),
                                       .shards = options_.shards,
                                       .timeout = options_.local.timeout},
                                      rank));
    if (ranks_.size() < static_cast<size_t>(world())) {
      ZERO_ASSIGN_OR_RETURN(
          rank->hosts, ExchangeInStore(*store_, "hosts", index, world(),
                                       HostName(), options_.local.timeout));
    }
    rank->agree = [this, index, num_met = 0](const std::string& name,
                                             bool yes) mutable {
      return Agree(index, absl::StrCat(name, " #", ++num_met), yes);
    };
    std::lock_guard<std::mutex> lock(mutex_);
    watches_[index] = std::move(watch_in_driver);
    return absl::OkStatus();
  }

  void Abort(int index, const absl::Status& status) override {
    StoreFailure(*store_,
                 absl::Status(status.code(), absl::StrCat("nccl: rank ", index,
                                                          " failed to start: ",
                                                          status.message())))
        .IgnoreError();
  }
  absl::Status status() override { return StoredFailure(*store_); }
  std::vector<int> missing() override { return StoredMissing(*store_); }

  absl::Status Watch(bool starting) override {
    if (starting) CheckStart();
    const absl::Status stored = status();
    return stored.ok() ? CheckWatches() : stored;
  }

 private:
  absl::StatusOr<bool> Agree(int index, const std::string& name, bool yes) {
    ZERO_ASSIGN_OR_RETURN(
        const std::vector<std::string> said,
        ExchangeInStore(*store_, name, index, world(), yes ? "yes" : "no",
                        options_.local.timeout));
    return std::find(said.begin(), said.end(), "no") == said.end();
  }

  // A watch that is stuck in CUDA cannot report a timeout. OK, or the failure
  // of the run.
  absl::Status CheckWatches() {
    const absl::Duration timeout = options_.local.timeout;
    std::vector<int> stuck;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [rank, in_driver] : watches_) {
        if (in_driver() >= timeout) stuck.push_back(rank);
      }
    }
    if (stuck.empty()) return absl::OkStatus();
    return StoreFailure(
        *store_,
        absl::UnavailableError(absl::StrCat(
            "nccl: ", RankNames(stuck),
            ": the watching thread has been stuck in a CUDA call for ",
            absl::FormatDuration(timeout),
            "; see dmesg and nvidia-smi for the state of the GPU",
            ranks_.size() == 1
                ? ""
                : ", or start the ranks by torchrun or srun: threads of one "
                  "process can stop each other there")),
        stuck);
  }

  // Checks the start while ranks of this process are not connected yet.
  void CheckStart() {
    const Patience& patience = options_.patience;
    const bool tells = !told_ && patience.tell && !where_.empty() &&
                       absl::Now() >= start_ + patience.tell_after;
    if (!patience.ends() && !tells) return;
    const auto all_missing = MissingInStore(*store_, kNcclStartUp, world());
    if (!all_missing.ok()) return;
    std::vector<int> missing;
    std::set_difference(all_missing->begin(), all_missing->end(),
                        ranks_.begin(), ranks_.end(),
                        std::back_inserter(missing));
    const std::string whom =
        missing.empty() ? "NCCL connected the ranks"
                        : absl::StrCat("it waited for ", RankNames(missing),
                                       " of ", world());
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
                                 world(), " at ", where_, timeout,
                                 StoredRefusal(*store_)));
      told_ = true;
    } else if (all_missing->empty()) {
      patience.tell(
          absl::StrCat("all ranks are here; NCCL connects them", timeout));
      told_ = true;
    }
  }

  const std::vector<int> ranks_;
  const std::string kind_;
  const std::shared_ptr<Store> store_;
  const std::string where_;
  const LocalRanksOptions& options_;
  const absl::Time start_ = absl::Now();
  bool told_ = false;  // what it waits for

  std::mutex mutex_;
  // The functions that ConnectNccl returns, by rank.
  std::map<int, std::function<absl::Duration()>> watches_;
};

}  // namespace

void LoadKernelsEarly() {
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
}

absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device,
                          const RankBody& body) {
  ZERO_RETURN_IF_ERROR(CheckRanksOfGpus(world, NumCudaDevices()));
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  std::vector<int> all(world);
  std::iota(all.begin(), all.end(), 0);
  NcclTransport nccl(
      world, all,
      absl::StrCat("threads of this process, connected by ", version),
      std::make_shared<MemoryStore>(), /*where=*/"", options);
  return RunRanksOf(nccl, all, options, make_device, body);
}

absl::Status RunNcclProcess(const Launch& launch,
                            const LocalRanksOptions& options,
                            const MakeDeviceFn& make_device,
                            const RankBody& body) {
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  ZERO_ASSIGN_OR_RETURN(const TcpStoreAddress address, launch.store);
  const absl::Duration timeout = options.local.timeout;
  std::unique_ptr<TcpStoreServer> server;  // ends last: others may still ask
  if (launch.rank == 0) {
    ZERO_ASSIGN_OR_RETURN(server,
                          TcpStoreServer::Listen(address, launch.world));
  }
  ZERO_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                        TcpStore::Connect(address, launch.rank, launch.world,
                                          timeout, options.patience));
  std::vector<std::string> must_match = options.must_match;
  must_match.push_back(version);
  ZERO_RETURN_IF_ERROR(MatchInStore(*store, "nccl: rank", launch.rank,
                                    must_match, timeout, options.patience));
  // One process reports for all waiting ones.
  const std::string where =
      launch.rank == 0 ? AddressText(address) : std::string();
  NcclTransport nccl(launch.world, {launch.rank},
                     absl::StrCat("processes, connected by ", version), store,
                     where, options);
  ZERO_RETURN_IF_ERROR(
      RunRanksOf(nccl, {launch.rank}, options, make_device, body));
  return MeetInStore(*store, "end of the run", launch.rank, launch.world,
                     timeout);
}

}  // namespace zero
