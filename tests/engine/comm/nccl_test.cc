#include "engine/comm/nccl/nccl.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/nccl_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "tests/engine/comm/comm_testing.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/cuda_emulator/fake_streams.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/reserved_port.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// One connected rank on its own GPU.
struct GpuRank {
  int rank;
  std::unique_ptr<Device> device;
  Rank ends;
  // One for each end, as the executor has them.
  std::unique_ptr<Stream> compute, gather, reduce;
};

// A store whose server can disappear.
class LosableStore final : public Store {
 public:
  absl::StatusOr<absl::optional<std::string>> Do(
      StoreCall call, const std::string& key,
      const std::string& value) override {
    if (lost_) return absl::UnavailableError("gone");
    return kept_.Do(call, key, value);
  }
  void Lose() { lost_ = true; }

 private:
  MemoryStore kept_;
  std::atomic<bool> lost_ = false;
};

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    emulator::SetDeviceCount(6);
    ResetFakeNccl();
  }
  void TearDown() override { EXPECT_EQ(NumFakeNcclComms(), 0); }

  // Runs fn on every rank; returns fn's result, else the run's status.
  absl::Status RunOnGpus(int world, const NcclOptions& options,
                         const std::function<absl::Status(GpuRank&)>& fn) {
    store_ = std::make_shared<LosableStore>();
    return RunRanks(world, [&](int rank) -> absl::Status {
      NcclOptions own = options;
      GpuRank one;
      one.rank = own.rank = rank;
      own.world = world;
      one.device = *MakeCudaDevice(rank);
      one.ends.device = one.device.get();
      const auto connected = ConnectNccl(store_, own, &one.ends);
      if (!connected.ok()) return connected.status();
      one.compute = one.device->MakeStream(StreamRole::kCompute);
      one.gather = one.device->MakeStream(StreamRole::kGather);
      one.reduce = one.device->MakeStream(StreamRole::kReduce);
      absl::Status status = fn(one);
      for (Stream* stream :
           {one.compute.get(), one.gather.get(), one.reduce.get()}) {
        stream->Synchronize();
      }
      status.Update(one.ends.scalar->status());
      return status;
    });
  }
  absl::Status RunOnGpus(int world,
                         const std::function<absl::Status(GpuRank&)>& fn) {
    return RunOnGpus(world, {.timeout = absl::Seconds(20)}, fn);
  }

  std::shared_ptr<LosableStore> store_;  // of the last run
};

// ---- Results --------------------------------------------------------------

// A rank's result.
using Results = std::vector<Values>;

// Reals for which the order of sums matters, the same for every backend.
double Real(int rank, size_t segment, int64_t i) {
  return 0.37 * static_cast<double>((rank * 131 + segment * 17 + i * 29) % 97) -
         11.3;
}

// Sums of fp32 are NCCL's own, and exact for integers; those of 16 bits are
// in rank order.
double Input(DType dtype, int rank, size_t segment, int64_t i) {
  const bool exact = dtype == DType::kF32 || dtype == DType::kF64;
  return exact ? Number(rank, segment, i) : Real(rank, segment, i);
}

Results GatherAll(Communicator& comm, Stream& stream, DType dtype) {
  Results full;
  std::vector<CollectiveSegment> segments;
  std::vector<Values> pieces;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    pieces.push_back(Values::Of(dtype, kPieces[s], [&](int64_t i) {
      return Number(comm.rank(), s, i);
    }));
    full.push_back(Values(dtype, kPieces[s] * comm.world()));
  }
  for (size_t s = 0; s < kPieces.size(); ++s) {
    void* const own = full[s].at(comm.rank() * kPieces[s]);
    const bool in_place = s % 2 == 1;
    if (in_place && kPieces[s] > 0) {
      std::memcpy(own, pieces[s].data(), kPieces[s] * DTypeBytes(dtype));
    }
    segments.push_back(
        {in_place ? own : pieces[s].data(), full[s].data(), full[s].size()});
  }
  comm.AllGather(stream, "gather", dtype, segments);
  stream.Synchronize();
  return full;
}

Results ScatterAll(Communicator& comm, Stream& stream, DType dtype,
                   bool accumulate) {
  Results full, own;
  std::vector<CollectiveSegment> segments;
  int64_t elems = 0;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    const int64_t size = kPieces[s] * comm.world();
    elems += size;
    full.push_back(Values::Of(dtype, size, [&](int64_t i) {
      return Input(dtype, comm.rank(), s, i);
    }));
    own.push_back(Values::Of(dtype, kPieces[s],
                             [&](int64_t i) { return Number(9, s, i); }));
  }
  for (size_t s = 0; s < kPieces.size(); ++s) {
    const bool in_place = !accumulate && s % 2 == 1;
    segments.push_back(
        {full[s].data(),
         in_place ? full[s].at(comm.rank() * kPieces[s]) : own[s].data(),
         full[s].size()});
  }
  Staging staging(comm, dtype, elems);
  comm.ReduceScatter(stream, "scatter", dtype, accumulate, segments, staging);
  stream.Synchronize();
  Results results;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    results.push_back(Values::Of(dtype, kPieces[s], [&](int64_t i) {
      const bool in_place = !accumulate && s % 2 == 1;
      return in_place ? full[s][comm.rank() * kPieces[s] + i] : own[s][i];
    }));
  }
  return results;
}

