#include "engine/comm/communicator.h"

#include <memory>

#include "engine/comm/null.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

// Rank 1 of 4, recording the collectives that it gets.
class Recorder final : public Communicator {
 public:
  Recorder() : Communicator(1, 4) {}
  void Run(Stream&, Collective collective) override {
    last = std::move(collective);
  }
  void Abort(const absl::Status&) override {}
  absl::Status status() const override { return absl::OkStatus(); }

  Collective last;
};

class CommunicatorTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = MakeCpuDevice(1);
  std::unique_ptr<Stream> stream_ = device_->MakeStream(StreamRole::kCompute);
  Recorder comm_;
  float data_[64] = {};
  float other_[64] = {};
};

using CommunicatorDeathTest = CommunicatorTest;

TEST_F(CommunicatorTest, TypedCallsBuildOneValue) {
  comm_.ReduceScatter(*stream_, "block.3", DType::kBF16, true,
                      {{data_, other_, 8}, {data_, other_, 4}});
  EXPECT_EQ(comm_.last.kind, CollectiveKind::kReduceScatter);
  EXPECT_EQ(comm_.last.segments.size(), 2u);
  EXPECT_EQ(Signature(comm_.last), "reduce_scatter \"block.3\" bf16 += [8, 4]");
  comm_.AllGather(*stream_, "wte", DType::kF32,
                  {{data_ + 2, data_, 8}, {other_, data_, 8}});
  EXPECT_EQ(Signature(comm_.last), "all_gather \"wte\" fp32 [8 x2]");
  comm_.Broadcast(*stream_, "init", DType::kU8, 2, {{data_, data_, 5}});
  EXPECT_EQ(Signature(comm_.last), "broadcast \"init\" uint8 from rank 2 [5]");
  comm_.Broadcast(*stream_, "wte", DType::kF32, 0,
                  {{data_, data_, 5}, {data_, other_, 7}});
  EXPECT_EQ(Signature(comm_.last), "broadcast \"wte\" fp32 from rank 0 [5, 7]");
  comm_.Reduce(*stream_, "wte", DType::kF32, 3,
               {{data_, other_, 7}, {other_, other_, 7}});
  EXPECT_EQ(comm_.last.kind, CollectiveKind::kReduce);
  EXPECT_EQ(Signature(comm_.last), "reduce \"wte\" fp32 to rank 3 [7 x2]");
  comm_.Barrier(*stream_, "end");
  EXPECT_EQ(Signature(comm_.last), "barrier \"end\"");
}

TEST_F(CommunicatorTest, EmptySegmentsNeedNoMemory) {
  comm_.AllGather(*stream_, "unit", DType::kF32, {{nullptr, nullptr, 0}});
  comm_.AllGather(*stream_, "unit", DType::kF32, {});
  EXPECT_EQ(Signature(comm_.last), "all_gather \"unit\" fp32 []");
}

TEST_F(CommunicatorTest, WireBytesFollowTheFormulas) {
  const auto bytes = [this](int world) { return WireBytes(comm_.last, world); };
  comm_.AllGather(*stream_, "unit", DType::kBF16,
                  {{data_, other_, 12}, {data_, other_, 48}});
  EXPECT_EQ(bytes(1), 0);
  EXPECT_EQ(bytes(2), 60);
  EXPECT_EQ(bytes(4), 90);
  comm_.ReduceScatter(*stream_, "unit", DType::kF32, false,
                      {{data_, other_, 12}});
  EXPECT_EQ(bytes(3), 32);
  comm_.Broadcast(*stream_, "init", DType::kF32, 0, {{data_, data_, 5}});
  EXPECT_EQ(bytes(4), 60);
  comm_.Reduce(*stream_, "unit", DType::kBF16, 0, {{data_, other_, 5}});
  EXPECT_EQ(bytes(1), 0);
  EXPECT_EQ(bytes(4), 30);
  comm_.Barrier(*stream_, "end");
  EXPECT_EQ(bytes(4), 0);
}

