#include "engine/comm/mpi_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "engine/comm/mpi_network.h"
#include "engine/comm/progress.h"

namespace zero {
namespace {

// How long a late process waits for the others' reports.
constexpr absl::Duration kAnswers = absl::Seconds(2);

std::string ProgressKey(int rank) { return absl::StrCat("progress/", rank); }

// The address of process 0's store: all processes get it by MPI.
absl::StatusOr<TcpStoreAddress> SpreadAddress(
    const Launch& launch, MpiNetwork& network,
    std::unique_ptr<TcpStoreServer>* server) {
  std::string told;
  absl::Status listens;
  if (network.process() == 0) {
    TcpStoreAddress address = launch.store.value_or(TcpStoreAddress{
        launch.local_world == launch.world ? "127.0.0.1" : HostName(), 0});
    // Slurm's port is a guess; MPI needs none.
    if (launch.world_name != "WORLD_SIZE" &&
        GetEnv("MASTER_PORT") == absl::nullopt) {
      address.port = 0;
    }
    auto listening =
        TcpStoreServer::Listen(address, network.num_processes(), "process");
    if (listening.ok()) {
      *server = *std::move(listening);
      told = absl::StrCat((*server)->port(), " ", address.host);
    }
    listens = listening.status();
  }
  // The text is sent even after a failure: the others wait for it.
  ZERO_ASSIGN_OR_RETURN(told, network.Broadcast(told));
  ZERO_RETURN_IF_ERROR(listens);
  const std::vector<std::string> parts = absl::StrSplit(told, ' ');
  TcpStoreAddress address;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &address.port)) {
    return absl::UnavailableError(
        "mpi: process 0 could not listen for the others; see its message");
  }
  // Its own name may resolve to another of its addresses.
  address.host = parts[1] == HostName() ? "127.0.0.1" : parts[1];
  return address;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(int ranks_here, std::shared_ptr<MpiNetwork> network,
               std::shared_ptr<Store> store, std::vector<std::string> processes,
               const LocalRanksOptions& options)
      : Transport(ranks_here * network->num_processes()),
        ranks_here_(ranks_here),
        network_(std::move(network)),
        store_(std::move(store)),
        processes_(std::move(processes)),
        shards_(options.shards == 0 ? world() : options.shards) {
    LocalOptions local = options.local;
    local.others = {
        .network = network_,
        .ask = [this] { return AskOthers(); },
        .find_cause =
            [this](const absl::Status& own) { return FindCause(own); }};
    timeout_ = local.timeout;
    group_ = LocalGroup::Make(world(), std::move(local));
  }

  absl::Status Connect(int index, Rank* rank) override {
    for (const Channel channel : kChannels) {
      rank->end(channel) =
          group_->Connect(index, ChannelName(channel),
                          MembersOf(channel, index, world(), shards_));
    }
    const int here = static_cast<int>(std::count_if(
        processes_.begin(), processes_.end(), [](const std::string& process) {
          return absl::EndsWith(process, absl::StrCat(" on ", HostName()));
        }));
    rank->memory.sharers = rank->memory.host_sharers = here * ranks_here_;
    rank->memory.context_sharers = ranks_here_;
    rank->missing = [group = group_] { return group->missing(); };
    rank->sent_bytes = [group = group_] { return group->sent_bytes(); };
    rank->kind = Kind();
    for (int one = 0; one < world(); ++one) {
      rank->hosts.push_back(HostOf(processes_[one / ranks_here_]));
    }
    // Measures free memory before any process takes some.
    rank->device->memory();
    return MeetInStore(*store_, "start of the ranks", index, world(), timeout_);
  }

  void Abort(int index, const absl::Status& status) override {
    group_->Abort(index, status);
  }
  absl::Status status() override { return group_->status(); }
  std::vector<int> missing() override { return group_->missing(); }