Results Rest(Communicator& comm, Stream& stream) {
  Results results;
  const int root = comm.world() - 1;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Values send = Values::Of(
        dtype, 65, [&](int64_t i) { return Number(comm.rank(), 2, i); });
    Values recv(dtype, 65);
    comm.Reduce(stream, "reduce", dtype, root,
                {{send.data(), recv.data(), 65}});
    stream.Synchronize();
    results.push_back(std::move(recv));
  }
  results.push_back(Values::Of(
      DType::kU16, 7, [&](int64_t i) { return 10 * comm.rank() + i; }));
  void* const data = results.back().data();
  comm.Broadcast(stream, "broadcast", DType::kU16, root, {{data, data, 7}});
  comm.Barrier(stream, "barrier");
  stream.Synchronize();
  return results;
}

using MakeResults = std::function<Results(Communicator&, Stream&)>;

// The same on the ranks of `local`, on the CPU.
std::vector<Results> OnLocal(int world, const MakeResults& make) {
  std::vector<Results> results(world);
  EXPECT_EQ(RunOnGroup(LocalGroup::Make(world), StreamRole::kReduce,
                       [&](RankContext& context) {
                         results[context.rank] =
                             make(*context.comm, *context.stream);
                         return absl::OkStatus();
                       }),
            absl::OkStatus());
  return results;
}

class NcclResultsTest : public NcclTest,
                        public testing::WithParamInterface<int> {
 protected:
  void ExpectSameAsLocal(const std::string& what, const MakeResults& make) {
    const int world = GetParam();
    std::vector<Results> results(world);
    ASSERT_EQ(RunOnGpus(world,
                        [&](GpuRank& one) {
                          results[one.rank] =
                              make(*one.ends.reduce, *one.reduce);
                          return absl::OkStatus();
                        }),
              absl::OkStatus());
    const std::vector<Results> expected = OnLocal(world, make);
    for (int rank = 0; rank < world; ++rank) {
      ASSERT_EQ(results[rank].size(), expected[rank].size());
      for (size_t s = 0; s < expected[rank].size(); ++s) {
        EXPECT_TRUE(results[rank][s] == expected[rank][s])
            << what << ", rank " << rank << ", result " << s;
      }
    }
    EXPECT_EQ(NumFakeNcclAborts(), 0);
  }
};

TEST_P(NcclResultsTest, AllGathersAreThoseOfLocal) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kU8}) {
    ExpectSameAsLocal(DTypeName(dtype), [&](auto& comm, auto& stream) {
      return GatherAll(comm, stream, dtype);
    });
  }
  EXPECT_GT(NumFakeNcclFusedGroups(), 0);
}

TEST_P(NcclResultsTest, ReduceScattersAreThoseOfLocal) {
  for (const DType dtype : kFloats) {
    for (const bool accumulate : {false, true}) {
      ExpectSameAsLocal(absl::StrCat(DTypeName(dtype), accumulate ? " +=" : ""),
                        [&](auto& comm, auto& stream) {
                          return ScatterAll(comm, stream, dtype, accumulate);
                        });
    }
  }
}

TEST_P(NcclResultsTest, TheOthersAreThoseOfLocal) {
  ExpectSameAsLocal("others", Rest);
}

INSTANTIATE_TEST_SUITE_P(Worlds, NcclResultsTest, testing::Values(1, 2, 3, 5));

// ---- Streams and groups ---------------------------------------------------

TEST_F(NcclTest, CollectivesOfSeveralChannelsRunBesideEachOther) {
  constexpr int kWorld = 3;
  constexpr int64_t kElems = 64 * kWorld;
  EXPECT_EQ(
      RunOnGpus(
          kWorld,
          [&](GpuRank& one) {
            Values gathered(DType::kF32, kElems), sums(DType::kF32, kElems);
            Values number(DType::kF64, 1);
            const int64_t piece = kElems / kWorld;
            for (int round = 0; round < 20; ++round) {
              for (int64_t i = 0; i < kElems; ++i) sums.Set(i, one.rank + i);
              for (int64_t i = 0; i < piece; ++i) {
                gathered.Set(one.rank * piece + i, one.rank + round);
              }
              number.Set(0, one.rank);
              one.ends.gather->AllGather(
                  *one.gather, "parameters", DType::kF32,
                  {{gathered.at(one.rank * piece), gathered.data(), kElems}});
              one.ends.reduce->ReduceScatter(
                  *one.reduce, "gradients", DType::kF32, false,
                  {{sums.data(), sums.at(one.rank * piece), kElems}},
                  Staging(*one.ends.reduce, DType::kF32, kElems));
              one.ends.scalar->Broadcast(*one.compute, "loss", DType::kF64,
                                         round % kWorld,
                                         {{number.data(), number.data(), 1}});
              one.compute->Synchronize();
              one.gather->Synchronize();
              one.reduce->Synchronize();
              EXPECT_EQ(number[0], round % kWorld);
              for (int64_t i = 0; i < kElems; ++i) {
                EXPECT_EQ(gathered[i], i / piece + round);
              }
              const int64_t first = one.rank * piece;
              for (int64_t i = first; i < first + piece; ++i) {
                EXPECT_EQ(sums[i], 3 + 3 * i);
              }
            }
            return absl::OkStatus();
          }),
      absl::OkStatus());
}

