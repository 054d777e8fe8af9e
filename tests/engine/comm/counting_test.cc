#include "engine/comm/counting.h"

#include <memory>

#include "engine/comm/null.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

struct MetaRank {
  MetaRank(int rank, int world)
      : comm(std::make_unique<NullCommunicator>(rank, world)) {}

  std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  std::unique_ptr<Device> device = MakeMetaDevice(*cpu);
  std::unique_ptr<Stream> stream = device->MakeStream(StreamRole::kGather);
  Buffer data = *device->Allocate(4096, MemoryKind::kDevice);
  Buffer other = *device->Allocate(4096, MemoryKind::kDevice);
  CountingCommunicator comm;
};

TEST(CountingTest, BytesAndCallsAddUp) {
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

TEST(CountingTest, FailuresPassThrough) {
  MetaRank rank(0, 2);
  EXPECT_TRUE(rank.comm.status().ok());
  rank.comm.Abort(absl::CancelledError("stop"));
  EXPECT_EQ(rank.comm.status(), absl::CancelledError("stop"));
  rank.comm.Barrier(*rank.stream, "end");
  EXPECT_EQ(rank.comm.Total().calls, 1);
}

}  // namespace
}  // namespace zero