// The root's end of the wire carries all the others' bytes, one way.
TEST_F(CommunicatorTest, ARootSendsOrReceivesForAll) {
  const auto sent = [this](int rank) { return SentBytes(comm_.last, rank, 4); };
  const auto received = [this](int rank) {
    return ReceivedBytes(comm_.last, rank, 4);
  };
  comm_.Reduce(*stream_, "unit", DType::kF32, 2,
               {{data_, other_, 5}, {data_, other_, 10}});
  EXPECT_EQ(sent(2), 0);
  EXPECT_EQ(received(2), 180);
  EXPECT_EQ(sent(0), 60);
  EXPECT_EQ(received(0), 0);
  comm_.Broadcast(*stream_, "unit", DType::kF32, 2, {{data_, data_, 15}});
  EXPECT_EQ(sent(2), 180);
  EXPECT_EQ(received(2), 0);
  EXPECT_EQ(sent(0), 0);
  EXPECT_EQ(received(0), 60);
  comm_.AllGather(*stream_, "unit", DType::kF32, {{data_, other_, 16}});
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(sent(rank), 48);
    EXPECT_EQ(received(rank), 48);
  }
  EXPECT_EQ(SentBytes(comm_.last, 0, 1), 0);
}

TEST_F(CommunicatorDeathTest, TheWorldMustDivideSizes) {
  EXPECT_DEATH(comm_.AllGather(*stream_, "wte", DType::kF32,
                               {{data_, other_, 8}, {data_, other_, 30}}),
               "all_gather \"wte\": segment 1 has 30 elements, want a multiple "
               "of world 4");
  EXPECT_DEATH(comm_.ReduceScatter(*stream_, "wte", DType::kF32, false,
                                   {{data_, other_, 7}}),
               "segment 0 has 7 elements");
  EXPECT_DEATH(
      comm_.Broadcast(*stream_, "norm", DType::kF64, 0, {{data_, data_, -1}}),
      "-1");
}

TEST_F(CommunicatorDeathTest, MissingMemoryIsACallerMistake) {
  EXPECT_DEATH(
      comm_.AllGather(*stream_, "wte", DType::kF32, {{nullptr, other_, 8}}),
      "segment 0 of 8 elements sends from null");
  EXPECT_DEATH(
      comm_.AllGather(*stream_, "wte", DType::kF32, {{data_, nullptr, 8}}),
      "segment 0 of 8 elements receives at null");
}

TEST_F(CommunicatorDeathTest, MemoryMayOverlapOnlyInPlace) {
  EXPECT_DEATH(
      comm_.AllGather(*stream_, "wte", DType::kF32, {{data_, data_, 8}}),
      "send overlaps recv, want rank 1's own piece");
  EXPECT_DEATH(comm_.ReduceScatter(*stream_, "wte", DType::kF32, false,
                                   {{data_, data_, 8}}),
               "recv overlaps send, want rank 1's own piece");
  EXPECT_DEATH(comm_.ReduceScatter(*stream_, "wte", DType::kF32, true,
                                   {{data_, data_ + 2, 8}}),
               "nothing to accumulate into");
}

TEST_F(CommunicatorDeathTest, DtypesMustReduceAndRootsMustBeRanks) {
  EXPECT_DEATH(comm_.ReduceScatter(*stream_, "wte", DType::kI32, false,
                                   {{data_, other_, 8}}),
               "reduce_scatter \"wte\": int32, want fp32, bf16, fp16 or fp64");
  EXPECT_DEATH(
      comm_.Reduce(*stream_, "wte", DType::kI32, 0, {{data_, other_, 8}}),
      "reduce \"wte\": int32, want fp32");
  EXPECT_DEATH(
      comm_.Reduce(*stream_, "wte", DType::kF32, -1, {{data_, other_, 8}}),
      "reduce \"wte\": root -1 is not in \\[0, 4\\)");
  EXPECT_DEATH(
      comm_.Reduce(*stream_, "wte", DType::kF32, 1, {{data_, data_ + 2, 8}}),
      "reduce \"wte\": segment 0: send and recv overlap");
  EXPECT_DEATH(
      comm_.Broadcast(*stream_, "init", DType::kF32, 4, {{data_, data_, 8}}),
      "root 4 is not in \\[0, 4\\)");
}