TEST_F(NcclTest, GroupsOfRanksReduceWithinAndAcross) {
  EXPECT_EQ(RunOnGpus(4, {.shards = 2, .timeout = absl::Seconds(20)},
                      [&](GpuRank& one) {
                        EXPECT_EQ(one.ends.gather->world(), 2);
                        EXPECT_EQ(one.ends.reduce->rank(), one.rank % 2);
                        EXPECT_EQ(one.ends.across->world(), 2);
                        EXPECT_EQ(one.ends.across->rank(), one.rank / 2);
                        EXPECT_EQ(one.ends.scalar->world(), 4);
                        Values own(DType::kF32, 2), sum(DType::kF32, 2);
                        for (int i : {0, 1}) own.Set(i, 1 << one.rank);
                        const auto reduce = [&](Communicator& comm, int64_t i) {
                          comm.ReduceScatter(*one.reduce, "unit", DType::kF32,
                                             false,
                                             {{own.data(), sum.at(i), 2}},
                                             Staging(comm, DType::kF32, 2));
                        };
                        reduce(*one.ends.reduce, 0);
                        reduce(*one.ends.across, 1);
                        one.reduce->Synchronize();
                        EXPECT_EQ(sum[0], one.rank < 2 ? 3 : 12);
                        EXPECT_EQ(sum[1], one.rank % 2 == 0 ? 5 : 10);
                        return absl::OkStatus();
                      }),
            absl::OkStatus());
}

TEST_F(NcclTest, MemoryIsRegisteredUntilItIsNot) {
  EXPECT_EQ(RunOnGpus(2,
                      [&](GpuRank& one) {
                        if (one.rank == 1) return absl::OkStatus();
                        Buffer buffer =
                            *one.device->Allocate(1024, MemoryKind::kDevice);
                        {
                          const auto registered = one.ends.gather->Register(
                              buffer.data(), buffer.bytes());
                          EXPECT_EQ(NumFakeNcclRegistrations(), 1);
                        }
                        EXPECT_EQ(NumFakeNcclRegistrations(), 0);
                        return absl::OkStatus();
                      }),
            absl::OkStatus());
}

// ---- Failures -------------------------------------------------------------

// Every rank's own message at the end of a failed run.
class NcclFailureTest : public NcclTest {
 protected:
  // Long enough for what ranks do before they wait, on a loaded machine too.
  static constexpr absl::Duration kTimeout = absl::Seconds(1);

  std::vector<absl::Status> Fail(int world,
                                 const std::function<void(GpuRank&)>& fn,
                                 absl::Duration timeout = kTimeout) {
    std::vector<absl::Status> statuses(world);
    const absl::Time start = absl::Now();
    RunOnGpus(world, {.timeout = timeout}, [&](GpuRank& one) {
      fn(one);
      for (Stream* stream :
           {one.compute.get(), one.gather.get(), one.reduce.get()}) {
        stream->Synchronize();
      }
      statuses[one.rank] = one.ends.scalar->status();
      // Later calls do nothing and do not wait.
      Scatter(one);
      one.reduce->Synchronize();
      return statuses[one.rank];
    }).IgnoreError();
    EXPECT_LT(absl::Now() - start, absl::Seconds(10));
    return statuses;
  }

  static void Scatter(GpuRank& one) {
    static float memory[64] = {};
    float* const own = memory + one.rank;
    one.ends.reduce->Reduce(*one.reduce, "block.3", DType::kF32, 0,
                            {{own, own, 1}});
  }

