#include "engine/comm/counting.h"

#include <chrono>
#include <memory>
#include <thread>

#include "engine/comm/null.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

// The collectives of a small step on `comm`.
void Step(Communicator& comm, Stream& stream, void* data, void* other) {
  comm.AllGather(stream, "unit.0", DType::kBF16, {{data, other, 48}});
  comm.AllGather(stream, "unit.1", DType::kBF16,
                 {{data, other, 48}, {data, other, 12}});
  comm.ReduceScatter(stream, "unit.1", DType::kF32, DType::kF32, false,
                     {{data, other, 60}});
  comm.AllReduce(stream, "norm", DType::kF64, ReduceOp::kSum, data, 2);
  comm.Broadcast(stream, "init", DType::kF32, 1, data, 10);
  comm.Reduce(stream, "server", DType::kF32, 0, {{data, other, 20}});
  comm.Barrier(stream, "end");
}

struct MetaRank {
  explicit MetaRank(int rank, int world)
      : comm(std::make_unique<NullCommunicator>(rank, world)) {}

  void Run() { Step(comm, *stream, data.data(), other.data()); }

  std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  std::unique_ptr<Device> device = MakeMetaDevice(*cpu);
  std::unique_ptr<Stream> stream = device->MakeStream(StreamRole::kGather);
  Buffer data = *device->Allocate(4096, MemoryKind::kDevice);
  Buffer other = *device->Allocate(4096, MemoryKind::kDevice);
  CountingCommunicator comm;
};

TEST(CountingTest, BytesEqualTheFormulas) {
  for (const int world : {2, 3, 4}) {
    for (const int rank : {0, 1, world - 1}) {
      MetaRank one(rank, world);
      one.Run();
      const auto gather = one.comm.Count(CollectiveKind::kAllGather);
      EXPECT_EQ(gather.calls, 2);
      EXPECT_EQ(gather.bytes, 2 * (48 + 60) * (world - 1) / world);
      const auto reduce = one.comm.Count(CollectiveKind::kReduceScatter);
      EXPECT_EQ(reduce.calls, 1);
      EXPECT_EQ(reduce.bytes, 4 * 60 * (world - 1) / world);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kAllReduce).bytes,
                2 * 8 * 2 * (world - 1) / world);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kBroadcast).bytes,
                rank == 1 ? 40 * (world - 1) : 0);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kBroadcast).received,
                rank == 1 ? 0 : 40);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kReduce).bytes,
                rank == 0 ? 0 : 80);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kReduce).received,
                rank == 0 ? 80 * (world - 1) : 0);
      EXPECT_EQ(gather.received, gather.bytes);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kBarrier).calls, 1);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kBarrier).bytes, 0);
      EXPECT_EQ(one.comm.Count(CollectiveKind::kAllToAll).calls, 0);
      EXPECT_EQ(one.comm.Total().calls, 7);
      EXPECT_EQ(one.comm.Total().seconds, 0);
    }
  }
}

TEST(CountingTest, TheSequenceHashTellsSequencesApart) {
  MetaRank a(0, 2), b(1, 2), other_name(0, 2), other_size(0, 2),
      other_order(0, 2);
  EXPECT_EQ(a.comm.SequenceHash(), b.comm.SequenceHash());
  a.Run();
  b.Run();
  EXPECT_EQ(a.comm.SequenceHash(), b.comm.SequenceHash());
  a.Run();
  EXPECT_NE(a.comm.SequenceHash(), b.comm.SequenceHash());

  const auto pair = [](MetaRank& rank, const char* first, int64_t elems,
                       const char* second) {
    rank.comm.AllReduce(*rank.stream, first, DType::kF32, ReduceOp::kSum,
                        rank.data.data(), elems);
    rank.comm.Barrier(*rank.stream, second);
    return rank.comm.SequenceHash();
  };
  MetaRank c(0, 2);
  const std::string hash = pair(c, "x", 1, "y");
  EXPECT_NE(hash, pair(other_name, "xy", 1, ""));
  EXPECT_NE(hash, pair(other_size, "x", 2, "y"));
  other_order.comm.Barrier(*other_order.stream, "y");
  other_order.comm.AllReduce(*other_order.stream, "x", DType::kF32,
                             ReduceOp::kSum, other_order.data.data(), 1);
  EXPECT_NE(hash, other_order.comm.SequenceHash());
}

// Every collective takes 20 ms of its stream.
class Sleeper final : public Communicator {
 public:
  Sleeper() : Communicator(0, 2) {}
  void Run(Stream& stream, Collective) override {
    stream.Enqueue(
        [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  }
  void Abort(const absl::Status&) override {}
  absl::Status status() const override { return absl::OkStatus(); }
};

TEST(CountingTest, SecondsAreTimeOnTheStream) {
  const auto device = MakeCpuDevice(1);
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kGather}) {
    const auto stream = device->MakeStream(role);
    CountingCommunicator comm(std::make_unique<Sleeper>(), /*timed=*/true);
    float data = 0;
    for (int round = 1; round <= 2; ++round) {
      comm.Barrier(*stream, "a");
      comm.AllReduce(*stream, "b", DType::kF32, ReduceOp::kSum, &data, 1);
      comm.Barrier(*stream, "c");
      stream->Synchronize();
      EXPECT_EQ(comm.Total().calls, 3 * round);
      EXPECT_GE(comm.Count(CollectiveKind::kBarrier).seconds, 0.04 * round);
      EXPECT_GE(comm.Count(CollectiveKind::kAllReduce).seconds, 0.02 * round);
      EXPECT_GE(comm.Total().seconds, 0.06 * round);
    }
  }
}

TEST(CountingTest, FailuresPassThrough) {
  MetaRank rank(0, 2);
  EXPECT_TRUE(rank.comm.status().ok());
  rank.comm.Abort(absl::CancelledError("stop"));
  EXPECT_EQ(rank.comm.status(), absl::CancelledError("stop"));
  rank.Run();
  EXPECT_EQ(rank.comm.Total().calls, 7);
}

}  // namespace
}  // namespace zero