  // Carries failures from this process to the others and back, and answers
  // requests for our ranks' progress.
  absl::Status Watch(bool /*starting*/) override {
    const absl::Status own = group_->status();
    if (!own.ok()) return Tell(own);
    if (absl::Now() < next_look_) return own;
    // The store answers a few thousand calls a second.
    next_look_ =
        absl::Now() + network_->num_processes() * absl::Milliseconds(1);
    const absl::Status stored = StoredFailure(*store_);
    if (!stored.ok()) {
      group_->Fail(stored);
      return group_->status();
    }
    const auto asked = store_->Get(kQuestion);
    if (asked.ok() && asked->has_value()) Answer();
    return own;
  }

  // Tells all processes, unless one of them has said why the run failed.
  absl::Status Tell(const absl::Status& own) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (told_.ok()) {
      told_ = StoreFailure(*store_, WithPlaces(own), group_->missing());
    }
    return told_;
  }

  // `status` with the places of the ranks that it names.
  absl::Status WithPlaces(const absl::Status& status) const {
    const std::string text(status.message());
    if (absl::StrContains(text, ", pid ") ||
        absl::StrContains(text, "is pid ")) {
      return status;
    }
    return absl::Status(status.code(),
                        text + PlacesNamedIn(text, ranks_here_, processes_));
  }

 private:
  static constexpr char kQuestion[] = "where is everybody?";

  // The last word of "pid 4711 on node2".
  static std::string HostOf(const std::string& process) {
    return process.substr(process.rfind(' ') + 1);
  }

  // "threads of 2 processes on 2 hosts, connected by Open MPI v4.1.4".
  std::string Kind() const {
    std::set<std::string> hosts;
    for (const std::string& process : processes_) {
      hosts.insert(HostOf(process));
    }
    return absl::StrCat(
        ranks_here_ == 1 ? "processes" : "threads of ",
        ranks_here_ == 1
            ? ""
            : absl::StrCat(network_->num_processes(), " processes"),
        " on ", hosts.size(), hosts.size() == 1 ? " host" : " hosts",
        ", connected by ", network_->library());
  }

  void Answer() {
    std::map<int, std::vector<ChannelProgress>> by_rank;
    for (const auto& [channel, ranks] : group_->progress()) {
      for (const auto& [rank, one] : ranks) by_rank[rank].push_back(one);
    }
    for (const auto& [rank, channels] : by_rank) {
      store_->Put(ProgressKey(rank), ProgressText(channels)).IgnoreError();
    }
  }

  RanksProgress AskOthers() {
    Answer();
    store_->PutFirst(kQuestion, "").IgnoreError();
    // A process that is only late answers; one that does not is dead.
    RanksProgress told;
    const absl::Time deadline = absl::Now() + kAnswers;
    for (int rank = 0; rank < world(); ++rank) {
      const auto text =
          Await(*store_, ProgressKey(rank), "",
                std::max(deadline - absl::Now(), absl::ZeroDuration()));
      if (!text.ok()) continue;
      for (const ChannelProgress& one : ParseProgress(*text)) {
        told[one.channel][rank] = one;
      }
    }
    return told;
  }

  absl::Status FindCause(const absl::Status& own) {
    const absl::Time deadline =
        absl::Now() + std::min(timeout_ / 4, absl::Seconds(1));
    while (absl::Now() < deadline) {
      const absl::Status told = StoredFailure(*store_);
      if (!told.ok()) return told;
      absl::SleepFor(absl::Milliseconds(50));
    }
    return own;
  }

  const int ranks_here_;
  const std::shared_ptr<MpiNetwork> network_;
  const std::shared_ptr<Store> store_;
  const std::vector<std::string> processes_;  // "pid 4711 on node2"
  const int shards_;
  absl::Duration timeout_;
  std::shared_ptr<LocalGroup> group_;
  absl::Time next_look_ = absl::InfinitePast();  // of Watch

  std::mutex mutex_;
  absl::Status told_;
};

}  // namespace