  // Waits for the failure, as a rank does that computes meanwhile.
  static void AwaitFailure(GpuRank& one) {
    while (one.ends.scalar->status().ok()) {
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
};

TEST_F(NcclFailureTest, ARankThatDoesNotComeIsNamedOnAllRanks) {
  const auto statuses = Fail(3, [](GpuRank& one) {
    Scatter(one);
    if (one.rank == 1) return AwaitFailure(one);
    Scatter(one);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("nccl: rank 1 did not arrive at #2 of channel "
                        "\"reduce\", reduce \"block.3\" fp32 to rank 0 [1] "
                        "within 1s; rank 1 issued #1, reduce \"block.3\" fp32 "
                        "to rank 0 [1] last"),
              HasSubstr("; if a rank was only slow, raise "
                        "communication.timeout_seconds")));
  }
  EXPECT_EQ(NumFakeNcclAborts(), 3 * 4);
}

TEST_F(NcclFailureTest, ARankThatIssuesNothingIsNamed) {
  const auto statuses = Fail(2, [](GpuRank& one) {
    if (one.rank == 0) return AwaitFailure(one);
    Scatter(one);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("nccl: rank 0 did not arrive at #1 of channel "
                          "\"reduce\", reduce \"block.3\" fp32 to rank 0 [1] "
                          "within 1s; rank 0 issued nothing here"));
  }
}

// A rank that waits for it in NCCL's launch is not missing; and all know which
// is, after the store has gone with it.
TEST_F(NcclFailureTest, OnlyWhoDoesNotComeToTheFirstCollectiveIsMissing) {
  ConnectFakeNcclLate();
  constexpr int kWorld = 3;
  std::atomic<int> num_failed = 0;
  const auto statuses = Fail(kWorld, [&](GpuRank& one) {
    if (one.rank != 2) Scatter(one);
    AwaitFailure(one);
    ++num_failed;
    while (num_failed < kWorld) absl::SleepFor(absl::Milliseconds(2));
    store_->Lose();
    EXPECT_EQ(one.ends.missing(), std::vector<int>{2});
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr("nccl: rank 2 did not arrive at #1 of channel \"reduce\", "
                  "reduce \"block.3\" fp32 to rank 0 [1] within 1s; rank 2 "
                  "issued nothing here; if a rank was only slow"));
  }
}

TEST_F(NcclFailureTest, RanksInDifferentCollectivesAreNamed) {
  const auto statuses = Fail(2, [](GpuRank& one) {
    if (one.rank == 0) return Scatter(one);
    one.ends.reduce->Barrier(*one.reduce, "injected fault");
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("nccl: rank 1 differs from rank 0 at #1 of channel "
                          "\"reduce\": rank 1 is in barrier \"injected "
                          "fault\", rank 0 in reduce \"block.3\" fp32 to "
                          "rank 0 [1]"));
  }
}

TEST_F(NcclFailureTest, DifferentSizesAreNamed) {
  static float memory[2][8] = {};
  const auto statuses = Fail(2, [](GpuRank& one) {
    float* const own = memory[one.rank];
    one.ends.reduce->Broadcast(*one.reduce, "weights", DType::kF32, 0,
                               {{own, own, one.rank == 0 ? 8 : 4}});
    // Ranks that continue issue more: that is not where they differ.
    Scatter(one);
    Scatter(one);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("rank 1 differs from rank 0 at #1 of channel "
                          "\"reduce\": rank 1 is in broadcast \"weights\" "
                          "fp32 from rank 0 [4], rank 0 in broadcast "
                          "\"weights\" fp32 from rank 0 [8]"));
  }
}

TEST_F(NcclFailureTest, AnErrorOfNcclEndsAllRanks) {
  const auto statuses = Fail(
      3,
      [](GpuRank& one) {
        Scatter(one);
        one.reduce->Synchronize();
        if (one.rank == 2) SetFakeNcclAsyncError(2, ncclRemoteError);
        AwaitFailure(one);
      },
      absl::Seconds(2));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("nccl: rank 2 failed in "),
                      HasSubstr("channel \"scalar\""),
                      HasSubstr("remote process exited or there was a network "
                                "error: said by the fake; NCCL_DEBUG=INFO "
                                "says more")));
  }
}

TEST_F(NcclFailureTest, AnErrorOfACallNamesIt) {
  const auto statuses = Fail(2, [](GpuRank& one) {
    if (one.rank == 0) {
      emulator::FailCall("ncclCall", 1, cudaErrorUnknown);
      Scatter(one);
    }
    AwaitFailure(one);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("nccl: rank 0 could not begin #1 of channel "
                          "\"reduce\", reduce \"block.3\" fp32 to rank 0 [1]: "
                          "internal error"));
  }
}

TEST_F(NcclFailureTest, AnAbortReachesAllRanksInTheMiddleOfACollective) {
  std::atomic<int> num_issued = 0;
  const auto statuses = Fail(
      3,
      [&](GpuRank& one) {
        if (one.rank != 0) {
          Scatter(one);
          ++num_issued;
          return;
        }
        while (num_issued < 2) absl::SleepFor(absl::Milliseconds(2));
        absl::SleepFor(absl::Milliseconds(100));
        one.ends.gather->Abort(absl::DataLossError("no more data"));
        one.ends.gather->Abort(absl::InternalError("said too late"));
      },
      absl::Seconds(8));
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(absl::IsDataLoss(statuses[rank])) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()),
                HasSubstr("nccl: rank 0 aborted the run: no more data"));
    if (rank == 0) continue;
    EXPECT_THAT(std::string(statuses[rank].message()),
                HasSubstr(absl::StrCat("; rank ", rank,
                                       " is in #1 of channel \"reduce\", "
                                       "reduce")));
  }
}

