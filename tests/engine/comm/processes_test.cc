// Ranks in several processes: over fake networks of one program.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/channel.h"
#include "engine/comm/local.h"
#include "engine/comm/mpi_ranks.h"
#include "engine/comm/rounds.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/comm/comm_testing.h"
#include "tests/support/fake_network.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// `world` ranks in as many processes, which can query each other.
Groups MakeProcesses(int world, int num_processes,
                     absl::Duration timeout = absl::Minutes(5),
                     std::shared_ptr<FakeWire> wire = nullptr,
                     int ranks_per_host = 0) {
  if (wire == nullptr) wire = std::make_shared<FakeWire>();
  auto all = std::make_shared<std::vector<std::weak_ptr<LocalGroup>>>();
  Groups groups;
  for (int process = 0; process < num_processes; ++process) {
    LocalOptions options{.timeout = timeout};
    if (ranks_per_host > 0) {
      options.algorithm = BulkAlgorithm::kHierarchical;
      options.ranks_per_host = ranks_per_host;
    }
    if (num_processes > 1) {
      options.others.network =
          std::make_shared<FakeNetwork>(wire, process, num_processes);
      options.others.ask = [all, process] {
        RanksProgress told;
        for (size_t i = 0; i < all->size(); ++i) {
          const auto other = (*all)[i].lock();
          if (static_cast<int>(i) == process || other == nullptr) continue;
          for (const auto& [channel, ranks] : other->progress()) {
            told[channel].insert(ranks.begin(), ranks.end());
          }
        }
        return told;
      };
    }
    groups.push_back(LocalGroup::Make(world, std::move(options)));
  }
  all->assign(groups.begin(), groups.end());
  return groups;
}

// All that a rank has received.
struct Received {
  std::vector<Values> values;
  int64_t bytes = 0;

  bool operator==(const Received& other) const {
    return values == other.values && bytes == other.bytes;
  }
};