// Addresses of the meta device must not be read: nothing is.
TEST(NullCommunicatorTest, TouchesNothingAndLatchesTheFirstAbort) {
  const auto cpu = MakeCpuDevice(1);
  const auto device = MakeMetaDevice(*cpu);
  const auto stream = device->MakeStream(StreamRole::kGather);
  const Buffer full = *device->Allocate(1 << 20, MemoryKind::kDevice);
  NullCommunicator comm(3, 4);
  EXPECT_EQ(comm.rank(), 3);
  EXPECT_EQ(comm.world(), 4);
  comm.AllGather(
      *stream, "unit", DType::kF32,
      {{static_cast<char*>(full.data()) + (3 << 18), full.data(), 1 << 18}});
  comm.Reduce(*stream, "norm", DType::kF64, 0, {{full.data(), full.data(), 4}});
  EXPECT_TRUE(comm.status().ok());
  comm.Abort(absl::CancelledError("first"));
  comm.Abort(absl::InternalError("second"));
  EXPECT_EQ(comm.status(), absl::CancelledError("first"));
}

struct MetaRank {
  MetaRank(int rank, int world) : comm(rank, world) {}

  std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  std::unique_ptr<Device> device = MakeMetaDevice(*cpu);
  std::unique_ptr<Stream> stream = device->MakeStream(StreamRole::kGather);
  Buffer data = *device->Allocate(4096, MemoryKind::kDevice);
  Buffer other = *device->Allocate(4096, MemoryKind::kDevice);
  NullCommunicator comm;
};

TEST(NullCommunicatorTest, BytesAndCallsAddUp) {
  for (const int world : {2, 3, 4}) {
    for (const int rank : {0, 1, world - 1}) {
      MetaRank one(rank, world);
      Stream& stream = *one.stream;
      void* const data = one.data.data();
      void* const other = one.other.data();
      int64_t calls = 0, sent = 0, received = 0;
      const auto expect = [&](int64_t more_sent, int64_t more_received) {
        EXPECT_EQ(one.comm.Total().calls, ++calls);
        EXPECT_EQ(one.comm.Total().bytes, sent += more_sent);
        EXPECT_EQ(one.comm.Total().received, received += more_received);
      };
      one.comm.AllGather(stream, "unit", DType::kBF16,
                         {{data, other, 48}, {data, other, 12}});
      const int64_t gathered = 2 * 60 * (world - 1) / world;
      expect(gathered, gathered);
      one.comm.ReduceScatter(stream, "unit", DType::kF32, false,
                             {{data, other, 60}});
      const int64_t reduced = 4 * 60 * (world - 1) / world;
      expect(reduced, reduced);
      one.comm.Broadcast(stream, "init", DType::kF32, 1, {{data, data, 10}});
      expect(rank == 1 ? 40 * (world - 1) : 0, rank == 1 ? 0 : 40);
      one.comm.Reduce(stream, "server", DType::kF32, 0, {{data, other, 20}});
      expect(rank == 0 ? 0 : 80, rank == 0 ? 80 * (world - 1) : 0);
      one.comm.Barrier(stream, "end");
      expect(0, 0);
    }
  }
}

// Counts requests, and forwards everything to the inner one.
TEST(CommunicatorWrapperTest, FailuresPassThrough) {
  class Wrapper final : public CommunicatorWrapper {
   public:
    using CommunicatorWrapper::CommunicatorWrapper;
    void Run(Stream& stream, Collective collective) override {
      inner_->Run(stream, std::move(collective));
    }
  };
  MetaRank rank(0, 2);
  Wrapper comm(std::make_unique<NullCommunicator>(0, 2));
  EXPECT_TRUE(comm.status().ok());
  comm.Abort(absl::CancelledError("stop"));
  EXPECT_EQ(comm.status(), absl::CancelledError("stop"));
  comm.Barrier(*rank.stream, "end");
  EXPECT_EQ(comm.Total().calls, 1);
}

}  // namespace
}  // namespace zero