// Holds a lock that every CUDA call waits for, like a driver that waits for its
// GPU: until `free`, or in vain.
void HoldDriver(Stream& stream, const std::atomic<bool>& free) {
  EXPECT_EQ(emulator::Enqueue(cuda::HandleOf(stream),
                              [&free] {
                                // 40 s, unless the machine pauses.
                                for (int i = 0; !free && i < 20'000; ++i) {
                                  absl::SleepFor(absl::Milliseconds(2));
                                }
                              }),
            cudaSuccess);
  stream.Synchronize();
  EXPECT_TRUE(free);
}

// The watch may wait for the driver then, but no rank for the watch.
TEST_F(NcclFailureTest, WhoAsksForTheStatusDoesNotWaitForTheDriver) {
  std::atomic<bool> flies = false, asked = false;
  EXPECT_EQ(RunOnGpus(2,
                      [&](GpuRank& one) {
                        if (one.rank == 0) {
                          Scatter(one);
                          flies = true;
                          // The watch looks 10 times a second.
                          absl::SleepFor(absl::Milliseconds(400));
                          EXPECT_EQ(one.ends.reduce->status(),
                                    absl::OkStatus());
                          asked = true;
                          return absl::OkStatus();
                        }
                        while (!flies) absl::SleepFor(absl::Milliseconds(2));
                        HoldDriver(*one.compute, asked);
                        Scatter(one);
                        return absl::OkStatus();
                      }),
            absl::OkStatus());
}

TEST_F(NcclFailureTest, ARankThatIsNotThereAtStartUpIsNamed) {
  const auto store = std::make_shared<MemoryStore>();
  const auto device = *MakeCudaDevice(0);
  Rank rank{.device = device.get()};
  const auto ends =
      ConnectNccl(store, {.rank = 0, .world = 3, .timeout = kTimeout}, &rank);
  EXPECT_TRUE(absl::IsDeadlineExceeded(ends.status())) << ends.status();
  EXPECT_THAT(std::string(ends.status().message()),
              HasSubstr("nccl: rank 1 and rank 2 did not arrive at \"start-up "
                        "of NCCL\" within 1s"));
}

TEST_F(NcclFailureTest, AStartUpThatHangsEnds) {
  HangFakeNcclInit(1);
  const absl::Status status = RunOnGpus(
      2, {.timeout = kTimeout}, [](GpuRank&) { return absl::OkStatus(); });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  // Rank 0 may say it first, of the next channel.
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(" could not connect channel "),
                    HasSubstr("NCCL was not ready within 1s")));
}

TEST_F(NcclFailureTest, AStartUpThatFailsEndsAllRanks) {
  SetFakeNcclAsyncError(1, ncclSystemError);
  const absl::Status status =
      RunOnGpus(2, {.timeout = absl::Seconds(4)},
                [](GpuRank&) { return absl::OkStatus(); });
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("nccl: rank 1 could not connect channel \"scalar\": "
                        "unhandled system error"));
}