std::string PlacesNamedIn(const std::string& text, int ranks_per_process,
                          const std::vector<std::string>& processes) {
  constexpr size_t kMost = 4;
  std::vector<std::string> places;
  std::set<std::string> seen;
  for (const char* const kind : {"rank ", "process "}) {
    const bool is_rank = kind[0] == 'r';
    for (size_t at = text.find(kind); at != std::string::npos;
         at = text.find(kind, at + 1)) {
      const size_t begin = at + std::string(kind).size();
      const size_t end = text.find_first_not_of("0123456789", begin);
      int number = -1;
      if (!absl::SimpleAtoi(text.substr(begin, end - begin), &number)) continue;
      const int process = is_rank ? number / ranks_per_process : number;
      if (process < 0 || process >= static_cast<int>(processes.size()) ||
          places.size() == kMost ||
          !seen.insert(absl::StrCat(kind, number)).second) {
        continue;
      }
      const int first = process * ranks_per_process;
      places.push_back(
          absl::StrCat(kind, number, " is ",
                       !is_rank && ranks_per_process > 1
                           ? absl::StrCat("ranks ", first, " to ",
                                          first + ranks_per_process - 1, ", ")
                       : is_rank && ranks_per_process > 1
                           ? absl::StrCat("of process ", process, ", ")
                           : "",
                       processes[process]));
    }
  }
  std::string result;
  for (const std::string& place : places) absl::StrAppend(&result, "; ", place);
  return result;
}

absl::Status RunMpiProcess(const Launch& launch, int ranks_here,
                           const LocalRanksOptions& options,
                           const MakeDeviceFn& make_device,
                           const RankBody& body) {
  ZERO_ASSIGN_OR_RETURN(const std::shared_ptr<MpiNetwork> network,
                        MpiNetwork::Open(options.patience));
  const int process = network->process(), processes = network->num_processes();
  if (processes != launch.world || process != launch.rank) {
    return absl::FailedPreconditionError(absl::StrCat(
        "mpi: ", network->library(), " says that this is process ", process,
        " of ", processes, ", but ", launch.world_name, " is ", launch.world,
        ": start it with the mpirun of that MPI, or with srun --mpi=pmix (srun "
        "--mpi=list shows what is available)"));
  }
  const absl::Duration timeout = options.local.timeout;
  std::unique_ptr<TcpStoreServer> server;  // ends last: others may still ask
  ZERO_ASSIGN_OR_RETURN(const TcpStoreAddress address,
                        SpreadAddress(launch, *network, &server));
  ZERO_ASSIGN_OR_RETURN(std::shared_ptr<Store> store,
                        TcpStore::Connect(address, process, processes, timeout,
                                          options.patience));
  std::vector<std::string> must_match = options.must_match;
  // This line is the first: other numbers of the config follow from it.
  must_match.insert(must_match.begin(),
                    absl::StrCat(network->library(), ", --ranks ", ranks_here));
  const std::string host = HostName();
  ZERO_RETURN_IF_ERROR(
      MatchInStore(*store, absl::StrCat("mpi: ", host, ", process"), process,
                   must_match, timeout, options.patience));
  ZERO_ASSIGN_OR_RETURN(
      std::vector<std::string> places,
      ExchangeInStore(*store, "hosts", process, processes,
                      absl::StrCat("pid ", getpid(), " on ", host), timeout));
  MpiTransport transport(ranks_here, network, store, std::move(places),
                         options);
  std::vector<int> ranks(ranks_here);
  std::iota(ranks.begin(), ranks.end(), process * ranks_here);
  LocalRanksOptions named = options;
  if (options.on_hang) {
    named.on_hang = [&](const absl::Status& hang) {
      options.on_hang(transport.WithPlaces(hang));
    };
  }
  absl::Status status = RunRanksOf(transport, ranks, named, make_device, body);
  if (status.ok()) {
    status = MeetInStore(*store, "end of the run", process, processes, timeout);
  }
  if (status.ok()) {
    network->Finish(timeout);
    return status;
  }
  transport.Tell(status).IgnoreError();
  status = transport.WithPlaces(status);
  // mpirun ends all processes as soon as one has failed: let process 0 write
  // its message first.
  constexpr char kWritten[] = "process 0 has ended";
  if (process == 0) {
    store->Put(kWritten, "").IgnoreError();
    return status;
  }
  const absl::Time deadline =
      absl::Now() + std::min(timeout, absl::Seconds(10));
  while (absl::Now() < deadline) {
    const auto written = store->Get(kWritten);
    if (!written.ok() || written->has_value()) break;
    absl::SleepFor(absl::Milliseconds(50));
  }
  return status;
}

}  // namespace zero
