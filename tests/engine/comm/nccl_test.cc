#include "engine/comm/nccl/nccl.h"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/comm/nccl_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/comm/comm_testing.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/fake_nccl.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// One rank on a GPU of its own, connected.
struct GpuRank {
  int rank;
  std::unique_ptr<Device> device;
  NcclEnds ends;
  // One for each end, as the executor has them.
  std::unique_ptr<Stream> compute, gather, reduce;
};

class NcclTest : public testing::Test {
 protected:
  void SetUp() override {
    emulator::SetDeviceCount(6);
    ResetFakeNccl();
  }
  void TearDown() override { EXPECT_EQ(NumFakeNcclComms(), 0); }

  // Runs fn on every rank; what fn returns, else how the run ended.
  absl::Status RunOnGpus(int world, const NcclOptions& options,
                         const std::function<absl::Status(GpuRank&)>& fn) {
    const auto store = std::make_shared<MemoryStore>();
    return RunRanks(world, [&](int rank) -> absl::Status {
      NcclOptions own = options;
      GpuRank one;
      one.rank = own.rank = rank;
      own.world = world;
      one.device = *MakeCudaDevice(rank);
      auto ends = ConnectNccl(store, *one.device, own);
      if (!ends.ok()) return ends.status();
      one.ends = *std::move(ends);
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
};

// ---- Results --------------------------------------------------------------

// What a rank ends up with.
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
    if (in_place) {
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
                   DType recv_dtype, bool accumulate) {
  Results full, own;
  std::vector<CollectiveSegment> segments;
  int64_t elems = 0;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    const int64_t size = kPieces[s] * comm.world();
    elems += size;
    full.push_back(Values::Of(dtype, size, [&](int64_t i) {
      return Input(dtype, comm.rank(), s, i);
    }));
    own.push_back(Values::Of(recv_dtype, kPieces[s],
                             [&](int64_t i) { return Number(9, s, i); }));
  }
  const bool can_be_in_place = dtype == recv_dtype && !accumulate;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    const bool in_place = can_be_in_place && s % 2 == 1;
    segments.push_back(
        {full[s].data(),
         in_place ? full[s].at(comm.rank() * kPieces[s]) : own[s].data(),
         full[s].size()});
  }
  Staging staging(comm, dtype, elems);
  comm.ReduceScatter(stream, "scatter", dtype, recv_dtype, accumulate, segments,
                     staging);
  stream.Synchronize();
  Results results;
  for (size_t s = 0; s < kPieces.size(); ++s) {
    results.push_back(Values::Of(recv_dtype, kPieces[s], [&](int64_t i) {
      const bool in_place = can_be_in_place && s % 2 == 1;
      return in_place ? full[s][comm.rank() * kPieces[s] + i] : own[s][i];
    }));
  }
  return results;
}

Results Rest(Communicator& comm, Stream& stream) {
  Results results;
  for (const DType dtype :
       {DType::kF32, DType::kF64, DType::kI32, DType::kI64, DType::kU8}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      results.push_back(Values::Of(dtype, 37, [&](int64_t i) {
        // Unsigned 8 bits hold no negative ones.
        return dtype == DType::kU8 ? (comm.rank() + i) % 30
                                   : Number(comm.rank(), 0, i);
      }));
      comm.AllReduce(stream, "numbers", dtype, op, results.back().data(), 37);
    }
  }
  // Sums in rank order, whatever the dtype.
  for (const DType dtype : kFloats) {
    results.push_back(Values::Of(
        dtype, 33, [&](int64_t i) { return Real(comm.rank(), 1, i); }));
    comm.AllReduce(stream, "reals", dtype, ReduceOp::kSum,
                   results.back().data(), 33);
  }
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
  comm.Broadcast(stream, "broadcast", DType::kU16, root, results.back().data(),
                 7);
  Values send = Values::Of(DType::kBF16, 3 * comm.world(), [&](int64_t i) {
    return Number(comm.rank(), 3, i);
  });
  results.push_back(Values(DType::kBF16, send.size()));
  comm.AllToAll(stream, "transpose", DType::kBF16, send.data(),
                results.back().data(), send.size());
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
  const struct {
    DType dtype, recv_dtype;
    bool accumulate;
  } kCases[] = {
      {DType::kF32, DType::kF32, false},  {DType::kF32, DType::kF32, true},
      {DType::kF32, DType::kBF16, false}, {DType::kBF16, DType::kBF16, false},
      {DType::kBF16, DType::kBF16, true}, {DType::kBF16, DType::kF32, true},
      {DType::kF16, DType::kF32, false},  {DType::kF64, DType::kF64, true}};
  for (const auto& one : kCases) {
    ExpectSameAsLocal(
        absl::StrCat(DTypeName(one.dtype), " to ", DTypeName(one.recv_dtype)),
        [&](auto& comm, auto& stream) {
          return ScatterAll(comm, stream, one.dtype, one.recv_dtype,
                            one.accumulate);
        });
  }
}

TEST_P(NcclResultsTest, TheOthersAreThoseOfLocal) {
  ExpectSameAsLocal("others", Rest);
}

INSTANTIATE_TEST_SUITE_P(Worlds, NcclResultsTest, testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace zero