// One random collective, the same on all ranks except for the data.
void RunOne(std::mt19937& random, int rank, Communicator& comm, Stream& stream,
            Received* received) {
  const auto choose = [&](int n) { return static_cast<int>(random() % n); };
  const int world = comm.world(), place = comm.rank();
  const DType dtype = kFloats[choose(4)];
  const int kind = choose(5), root = choose(world);
  const bool accumulate = choose(2) == 1, in_place = choose(2) == 1;
  const auto data_seed = static_cast<uint32_t>(random());
  std::vector<int64_t> pieces;
  for (int i = choose(5); i >= 0; --i) {
    pieces.push_back(choose(3) == 0 ? choose(3) : choose(500));
  }
  // Several rounds: more than 2 MiB of all ranks.
  if (choose(8) == 0) pieces.push_back(150'000 / world);
  std::mt19937 own(data_seed + rank);
  const auto number = [&](int64_t) {
    return std::ldexp(static_cast<double>(own() % 20001) - 10000,
                      static_cast<int>(own() % 12) - 16);
  };
  std::vector<Values> sends, recvs;
  std::vector<CollectiveSegment> segments;
  const bool gathers = kind == 0, scatters = kind == 1;
  for (const int64_t n : pieces) {
    const int64_t full = gathers || scatters ? n * world : n;
    sends.push_back(Values::Of(dtype, gathers ? n : full, number));
    recvs.push_back(Values::Of(dtype, scatters ? n : full, number));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t n = pieces[i];
    CollectiveSegment segment{sends[i].data(), recvs[i].data(),
                              gathers || scatters ? n * world : n};
    if (in_place && gathers) segment.send = recvs[i].at(place * n);
    if (in_place && scatters && !accumulate) {
      segment.recv = sends[i].at(place * n);
    }
    if (in_place && kind == 3) segment.send = segment.recv;
    segments.push_back(segment);
  }
  switch (kind) {
    case 0:
      comm.AllGather(stream, "all", dtype, segments);
      break;
    case 1:
      comm.ReduceScatter(stream, "sum", dtype, accumulate, segments);
      break;
    case 2:
      comm.Reduce(stream, "one", dtype, root, segments);
      break;
    case 3:
      comm.Broadcast(stream, "from", dtype, root, segments);
      break;
    default:
      comm.Barrier(stream, "meet");
      break;
  }
  stream.Synchronize();
  for (auto* values : {&sends, &recvs}) {
    for (Values& one : *values) received->values.push_back(std::move(one));
  }
}

// Adds up the bytes that a process sends by Rounds, at the end of its lowest
// rank on a channel.
class Expecting final : public CommunicatorWrapper {
 public:
  // `hosts` is empty except for hierarchical sums.
  Expecting(std::unique_ptr<Communicator> inner, std::vector<int> processes,
            std::vector<int> hosts, int process, std::atomic<int64_t>* bytes)
      : CommunicatorWrapper(std::move(inner)),
        processes_(std::move(processes)),
        hosts_(std::move(hosts)),
        process_(process),
        bytes_(bytes) {}

  void Run(Stream& stream, Collective collective) override {
    const auto first =
        std::find(processes_.begin(), processes_.end(), process_);
    if (first - processes_.begin() == rank()) {
      *bytes_ += Rounds(collective, processes_, process_, hosts_).sent_bytes();
    }
    inner_->Run(stream, std::move(collective));
  }

 private:
  const std::vector<int> processes_, hosts_;
  const int process_;
  std::atomic<int64_t>* const bytes_;
};

// What every rank has after `count` random collectives on the channels of a
// run with groups of `shards`, some of them at once.
std::vector<Received> RunRandomly(const Groups& groups, int shards, int count,
                                  int ranks_per_host = 0) {
  const int world = groups.front()->world();
  const int here = world / static_cast<int>(groups.size());
  std::vector<std::atomic<int64_t>> expected(groups.size());
  std::vector<Received> received(world);
  const absl::Status status =
      RunOnGroups(groups, StreamRole::kReduce, [&](auto& rank) {
        std::vector<Received> by_channel(std::size(kChannels));
        std::vector<std::thread> threads;
        for (const Channel channel : kChannels) {
          threads.emplace_back([&, channel] {
            const auto device = MakeCpuDevice(1);
            std::vector<int> processes, hosts;
            for (const int member :
                 MembersOf(channel, rank.rank, world, shards)) {
              processes.push_back(member / here);
              if (ranks_per_host > 0) {
                hosts.push_back(member / ranks_per_host);
              }
            }
            const int process = rank.rank / here;
            const auto comm = std::make_unique<Expecting>(
                GroupOf(groups, rank.rank)
                    .Connect(rank.rank, ChannelName(channel),
                             MembersOf(channel, rank.rank, world, shards)),
                std::move(processes), std::move(hosts), process,
                &expected[process]);
            const auto stream = device->MakeStream(StreamRole::kReduce);
            // Members of a channel share a seed.
            std::mt19937 random(
                1000 * static_cast<int>(channel) +
                MembersOf(channel, rank.rank, world, shards).front());
            Received& mine = by_channel[static_cast<size_t>(channel)];
            for (int i = 0; i < count; ++i) {
              RunOne(random, rank.rank, *comm, *stream, &mine);
            }
            mine.bytes = comm->received_bytes();
            EXPECT_EQ(mine.bytes, comm->Total().received);
            EXPECT_TRUE(comm->status().ok()) << comm->status();
          });
        }
        for (std::thread& thread : threads) thread.join();
        Received& all = received[rank.rank];
        for (Received& one : by_channel) {
          all.bytes += one.bytes;
          for (Values& values : one.values) all.values.push_back(values);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  for (size_t process = 0; process < groups.size(); ++process) {
    EXPECT_EQ(groups[process]->sent_bytes(), expected[process])
        << "process " << process;
  }
  return received;
}

TEST(ProcessesTest, EverySplitHasTheBitsOfOneProcess) {
  const struct {
    int world, shards;
    std::vector<int> processes;
  } kCases[] = {{2, 2, {2}},      {3, 3, {3}},       {4, 2, {2, 4}},
                {4, 4, {2}},      {6, 6, {2, 3, 6}}, {6, 3, {2, 3}},
                {6, 2, {2, 3, 6}}};
  for (const auto& [world, shards, splits] : kCases) {
    constexpr int kCount = 8;
    const auto expected = RunRandomly(MakeProcesses(world, 1), shards, kCount);
    for (const int processes : splits) {
      const auto received =
          RunRandomly(MakeProcesses(world, processes), shards, kCount);
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_TRUE(received[rank] == expected[rank])
            << world << " ranks in groups of " << shards << ", " << processes
            << " processes: rank " << rank;
      }
    }
  }
}

TEST(ProcessesTest, HierarchicalSumsDependOnTheHostsAndOnNoProcess) {
  const struct {
    int world, shards, ranks_per_host;
    std::vector<int> processes;
  } kCases[] = {{4, 4, 2, {2, 4}},    {4, 2, 2, {2, 4}}, {6, 6, 3, {2, 3, 6}},
                {6, 6, 2, {2, 3, 6}}, {6, 3, 2, {2, 3}}, {6, 2, 3, {2, 3}},
                {4, 4, 1, {2}},       {4, 4, 4, {2, 4}}};
  for (const auto& [world, shards, ranks_per_host, splits] : kCases) {
    constexpr int kCount = 8;
    const auto run = [&, world = world, shards = shards,
                      hosts = ranks_per_host](int processes) {
      return RunRandomly(
          MakeProcesses(world, processes, absl::Minutes(5), nullptr, hosts),
          shards, kCount, hosts);
    };
    const auto expected = run(1);
    for (const int processes : splits) {
      const auto received = run(processes);
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_TRUE(received[rank] == expected[rank])
            << world << " ranks in groups of " << shards << ", "
            << ranks_per_host << " a host, " << processes << " processes: rank "
            << rank;
      }
    }
  }
}

// More elements than a host sums at once, in several rounds.
TEST(ProcessesTest, AHostSendsItsSumRoundedAndOnce) {
  constexpr int64_t kPiece = 100'003;
  const auto value = [](int rank, int64_t i) {
    return static_cast<double>((rank * 7919 + i * 31) % 1009) / 64 - 7;
  };
  std::map<int, int64_t> sent;  // by ranks of a host
  for (const int ranks_per_host : {1, 4}) {
    const Groups groups =
        MakeProcesses(8, 2, absl::Minutes(5), nullptr, ranks_per_host);
    const absl::Status status =
        RunOnGroups(groups, StreamRole::kReduce, [&](auto& rank) {
          const auto full =
              Values::Of(DType::kBF16, 8 * kPiece,
                         [&](int64_t i) { return value(rank.rank, i); });
          Values send = full, piece(DType::kBF16, kPiece);
          rank.comm->ReduceScatter(*rank.stream, "sum", DType::kBF16, false,
                                   {{send.data(), piece.data(), 8 * kPiece}});
          rank.stream->Synchronize();
          for (int64_t i = 0; i < kPiece; ++i) {
            float all = 0;
            for (int host = 0; host < 8 / ranks_per_host; ++host) {
              float sum = 0;
              for (int r = 0; r < ranks_per_host; ++r) {
                sum += static_cast<float>(
                    BF16ToF32(F32ToBF16(static_cast<float>(value(
                        host * ranks_per_host + r, rank.rank * kPiece + i)))));
              }
              all += BF16ToF32(F32ToBF16(sum));
            }
            if (piece[i] != BF16ToF32(F32ToBF16(all))) {
              return absl::InternalError(absl::StrCat("element ", i));
            }
          }
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    sent[ranks_per_host] = groups[0]->sent_bytes();
  }
  EXPECT_EQ(sent[4], 4 * kPiece * 2);
  EXPECT_EQ(sent[1], 4 * sent[4]);
}

// A message per pair of processes and round, and one that says what it is.
TEST(ProcessesTest, TheRanksOfAProcessSendOneMessage) {
  const auto wire = std::make_shared<FakeWire>();
  const Groups groups = MakeProcesses(6, 2, absl::Minutes(5), wire);
  const absl::Status status =
      RunOnGroups(groups, StreamRole::kReduce, [&](auto& rank) {
        Values piece(DType::kF32, 100), full(DType::kF32, 600);
        rank.comm->AllGather(*rank.stream, "all", DType::kF32,
                             {{piece.data(), full.data(), 600}});
        rank.comm->ReduceScatter(*rank.stream, "sum", DType::kF32, false,
                                 {{full.data(), piece.data(), 600}});
        rank.stream->Synchronize();
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(wire->num_messages, 2 * (1 + 1) * 2);
}

// ---- Rounds -----------------------------------------------------------------

TEST(RoundsTest, WhatIsReceivedInARoundIsBounded) {
  for (const CollectiveKind kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
        CollectiveKind::kReduce, CollectiveKind::kBroadcast}) {
    for (const int per_process : {1, 2, 4}) {
      std::vector<int> processes;
      for (int place = 0; place < 8; ++place) {
        processes.push_back(place / per_process);
      }
      std::vector<char> memory(1 << 20);
      std::vector<Collective> issued(8);
      std::vector<const Collective*> all(8);
      for (int place = 0; place < 8; ++place) {
        issued[place].kind = kind;
        for (const int64_t elems : {800, 0, 8, 40000}) {
          issued[place].segments.push_back(
              {memory.data(), memory.data(), elems});
        }
        if (processes[place] == 0) all[place] = &issued[place];
      }
      constexpr int64_t kBytes = 1 << 16;
      const Rounds rounds(issued[0], processes, /*process=*/0, /*hosts=*/{},
                          kBytes);
      EXPECT_GT(rounds.size(), 1);
      EXPECT_LE(rounds.staging_bytes(), kBytes);
      std::vector<char> staging(rounds.staging_bytes());
      int64_t elems = 0;
      for (int round = 0; round < rounds.size(); ++round) {
        int64_t bytes = 0;
        for (const Window& window : rounds.windows(round)) {
          elems += window.elems;
        }
        for (const PeerMessages& peer :
             rounds.Messages(round, all, staging.data(), nullptr)) {
          for (const MemoryRun& run : peer.receive) bytes += run.bytes;
        }
        EXPECT_LE(bytes, kBytes);
      }
      int64_t wanted = 0;
      for (size_t i = 0; i < 4; ++i) wanted += PieceElems(issued[0], i, 8);
      EXPECT_EQ(elems, wanted);
    }
  }
}

// ---- Failures ---------------------------------------------------------------

// How the ranks of all processes ended.
std::vector<absl::Status> RankOutcomes(
    const Groups& groups, const std::function<void(RankContext&)>& fn) {
  std::vector<absl::Status> statuses(groups.front()->world());
  RunOnGroups(groups, StreamRole::kReduce,
              [&](RankContext& rank) -> absl::Status {
                fn(rank);
                rank.stream->Synchronize();
                statuses[rank.rank] = rank.comm->status();
                return absl::OkStatus();
              })
      .IgnoreError();
  return statuses;
}

TEST(ProcessesTest, AnotherCollectiveOfAnotherProcessIsNamed) {
  const auto statuses = RankOutcomes(
      MakeProcesses(4, 2, absl::Seconds(20)), [](RankContext& rank) {
        Values piece(DType::kF32, 8), full(DType::kF32, 32);
        if (rank.rank < 2) {
          rank.comm->AllGather(*rank.stream, "all", DType::kF32,
                               {{piece.data(), full.data(), 32}});
        } else {
          rank.comm->Barrier(*rank.stream, "meet");
        }
        rank.stream->Synchronize();
      });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("differs from rank 0 at #1 of channel \"test\""));
  }
}

TEST(ProcessesTest, ALateRankOfAnotherProcessIsNamed) {
  const Groups groups = MakeProcesses(4, 2, absl::Milliseconds(500));
  const auto statuses = RankOutcomes(groups, [&](RankContext& rank) {
    while (rank.rank == 3 && groups[0]->status().ok()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    rank.comm->Barrier(*rank.stream, "meet");
    rank.stream->Synchronize();
  });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(statuses[0].message()),
              AllOf(HasSubstr("rank 3 did not arrive at #1 of channel "
                              "\"test\", barrier \"meet\""),
                    HasSubstr("rank 3 issued nothing here")));
}

TEST(ProcessesTest, ANetworkThatFailsEndsAllRanks) {
  const auto wire = std::make_shared<FakeWire>();
  std::barrier all_are_past_it(4);
  const auto statuses = RankOutcomes(
      MakeProcesses(4, 2, absl::Minutes(5), wire), [&](RankContext& rank) {
        rank.comm->Barrier(*rank.stream, "before");
        rank.stream->Synchronize();
        all_are_past_it.arrive_and_wait();
        if (rank.rank == 3) {
          std::lock_guard<std::mutex> lock(wire->mutex);
          wire->failure = "torn cable";
          wire->changed.notify_all();
        }
        Values full(DType::kF32, 400'000), piece(DType::kF32, 100'000);
        rank.comm->ReduceScatter(*rank.stream, "sum", DType::kF32, false,
                                 {{full.data(), piece.data(), 400'000}});
        rank.stream->Synchronize();
      });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("failed in #2 of channel \"test\""),
                      HasSubstr("torn cable")));
  }
}

// A failure of other processes ends collectives in flight.
TEST(ProcessesTest, AFailureElsewhereEndsTheWait) {
  const Groups groups = MakeProcesses(2, 2);
  const auto statuses = RankOutcomes(groups, [&](RankContext& rank) {
    if (rank.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      groups[0]->Fail(absl::DataLossError("disk on fire"));
      return;
    }
    rank.comm->Barrier(*rank.stream, "meet");
    rank.stream->Synchronize();
  });
  EXPECT_EQ(statuses[0], absl::DataLossError("disk on fire"));
}

TEST(ProcessesTest, ARankOfAnotherProcessCanNotConnectHere) {
  EXPECT_DEATH(MakeProcesses(4, 2)[0]->Connect(2, "test"),
               "rank 2 is of another process");
}

TEST(MpiRanksTest, MessagesSayWhereRanksAre) {
  const std::vector<std::string> processes = {"pid 10 on a", "pid 11 on b"};
  EXPECT_EQ(PlacesNamedIn("rank 5 left before rank 0 and rank 5", 4, processes),
            "; rank 5 is of process 1, pid 11 on b; rank 0 is of process 0, "
            "pid 10 on a");
  EXPECT_EQ(PlacesNamedIn("process 1 ended", 4, processes),
            "; process 1 is ranks 4 to 7, pid 11 on b");
  EXPECT_EQ(PlacesNamedIn("rank 1 left", 1, processes),
            "; rank 1 is pid 11 on b");
  EXPECT_EQ(PlacesNamedIn("rank 9, rank x and all ranks", 4, processes), "");
}

}  // namespace
}  // namespace zero