TEST_F(NcclFailureTest, TwoRanksOfOneGpuAreRefused) {
  const auto store = std::make_shared<MemoryStore>();
  const absl::Status status = RunRanks(2, [&](int rank) -> absl::Status {
    const auto device = *MakeCudaDevice(0);
    Rank one{.device = device.get()};
    return ConnectNccl(store,
                       {.rank = rank, .world = 2, .timeout = absl::Seconds(5)},
                       &one)
        .status();
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(" both have GPU "));
}

TEST_F(NcclTest, GpusAreSharedWhereNcclCan) {
  EXPECT_EQ(CheckRanksOfGpus(4, 4), absl::OkStatus());
  SetFakeNcclVersion(NCCL_VERSION(2, 28, 9));
  EXPECT_EQ(*NcclVersion(), "NCCL 2.28.9");
  EXPECT_EQ(CheckRanksOfGpus(2, 1).message(),
            "nccl: 2 ranks on 1 GPU of this machine, but NCCL 2.28.9 needs a "
            "GPU for each; NCCL 2.30 can share one with "
            "NCCL_MULTI_RANK_GPU_ENABLE=1, or set communication.backend to "
            "\"local\"");
  SetFakeNcclVersion(NCCL_VERSION(2, 30, 3));
  EXPECT_THAT(std::string(CheckRanksOfGpus(2, 1).message()),
              HasSubstr("; set NCCL_MULTI_RANK_GPU_ENABLE=1, or set "));
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_EQ(CheckRanksOfGpus(2, 1), absl::OkStatus());
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

// ---- Runs -----------------------------------------------------------------

LocalRanksOptions Options(absl::Duration timeout) {
  LocalRanksOptions options;
  options.local.timeout = timeout;
  return options;
}

absl::StatusOr<std::unique_ptr<Device>> OpenGpu(int rank) {
  return MakeCudaDevice(rank);
}

// 1 + 2 + ... of all ranks.
absl::Status AddRanks(const Rank& rank) {
  const auto stream = rank.device->MakeStream(StreamRole::kCompute);
  const int world = rank.world();
  Values all(DType::kF64, world);
  all.Set(rank.rank(), rank.rank() + 1);
  rank.scalar->AllGather(*stream, "sum", DType::kF64,
                         {{all.at(rank.rank()), all.data(), world}});
  stream->Synchronize();
  double sum = 0;
  for (int64_t i = 0; i < world; ++i) sum += all[i];
  EXPECT_TRUE(!rank.status().ok() || sum == world * (world + 1) / 2);
  return rank.status();
}

// The ranks of several processes, all in this one: each has its own
// connection to the store of rank 0, by TCP.
std::vector<absl::Status> RunProcesses(
    const std::vector<Launch>& launches,
    const std::function<LocalRanksOptions(int)>& options,
    const std::function<absl::Status(const Rank&)>& body,
    const MakeDeviceFn& open = OpenGpu) {
  std::vector<absl::Status> statuses(launches.size());
  std::vector<std::thread> processes;
  for (size_t i = 0; i < launches.size(); ++i) {
    processes.emplace_back([&, i] {
      statuses[i] =
          RunNcclProcess(launches[i], options(launches[i].rank), open, body);
    });
  }
  for (std::thread& process : processes) process.join();
  return statuses;
}

// `rank` of `world` processes of this machine.
Launch LaunchOf(int rank, int world, int port) {
  return {.rank = rank,
          .world = world,
          .local_rank = rank,
          .local_world = world,
          .world_name = "WORLD_SIZE",
          .store = TcpStoreAddress{"127.0.0.1", port}};
}

std::vector<absl::Status> RunProcesses(
    int world, absl::Duration timeout,
    const std::function<absl::Status(const Rank&)>& body,
    const MakeDeviceFn& open = OpenGpu) {
  const ReservedPort port;
  std::vector<Launch> launches;
  for (int rank = 0; rank < world; ++rank) {
    launches.push_back(LaunchOf(rank, world, port.number()));
  }
  return RunProcesses(
      launches, [&](int) { return Options(timeout); }, body, open);
}

// Notes what it waits for, and is then stopped.
struct Impatient {
  std::atomic<bool> stop = false;
  std::string line;

  LocalRanksOptions Options() {
    LocalRanksOptions options = zero::Options(absl::Seconds(20));
    options.patience = {.stop = &stop,
                        .tell =
                            [this](const std::string& said) {
                              line = said;
                              stop = true;
                            },
                        .tell_after = absl::Seconds(1)};
    return options;
  }
};

TEST_F(NcclTest, WhoWaitsForProcessesSaysSoAndCanBeStopped) {
  Impatient one;
  const ReservedPort port;
  const auto statuses = RunProcesses(
      {LaunchOf(0, 4, port.number()), LaunchOf(2, 4, port.number())},
      [&](int rank) {
        return rank == 0 ? one.Options() : Options(absl::Seconds(20));
      },
      AddRanks);
  EXPECT_EQ(one.line, absl::StrCat("waiting for rank 1 and rank 3 of 4 at "
                                   "127.0.0.1:",
                                   port.number(), " (timeout 20s)"));
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status,
              absl::CancelledError("nccl: rank 0 was stopped by a signal "
                                   "while it waited for rank 1 and rank 3 of "
                                   "4"));
  }
}

TEST_F(NcclTest, WhoWaitsForNcclSaysSoAndCanBeStopped) {
  HangFakeNcclInit(1);
  Impatient one;
  const ReservedPort port;
  const auto statuses = RunProcesses(
      {LaunchOf(0, 2, port.number()), LaunchOf(1, 2, port.number())},
      [&](int rank) {
        return rank == 0 ? one.Options() : Options(absl::Seconds(20));
      },
      AddRanks);
  EXPECT_EQ(one.line, "all ranks are here; NCCL connects them (timeout 20s)");
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status,
              absl::CancelledError("nccl: rank 0 was stopped by a signal "
                                   "while NCCL connected the ranks"));
  }
}

TEST_F(NcclTest, WhoWaitsForTheConfigOfRankZeroCanBeStopped) {
  const auto server = *TcpStoreServer::Listen({"127.0.0.1", 0}, 2);
  Impatient one;
  one.stop = true;
  const absl::Status status = RunNcclProcess(LaunchOf(1, 2, server->port()),
                                             one.Options(), OpenGpu, AddRanks);
  EXPECT_EQ(status,
            absl::CancelledError("nccl: rank 1: the config of rank 0 did not "
                                 "arrive before a signal ended the wait"));
}

TEST_F(NcclTest, WhoWaitsForRankZeroSaysSoAndCanBeStopped) {
  Impatient one;
  const ReservedPort port;
  const absl::Status status = RunNcclProcess(LaunchOf(1, 2, port.number()),
                                             one.Options(), OpenGpu, AddRanks);
  const std::string waits =
      absl::StrCat("rank 1 waits for rank 0 at 127.0.0.1:", port.number());
  EXPECT_EQ(one.line,
            absl::StrCat(waits, " (timeout 20s): Connection refused"));
  EXPECT_EQ(status, absl::CancelledError(
                        absl::StrCat("stopped by a signal while ", waits)));
}

