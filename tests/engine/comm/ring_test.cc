#include "engine/comm/ring.h"

#include <memory>
#include <random>
#include <vector>

#include "engine/comm/null.h"
#include "gtest/gtest.h"
#include "tests/engine/comm/comm_testing.h"

namespace zero {
namespace {

std::shared_ptr<LocalGroup> Ring(int world) {
  return LocalGroup::Make(world, {.algorithm = BulkAlgorithm::kRing});
}

// The sum of rank r's piece runs r + 1, r + 2, ..., r, in fp32 also where bf16
// is sent, and is rounded once. A sum in rank order differs, and so does one
// that is rounded at every rank (the controls).
TEST(RingTest, SumsRunAroundTheRingInFloat) {
  constexpr int64_t kN = 999;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int kWorld : {2, 3, 4, 5}) {
      std::vector<Values> inputs;
      for (int r = 0; r < kWorld; ++r) {
        std::mt19937 random(r);
        std::normal_distribution<double> normal;
        inputs.push_back(Values::Of(dtype, kN * kWorld,
                                    [&](int64_t) { return normal(random); }));
      }
      const auto sum = [&](int64_t i, int first, bool round) {
        float total = 0;
        for (int k = 0; k < kWorld; ++k) {
          const float part =
              static_cast<float>(inputs[(first + k) % kWorld][i]);
          total = k == 0 ? part : total + part;
          if (round) total = BF16ToF32(F32ToBF16(total));
        }
        return total;
      };
      std::vector<int> other_order(kWorld), other_rounding(kWorld);
      const absl::Status status =
          RunOnGroup(Ring(kWorld), StreamRole::kReduce, [&](auto& rank) {
            Values sums(dtype, kN);
            Values& mine = inputs[rank.rank];
            Staging staging(*rank.comm, dtype, kN * kWorld);
            rank.comm->ReduceScatter(*rank.stream, "grads", dtype, false,
                                     {{mine.data(), sums.data(), kN * kWorld}},
                                     staging);
            rank.stream->Synchronize();
            for (int64_t i = 0; i < kN; ++i) {
              const int64_t at = rank.rank * kN + i;
              const float want = sum(at, rank.rank + 1, false);
              EXPECT_EQ(sums[i], dtype == DType::kF32
                                     ? want
                                     : BF16ToF32(F32ToBF16(want)));
              other_order[rank.rank] += sums[i] != sum(at, 0, false);
              other_rounding[rank.rank] +=
                  sums[i] != sum(at, rank.rank + 1, true);
            }
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
      // With two ranks there is one order, and rank world - 1 begins at 0.
      for (int r = 0; r < kWorld - 1 && kWorld > 2; ++r) {
        if (dtype == DType::kF32) {
          EXPECT_GT(other_order[r], kN / 20);
        }
        EXPECT_GT(other_rounding[r], kN / 20);
      }
    }
  }
}

// The other ranks' memory does not even exist.
TEST(RingTest, ARankReadsItsLeftNeighbourAlone) {
  constexpr int64_t kN = 64;
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  for (int world = 2; world <= 5; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      const int left = (rank + world - 1) % world;
      std::vector<std::vector<float>> memory(2), staging(2);
      std::vector<Collective> pair(2);
      for (int k = 0; k < 2; ++k) {
        memory[k].resize(kN * world);
        staging[k].resize(2 * kN);
        pair[k].kind = CollectiveKind::kReduceScatter;
        pair[k].segments = {{memory[k].data(),
                             memory[k].data() + (k == 0 ? left : rank) * kN,
                             kN * world}};
        pair[k].staging = staging[k].data();
        pair[k].staging_bytes = 2 * kN * sizeof(float);
      }
      std::vector<const Collective*> all(world);
      all[left] = &pair[0];
      all[rank] = &pair[1];
      int num_meetings = 0;
      const auto meet = [&] { ++num_meetings; };
      PeerMemory peers(*stream, rank, all, /*hosts=*/{});
      RingReduceScatter(peers, meet);
      EXPECT_EQ(num_meetings, world - 2);
      EXPECT_EQ(peers.read_bytes(), (world - 1) * kN * 4);
      for (int k = 0; k < 2; ++k) {
        pair[k].segments[0].send =
            memory[k].data() + (k == 0 ? left : rank) * kN;
        pair[k].segments[0].recv = memory[k].data();
      }
      RingAllGather(peers, meet);
      EXPECT_EQ(num_meetings, 2 * (world - 2));
      EXPECT_EQ(peers.read_bytes(), 2 * (world - 1) * kN * 4);
    }
  }
}

TEST(RingTest, TheWireIsThatOfDirectButForSumsOfNarrowData) {
  const auto cpu = MakeCpuDevice(1);
  const auto device = MakeMetaDevice(*cpu);
  const auto stream = device->MakeStream(StreamRole::kReduce);
  const Buffer data = *device->Allocate(4096, MemoryKind::kDevice);
  const Buffer other = *device->Allocate(4096, MemoryKind::kDevice);
  for (const int world : {1, 2, 3, 4}) {
    const auto bytes = [&](DType dtype, CollectiveKind kind) {
      NullCommunicator comm(0, world, BulkAlgorithm::kRing);
      const std::vector<CollectiveSegment> segments = {
          {data.data(), other.data(), 60}};
      if (kind == CollectiveKind::kAllGather) {
        comm.AllGather(*stream, "unit", dtype, segments);
      } else {
        Staging staging(comm, dtype, 60);
        EXPECT_EQ(staging.bytes.size(), world < 3 ? 0 : 2 * 60 / world * 4);
        comm.ReduceScatter(*stream, "unit", dtype, false, segments, staging);
      }
      return comm.Total().bytes;
    };
    const int64_t piece = 60 / world, steps = world - 1;
    EXPECT_EQ(bytes(DType::kF32, CollectiveKind::kAllGather),
              steps * piece * 4);
    EXPECT_EQ(bytes(DType::kBF16, CollectiveKind::kAllGather),
              steps * piece * 2);
    EXPECT_EQ(bytes(DType::kF32, CollectiveKind::kReduceScatter),
              steps * piece * 4);
    // The first hop is bf16, sums are not.
    EXPECT_EQ(bytes(DType::kBF16, CollectiveKind::kReduceScatter),
              world == 1 ? 0 : piece * 2 + (steps - 1) * piece * 4);
  }
}

TEST(RingDeathTest, MissingStagingMemoryIsACallerMistake) {
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const auto comm = Ring(3)->Connect(0, "reduce");
  float send[12] = {}, recv[4];
  EXPECT_DEATH(comm->ReduceScatter(*stream, "block.3", DType::kF32, false,
                                   {{send, recv, 12}}),
               "block.3\": staging memory of a ring");
}

}  // namespace
}  // namespace zero