TEST_F(NcclTest, AProcessOfAnotherWorldIsToldToBoth) {
  Impatient one;
  const ReservedPort port;
  const auto statuses = RunProcesses(
      {LaunchOf(0, 2, port.number()), LaunchOf(1, 3, port.number())},
      [&](int rank) {
        return rank == 0 ? one.Options() : Options(absl::Seconds(20));
      },
      AddRanks);
  const std::string reason =
      "rank 1 has a world of 3, rank 0 has 2: give all ranks the same "
      "WORLD_SIZE";
  EXPECT_THAT(one.line, HasSubstr(absl::StrCat("; refused: ", reason)));
  EXPECT_TRUE(absl::IsInvalidArgument(statuses[1])) << statuses[1];
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr(reason));
}

TEST_F(NcclTest, AProcessWithAnotherConfigEndsAll) {
  const ReservedPort port;
  const auto statuses = RunProcesses(
      {LaunchOf(0, 2, port.number()), LaunchOf(1, 2, port.number())},
      [&](int rank) {
        LocalRanksOptions options = Options(absl::Seconds(20));
        options.must_match = {"zero",
                              absl::StrCat("training.steps: ", 3 + rank)};
        return options;
      },
      AddRanks);
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status, absl::InvalidArgumentError(
                          "nccl: rank 1 differs from rank 0: it has "
                          "\"training.steps: 4\", rank 0 \"training.steps: "
                          "3\"; start all ranks of the same program with the "
                          "same config"));
  }
}

TEST_F(NcclTest, ThreadsOfOneProcessRun) {
  EXPECT_EQ(RunNcclRanks(3, Options(absl::Seconds(10)), OpenGpu, AddRanks),
            absl::OkStatus());
}

TEST_F(NcclTest, MoreRanksThanGpusAreRefused) {
  const absl::Status status =
      RunNcclRanks(7, Options(absl::Seconds(10)), OpenGpu, AddRanks);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("7 ranks on 6 GPUs of this machine"));
}

TEST_F(NcclTest, ProcessesRun) {
  for (const absl::Status& status :
       RunProcesses(3, absl::Seconds(10), [](const Rank& rank) {
         EXPECT_THAT(rank.kind,
                     AllOf(HasSubstr("processes, connected by NCCL 2."),
                           HasSubstr(", on 3 GPUs")));
         return AddRanks(rank);
       })) {
    EXPECT_EQ(status, absl::OkStatus());
  }
}

TEST_F(NcclTest, ProcessesCountTheRanksOfTheirGpu) {
  SetFakeNcclVersion(NCCL_VERSION(2, 30, 3));
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  for (const absl::Status& status : RunProcesses(
           3, absl::Seconds(10),
           [](const Rank& rank) {
             EXPECT_EQ(rank.memory.sharers, rank.rank() == 1 ? 1 : 2);
             EXPECT_THAT(rank.kind, HasSubstr(", on 2 GPUs"));
             return AddRanks(rank);
           },
           [](int rank) { return MakeCudaDevice(rank == 1 ? 4 : 3); })) {
    EXPECT_EQ(status, absl::OkStatus());
  }
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST_F(NcclTest, RanksAgreeWhereAllSayYes) {
  const auto vote = [](const Rank& rank) -> absl::Status {
    for (const int against : {-1, 0, 2, -1}) {
      ZERO_ASSIGN_OR_RETURN(const bool all,
                            rank.agree("a vote", rank.rank() != against));
      EXPECT_EQ(all, against < 0);
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunNcclRanks(3, Options(absl::Seconds(10)), OpenGpu, vote),
            absl::OkStatus());
  for (const absl::Status& status : RunProcesses(3, absl::Seconds(10), vote)) {
    EXPECT_EQ(status, absl::OkStatus());
  }
}

TEST_F(NcclTest, WhoDoesNotComeToAVoteIsNamed) {
  const absl::Status status =
      RunNcclRanks(2, Options(absl::Seconds(1)), OpenGpu, [](const Rank& rank) {
        if (rank.rank() == 0) return rank.agree("a vote", true).status();
        while (rank.status().ok()) absl::SleepFor(absl::Milliseconds(2));
        return rank.status();
      });
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 1 did not arrive at \"a vote #1\" within 1s"));
}

TEST_F(NcclTest, AnErrorOfOneRankIsThatOfTheRun) {
  const absl::Status status = RunNcclRanks(
      3, Options(absl::Seconds(10)), OpenGpu, [](const Rank& rank) {
        if (rank.rank() == 1) throw std::runtime_error("broke");
        return AddRanks(rank);
      });
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("broke")));
}

// Rank 0 writes the summary: both say the same.
TEST_F(NcclTest, TheErrorOfARunIsThatOfItsLowestRank) {
  std::string of_rank_zero;
  const absl::Status status = RunNcclRanks(
      3, Options(absl::Seconds(10)), OpenGpu, [&](const Rank& rank) {
        if (rank.rank() == 2) return absl::DataLossError("no more data");
        const absl::Status failed = AddRanks(rank);
        if (rank.rank() > 0) return failed;
        absl::SleepFor(absl::Milliseconds(100));  // the others are gone
        of_rank_zero = absl::StrCat("step 1: ", failed.message());
        return absl::Status(failed.code(), of_rank_zero);
      });
  EXPECT_EQ(status, absl::DataLossError(of_rank_zero));
  EXPECT_THAT(of_rank_zero,
              HasSubstr("nccl: rank 2 aborted the run: no more data"));
}

TEST_F(NcclTest, AnErrorOfOneProcessEndsAll) {
  const auto statuses =
      RunProcesses(3, absl::Seconds(10), [](const Rank& rank) {
        if (rank.rank() == 2) return absl::DataLossError("no more data");
        return AddRanks(rank);
      });
  EXPECT_EQ(statuses[2], absl::DataLossError("rank 2: no more data"));
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(absl::IsDataLoss(statuses[rank])) << statuses[rank];
    EXPECT_THAT(std::string(statuses[rank].message()),
                HasSubstr("nccl: rank 2 aborted the run: no more data"));
  }
}

TEST_F(NcclTest, AProcessWithoutAGpuEndsAll) {
  const auto statuses = RunProcesses(
      2, absl::Seconds(10), AddRanks,
      [](int rank) { return MakeCudaDevice(rank == 1 ? 99 : rank); });
  EXPECT_TRUE(absl::IsNotFound(statuses[1])) << statuses[1];
  EXPECT_THAT(std::string(statuses[0].message()),
              HasSubstr("nccl: rank 1 failed to start: device cuda:99"));
}

// Records the message about hanging ranks.
struct Hang {
  std::atomic<bool> told = false;
  std::string message;

  LocalRanksOptions Options(absl::Duration timeout) {
    LocalRanksOptions options = zero::Options(timeout);
    options.on_hang = [this](const absl::Status& error) {
      message = std::string(error.message());
      told = true;
    };
    return options;
  }
};

TEST_F(NcclTest, ARankThatHangsAfterAnErrorIsTold) {
  Hang hang;
  const absl::Status status = RunNcclRanks(
      2, hang.Options(absl::Seconds(1)), OpenGpu, [&](const Rank& rank) {
        if (rank.rank() == 0) {
          const absl::Status failed = AddRanks(rank);
          EXPECT_EQ(rank.missing(), std::vector<int>{1});
          return failed;
        }
        while (!hang.told) absl::SleepFor(absl::Milliseconds(5));
        return rank.status();
      });
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(hang.message, HasSubstr("; rank 1 hangs and is abandoned"));
}

// Rank 1 is in a call that waits for the GPU and keeps the driver, which the
// watch of rank 0 asks for its collective. That is queued behind work which
// ends after that call, so it is never late before, however long rank 1 takes.
TEST_F(NcclTest, AWatchThatIsStuckEndsTheRun) {
  std::atomic<bool> flies = false, let_go = false;
  Hang hang;
  const absl::Status status = RunNcclRanks(
      2, hang.Options(absl::Seconds(5)), OpenGpu, [&](const Rank& rank) {
        const auto stream = rank.device->MakeStream(StreamRole::kCompute);
        if (rank.rank() == 1) {
          while (!flies) absl::SleepFor(absl::Milliseconds(2));
          HoldDriver(*stream, hang.told);
          let_go = true;
          return rank.status();
        }
        EXPECT_EQ(emulator::EnqueueWhen(
                      cuda::HandleOf(*stream),
                      [&let_go] { return let_go.load(); }, [] {}),
                  cudaSuccess);
        rank.scalar->Barrier(*stream, "meeting");
        flies = true;
        while (!hang.told) absl::SleepFor(absl::Milliseconds(2));
        stream->Synchronize();
        return rank.status();
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(
      hang.message,
      AllOf(HasSubstr("nccl: rank 0: the watching thread has been stuck in a "
                      "CUDA call for 5s; see dmesg and nvidia-smi"),
            HasSubstr("start the ranks by torchrun or srun"),
            HasSubstr("; rank 0 and rank 1 hang and are abandoned")));
}

TEST_F(NcclTest, KernelsAreLoadedEarlyUnlessTheUserSaysOtherwise) {
  constexpr char kName[] = "CUDA_MODULE_LOADING";
  unsetenv(kName);
  LoadKernelsEarly();
  EXPECT_STREQ(getenv(kName), "EAGER");
  setenv(kName, "LAZY", 1);
  LoadKernelsEarly();
  EXPECT_STREQ(getenv(kName), "LAZY");
  unsetenv(kName);
}

}  // namespace
}  // namespace zero
