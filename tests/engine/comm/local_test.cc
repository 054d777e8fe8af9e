#include "engine/comm/local.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/comm/comm_testing.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr StreamRole kRoles[] = {StreamRole::kCompute, StreamRole::kReduce};

using GroupFn =
    std::function<void(const std::shared_ptr<LocalGroup>&, StreamRole)>;

// fn(group, role) for 1 to 5 ranks, on both kinds of stream.
void ForEachWorld(const GroupFn& fn,
                  BulkAlgorithm algorithm = BulkAlgorithm::kDirect) {
  for (int world = 1; world <= 5; ++world) {
    for (const StreamRole role : kRoles) {
      SCOPED_TRACE(::testing::Message()
                   << world << " ranks, "
                   << (role == StreamRole::kCompute ? "own" : "worker")
                   << " thread");
      fn(LocalGroup::Make(world, {.algorithm = algorithm}), role);
    }
  }
}

// What holds whatever the algorithm.
class AlgorithmTest : public ::testing::TestWithParam<BulkAlgorithm> {};

INSTANTIATE_TEST_SUITE_P(Local, AlgorithmTest,
                         ::testing::Values(BulkAlgorithm::kDirect,
                                           BulkAlgorithm::kRing),
                         [](const auto& info) {
                           return info.param == BulkAlgorithm::kRing ? "ring"
                                                                     : "direct";
                         });

TEST_P(AlgorithmTest, AllGatherGathersPiecesInRankOrder) {
  const auto test = [](const auto& group, StreamRole role) {
    const int world = group->world();
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      for (const DType dtype : kFloats) {
        for (const bool in_place : {false, true}) {
          std::vector<Values> sends, recvs;
          std::vector<CollectiveSegment> segments;
          for (size_t s = 0; s < kPieces.size(); ++s) {
            const int64_t n = kPieces[s];
            const auto own = [&](int64_t i) { return Number(rank.rank, s, i); };
            sends.push_back(Values::Of(dtype, n, own));
            recvs.emplace_back(dtype, n * world);
            for (int64_t i = 0; in_place && i < n; ++i) {
              recvs[s].Set(rank.rank * n + i, own(i));
            }
          }
          for (size_t s = 0; s < kPieces.size(); ++s) {
            const int64_t n = kPieces[s];
            segments.push_back(
                {in_place ? recvs[s].at(rank.rank * n) : sends[s].data(),
                 recvs[s].data(), n * world});
          }
          rank.comm->AllGather(*rank.stream, "unit", dtype, segments);
          rank.stream->Synchronize();
          for (size_t s = 0; s < kPieces.size(); ++s) {
            const int64_t n = kPieces[s];
            EXPECT_EQ(recvs[s], Values::Of(dtype, n * world,
                                           [&](int64_t i) {
                                             return Number(
                                                 static_cast<int>(i / n), s,
                                                 i % n);
                                           }))
                << dtype << " segment " << s;
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  ForEachWorld(test, GetParam());
}

TEST_P(AlgorithmTest, ReduceScatterSumsIntegersExactly) {
  const auto test = [](const auto& group, StreamRole role) {
    const int world = group->world();
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      for (const DType dtype : kFloats) {
        for (const bool accumulate : {false, true}) {
          std::vector<Values> sends, recvs;
          std::vector<CollectiveSegment> segments;
          for (size_t s = 0; s < kPieces.size(); ++s) {
            const int64_t n = kPieces[s];
            sends.push_back(Values::Of(dtype, n * world, [&](int64_t i) {
              return Number(rank.rank, s, i);
            }));
            recvs.push_back(
                Values::Of(dtype, n, [](int64_t i) { return i % 10 - 5.0; }));
          }
          for (size_t s = 0; s < kPieces.size(); ++s) {
            segments.push_back(
                {sends[s].data(), recvs[s].data(), kPieces[s] * world});
          }
          int64_t elems = 0;
          for (const int64_t n : kPieces) elems += n * world;
          Staging staging(*rank.comm, dtype, elems);
          rank.comm->ReduceScatter(*rank.stream, "unit", dtype, accumulate,
                                   segments, staging);
          rank.stream->Synchronize();
          for (size_t s = 0; s < kPieces.size(); ++s) {
            const int64_t n = kPieces[s];
            EXPECT_EQ(recvs[s],
                      Values::Of(dtype, n,
                                 [&](int64_t i) {
                                   double sum = accumulate ? i % 10 - 5.0 : 0.0;
                                   for (int r = 0; r < world; ++r) {
                                     sum += Number(r, s, rank.rank * n + i);
                                   }
                                   return sum;
                                 }))
                << dtype;
            // The sent data is unchanged.
            EXPECT_EQ(sends[s], Values::Of(dtype, n * world, [&](int64_t i) {
                        return Number(rank.rank, s, i);
                      }));
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  ForEachWorld(test, GetParam());
}

TEST_P(AlgorithmTest, ReduceScatterInPlaceLeavesOtherPiecesAlone) {
  const auto test = [](const auto& group, StreamRole role) {
    const int world = group->world();
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      for (const DType dtype : kFloats) {
        for (const int64_t n : kPieces) {
          Values data = Values::Of(dtype, n * world, [&](int64_t i) {
            return Number(rank.rank, 0, i);
          });
          Staging staging(*rank.comm, dtype, n * world);
          rank.comm->ReduceScatter(
              *rank.stream, "unit", dtype, false,
              {{data.data(), data.at(rank.rank * n), n * world}}, staging);
          rank.stream->Synchronize();
          for (int64_t i = 0; i < n * world; ++i) {
            double want = Number(rank.rank, 0, i);
            if (i / n == rank.rank) {
              want = 0;
              for (int r = 0; r < world; ++r) want += Number(r, 0, i);
            }
            EXPECT_EQ(data[i], want) << dtype << " " << i << " of " << n;
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  ForEachWorld(test, GetParam());
}

// Equal to the fp32 sum rounded once; a sum that is rounded to
// bf16 at every addition (the control) is not.
TEST(LocalTest, ReduceScatterOfBF16AddsInFloatAndRoundsOnce) {
  constexpr int kWorld = 4;
  constexpr int64_t kN = 999;
  std::vector<Values> inputs;
  for (int r = 0; r < kWorld; ++r) {
    std::mt19937 random(r);
    std::normal_distribution<double> normal;
    inputs.push_back(Values::Of(DType::kBF16, kN * kWorld,
                                [&](int64_t) { return normal(random); }));
  }
  const auto sum = [&](int64_t i, bool round) {
    float total = 0;
    for (const Values& input : inputs) {
      total += static_cast<float>(input[i]);
      if (round) total = BF16ToF32(F32ToBF16(total));
    }
    return total;
  };
  std::vector<int> control_differs(kWorld);
  const absl::Status status = RunOnGroup(
      LocalGroup::Make(kWorld), StreamRole::kReduce, [&](auto& rank) {
        Values sums(DType::kBF16, kN);
        Values& mine = inputs[rank.rank];
        rank.comm->ReduceScatter(*rank.stream, "grads", DType::kBF16, false,
                                 {{mine.data(), sums.data(), kN * kWorld}});
        rank.stream->Synchronize();
        for (int64_t i = 0; i < kN; ++i) {
          const float want = sum(rank.rank * kN + i, false);
          EXPECT_EQ(sums[i], BF16ToF32(F32ToBF16(want)));
          control_differs[rank.rank] +=
              sums[i] != sum(rank.rank * kN + i, true);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  for (const int count : control_differs) EXPECT_GT(count, kN / 20);
}

TEST(LocalTest, SumsRunInRankOrder) {
  // (1 + 2^-24) + 2^-24 is 1 in fp32, 1 + (2^-24 + 2^-24) is not.
  const double parts[] = {1, 0x1p-24, 0x1p-24};
  for (int turn = 0; turn < 3; ++turn) {
    const auto part = [&](int rank) { return parts[(rank + turn) % 3]; };
    const float want = static_cast<float>(part(0)) +
                       static_cast<float>(part(1)) +
                       static_cast<float>(part(2));
    EXPECT_EQ(want == 1.0f, turn != 1);
    const absl::Status status =
        RunOnGroup(LocalGroup::Make(3), StreamRole::kReduce, [&](auto& rank) {
          float send[3], recv = 0, at_root = want;
          for (float& x : send) x = static_cast<float>(part(rank.rank));
          rank.comm->ReduceScatter(*rank.stream, "sum", DType::kF32, false,
                                   {{send, &recv, 3}});
          rank.comm->Reduce(*rank.stream, "sum", DType::kF32, turn,
                            {{send, &at_root, 1}});
          rank.stream->Synchronize();
          EXPECT_EQ(recv, want);
          EXPECT_EQ(at_root, want);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(LocalTest, BroadcastCopiesTheRoots) {
  ForEachWorld([](const auto& group, StreamRole role) {
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      for (int root = 0; root < group->world(); ++root) {
        Values data = Values::Of(DType::kU16, 77, [&](int64_t i) {
          return 100.0 * rank.rank + static_cast<double>(i);
        });
        rank.comm->Broadcast(*rank.stream, "init", DType::kU16, root,
                             {{data.data(), data.data(), data.size()}});
        rank.stream->Synchronize();
        EXPECT_EQ(data, Values::Of(DType::kU16, 77, [&](int64_t i) {
                    return 100.0 * root + static_cast<double>(i);
                  }));
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
}

TEST(LocalTest, BroadcastOfSeveralSegmentsFillsAllOfThem) {
  ForEachWorld([](const auto& group, StreamRole role) {
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      const int root = group->world() - 1;
      for (const bool in_place : {false, true}) {
        std::vector<Values> sends, recvs;
        std::vector<CollectiveSegment> segments;
        for (size_t s = 0; s < kPieces.size(); ++s) {
          sends.push_back(Values::Of(DType::kBF16, kPieces[s], [&](int64_t i) {
            return Number(rank.rank, s, i);
          }));
          recvs.push_back(in_place ? sends[s]
                                   : Values(DType::kBF16, kPieces[s]));
        }
        for (size_t s = 0; s < kPieces.size(); ++s) {
          segments.push_back({in_place ? recvs[s].data() : sends[s].data(),
                              recvs[s].data(), kPieces[s]});
        }
        rank.comm->Broadcast(*rank.stream, "unit", DType::kBF16, root,
                             segments);
        rank.stream->Synchronize();
        for (size_t s = 0; s < kPieces.size(); ++s) {
          EXPECT_EQ(recvs[s],
                    Values::Of(DType::kBF16, kPieces[s],
                               [&](int64_t i) { return Number(root, s, i); }));
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
}

TEST(LocalTest, ReduceSumsOnTheRootAndLeavesTheOthersAlone) {
  ForEachWorld([](const auto& group, StreamRole role) {
    const int world = group->world();
    const absl::Status status = RunOnGroup(group, role, [&](auto& rank) {
      for (const DType dtype : kFloats) {
        for (int root = 0; root < world; ++root) {
          for (const bool in_place : {false, true}) {
            std::vector<Values> sends, recvs;
            std::vector<CollectiveSegment> segments;
            for (size_t s = 0; s < kPieces.size(); ++s) {
              sends.push_back(Values::Of(dtype, kPieces[s], [&](int64_t i) {
                return Number(rank.rank, s, i);
              }));
              recvs.emplace_back(dtype, kPieces[s]);
            }
            for (size_t s = 0; s < kPieces.size(); ++s) {
              segments.push_back({sends[s].data(),
                                  (in_place ? sends : recvs)[s].data(),
                                  kPieces[s]});
            }
            rank.comm->Reduce(*rank.stream, "unit", dtype, root, segments);
            rank.stream->Synchronize();
            for (size_t s = 0; s < kPieces.size(); ++s) {
              const Values sum = Values::Of(dtype, kPieces[s], [&](int64_t i) {
                double total = 0;
                for (int r = 0; r < world; ++r) total += Number(r, s, i);
                return total;
              });
              const Values own = Values::Of(dtype, kPieces[s], [&](int64_t i) {
                return Number(rank.rank, s, i);
              });
              const bool is_root = rank.rank == root;
              EXPECT_EQ(sends[s], is_root && in_place ? sum : own);
              EXPECT_EQ(recvs[s],
                        is_root && !in_place ? sum : Values(dtype, kPieces[s]));
            }
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
}

TEST(LocalTest, NobodyPassesABarrierBeforeAllHaveReachedIt) {
  std::atomic<int> reached{0};
  const absl::Status status =
      RunOnGroup(LocalGroup::Make(4), StreamRole::kCompute, [&](auto& rank) {
        for (int round = 1; round <= 50; ++round) {
          reached.fetch_add(1);
          rank.comm->Barrier(*rank.stream, "step");
          EXPECT_GE(reached.load(), 4 * round);
          rank.comm->Barrier(*rank.stream, "checked");
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Memory is reused at once after each collective, ranks are held up at random,
// and two channels run concurrently: TSan and wrong values would show a rank
// that reads or writes too early or too late.
TEST_P(AlgorithmTest, ManyQueuedCollectivesNeverMixUp) {
  constexpr int64_t kN = 300;
  constexpr int kRounds = 50;
  for (int world = 1; world <= 5; ++world) {
    const auto group = LocalGroup::Make(world, {.algorithm = GetParam()});
    const absl::Status status = RunRanks(world, [&](int rank) {
      const std::unique_ptr<Device> device = MakeCpuDevice(1);
      const auto gather = group->Connect(rank, "gather");
      const auto reduce = group->Connect(rank, "reduce");
      std::vector<float> full(kN * world), grads(kN * world);
      std::vector<double> scalars(kRounds, rank);
      Staging staging(*reduce, DType::kF32, kN * world);
      const auto gathers = device->MakeStream(StreamRole::kGather);
      const auto reduces = device->MakeStream(StreamRole::kReduce);
      std::mt19937 random(rank);
      int wrong_values = 0, wrong_sums = 0;
      const auto delay = [&random] {
        return std::chrono::microseconds(random() % 3 == 0 ? random() % 300
                                                           : 0);
      };
      for (int round = 0; round < kRounds; ++round) {
        const std::string name = absl::StrCat("unit.", round);
        gathers->Enqueue([&, round, wait = delay()] {
          std::this_thread::sleep_for(wait);
          for (int64_t i = 0; i < kN * world; ++i) full[i] = -1;
          for (int64_t i = 0; i < kN; ++i) {
            full[rank * kN + i] = static_cast<float>(round * 10 + rank);
          }
        });
        gather->AllGather(*gathers, name, DType::kF32,
                          {{full.data() + rank * kN, full.data(), kN * world}});
        gathers->Enqueue([&, round] {
          for (int64_t i = 0; i < kN * world; ++i) {
            wrong_values += full[i] != static_cast<float>(round * 10 + i / kN);
          }
        });
        reduces->Enqueue([&, round, wait = delay()] {
          std::this_thread::sleep_for(wait);
          for (float& grad : grads) grad = static_cast<float>(round + rank);
        });
        float* const own = grads.data() + rank * kN;
        reduce->ReduceScatter(*reduces, name, DType::kF32, false,
                              {{grads.data(), own, kN * world}}, staging);
        reduce->AllGather(*reduces, name, DType::kF32,
                          {{own, grads.data(), kN * world}});
        reduces->Enqueue([&, round] {
          const int want = world * round + world * (world - 1) / 2;
          for (const float grad : grads) {
            wrong_sums += grad != static_cast<float>(want);
          }
        });
        double& scalar = scalars[round];
        reduce->Broadcast(*reduces, "scalar", DType::kF64, round % world,
                          {{&scalar, &scalar, 1}});
      }
      gathers->Synchronize();
      reduces->Synchronize();
      EXPECT_EQ(wrong_values, 0);
      EXPECT_EQ(wrong_sums, 0);
      for (int round = 0; round < kRounds; ++round) {
        EXPECT_EQ(scalars[round], round % world);
      }
      return gather->status();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Two groups of two and the two ranks at the same place in each, as a mesh.
TEST(LocalTest, MembersOfAChannelAreCountedByTheirPlace) {
  const auto group = LocalGroup::Make(4);
  const absl::Status status = RunRanks(4, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const int first = rank / 2 * 2;
    const auto within = group->Connect(rank, "sum", {first, first + 1});
    const auto across = group->Connect(rank, "sum", {rank % 2, rank % 2 + 2});
    const auto all = group->Connect(rank, "sum");
    EXPECT_EQ(within->rank(), rank % 2);
    EXPECT_EQ(across->rank(), rank / 2);
    EXPECT_EQ(all->rank(), rank);
    EXPECT_EQ(within->world(), 2);
    EXPECT_EQ(across->world(), 2);
    EXPECT_EQ(all->world(), 4);
    const auto stream = device->MakeStream(StreamRole::kReduce);
    for (int round = 0; round < 50; ++round) {
      // Rank r sends r, 10 + r.
      float send[2] = {1.0f * rank, 10.0f + rank}, gathered[2] = {};
      within->ReduceScatter(*stream, "unit", DType::kF32, false,
                            {{send, send + within->rank(), 2}});
      float& sum = send[within->rank()];
      across->Reduce(*stream, "unit", DType::kF32, 1, {{&sum, &sum, 1}});
      across->Broadcast(*stream, "unit", DType::kF32, 1, {{&sum, &sum, 1}});
      within->AllGather(*stream, "unit", DType::kF32, {{&sum, gathered, 2}});
      double last = rank;
      all->Broadcast(*stream, "norm", DType::kF64, 3, {{&last, &last, 1}});
      stream->Synchronize();
      EXPECT_EQ(gathered[0], 0 + 1 + 2 + 3);
      EXPECT_EQ(gathered[1], 10 + 11 + 12 + 13);
      EXPECT_EQ(last, 3);
    }
    return all->status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// ---- Failures ---------------------------------------------------------------

// Runs fn on all ranks, each on a worker stream, and returns how each rank's
// communicator ended.
std::vector<absl::Status> RankOutcomes(
    const std::shared_ptr<LocalGroup>& group,
    const std::function<void(RankContext&)>& fn) {
  std::vector<absl::Status> statuses(group->world());
  const absl::Status ignored = RunOnGroup(
      group, StreamRole::kReduce, [&](RankContext& rank) -> absl::Status {
        fn(rank);
        rank.stream->Synchronize();
        statuses[rank.rank] = rank.comm->status();
        return absl::OkStatus();
      });
  return statuses;
}

void ExpectAll(const std::vector<absl::Status>& statuses, absl::StatusCode code,
               const ::testing::Matcher<std::string>& message) {
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), message);
  }
}

std::shared_ptr<LocalGroup> ShortGroup(int world) {
  return LocalGroup::Make(world, {.timeout = absl::Milliseconds(500)});
}

TEST(LocalTest, AnotherKindIsReportedOnAllRanks) {
  const auto statuses =
      RankOutcomes(LocalGroup::Make(3), [](RankContext& rank) {
        float send[12] = {}, recv[12];
        rank.comm->Barrier(*rank.stream, "start");
        if (rank.rank == 2) {
          rank.comm->AllGather(*rank.stream, "block.1", DType::kF32,
                               {{send, recv, 12}});
        } else {
          rank.comm->ReduceScatter(*rank.stream, "block.1", DType::kF32, true,
                                   {{send, recv, 12}});
        }
        rank.stream->Synchronize();
      });
  ExpectAll(statuses, absl::StatusCode::kFailedPrecondition,
            AllOf(HasSubstr("rank 2 differs from rank 0 at #2 of channel "
                            "\"test\""),
                  HasSubstr("all_gather \"block.1\" fp32 [12]"),
                  HasSubstr("reduce_scatter \"block.1\" fp32 += [12]")));
}

TEST(LocalTest, AnotherNameDtypeSizeSumOrRootIsReportedOnAllRanks) {
  float data[8] = {}, other[8] = {};
  const auto reduce = [&](RankContext& rank, const char* name, DType dtype,
                          int root, int64_t elems) {
    rank.comm->Reduce(*rank.stream, name, dtype, root, {{data, other, elems}});
    rank.stream->Synchronize();
  };
  const std::vector<std::function<void(RankContext&, bool)>> cases = {
      [&](RankContext& rank, bool odd) {
        reduce(rank, odd ? "loss" : "norm", DType::kF32, 0, 4);
      },
      [&](RankContext& rank, bool odd) {
        reduce(rank, "norm", odd ? DType::kBF16 : DType::kF32, 0, 4);
      },
      [&](RankContext& rank, bool odd) {
        reduce(rank, "norm", DType::kF32, 0, odd ? 3 : 4);
      },
      [&](RankContext& rank, bool odd) {
        reduce(rank, "norm", DType::kF32, odd, 4);
      },
      [](RankContext& rank, bool odd) {
        float send[8] = {}, recv[4] = {};
        rank.comm->ReduceScatter(*rank.stream, "unit", DType::kF32, odd,
                                 {{send, recv, 8}});
        rank.stream->Synchronize();
      },
      [](RankContext& rank, bool odd) {
        float send[8] = {}, recv[8] = {};
        std::vector<CollectiveSegment> segments = {{send, recv, 2},
                                                   {send, recv, 4}};
        if (odd) std::swap(segments[0].elems, segments[1].elems);
        rank.comm->AllGather(*rank.stream, "unit", DType::kF32, segments);
        rank.stream->Synchronize();
      }};
  for (const auto& one : cases) {
    const auto statuses =
        RankOutcomes(LocalGroup::Make(2),
                     [&](RankContext& rank) { one(rank, rank.rank == 1); });
    ExpectAll(statuses, absl::StatusCode::kFailedPrecondition,
              HasSubstr("rank 1 differs from rank 0 at #1"));
  }
}

TEST_P(AlgorithmTest, ARankThatNeverArrivesIsNamedOnAllRanks) {
  const auto group = LocalGroup::Make(
      4, {.timeout = absl::Milliseconds(500), .algorithm = GetParam()});
  const auto statuses = RankOutcomes(group, [](RankContext& rank) {
    float send[8] = {}, recv[2];
    Staging staging(*rank.comm, DType::kF32, 8);
    rank.comm->Barrier(*rank.stream, "start");
    if (rank.rank == 2) {
      // It is present, but does something else.
      while (rank.comm->status().ok()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return;
    }
    rank.comm->ReduceScatter(*rank.stream, "block.1", DType::kF32, false,
                             {{send, recv, 8}}, staging);
    rank.stream->Synchronize();
  });
  const char* const by = GetParam() == BulkAlgorithm::kRing ? " by ring" : "";
  ExpectAll(statuses, absl::StatusCode::kDeadlineExceeded,
            AllOf(HasSubstr(absl::StrCat(
                      "rank 2 did not arrive at #2 of channel \"test\", "
                      "reduce_scatter \"block.1\" fp32",
                      by, " [8] within 500ms")),
                  HasSubstr("rank 2 issued #1, barrier \"start\" last;")));
}

TEST(LocalTest, ARankWhoseStreamIsBusyIsToldFromOneThatForgot) {
  const auto statuses = RankOutcomes(ShortGroup(2), [](RankContext& rank) {
    if (rank.rank == 1) {
      rank.stream->Enqueue([&rank] {
        while (rank.comm->status().ok()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
      });
    }
    rank.comm->Barrier(*rank.stream, "start");
  });
  ExpectAll(statuses, absl::StatusCode::kDeadlineExceeded,
            HasSubstr("rank 1 issued it, but its stream has not reached it"));
}

TEST(LocalTest, RanksThatWaitInTwoChannelsAreShownWhereTheyAre) {
  const auto group = ShortGroup(2);
  std::vector<absl::Status> statuses(2);
  const absl::Status status = RunRanks(2, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const auto gather = group->Connect(rank, "gather");
    const auto reduce = group->Connect(rank, "reduce");
    const auto stream = device->MakeStream(StreamRole::kReduce);
    (rank == 0 ? gather : reduce)->Barrier(*stream, "unit");
    (rank == 0 ? reduce : gather)->Barrier(*stream, "unit");
    stream->Synchronize();
    statuses[rank] = gather->status();
    EXPECT_EQ(gather->status(), reduce->status());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectAll(statuses, absl::StatusCode::kDeadlineExceeded,
            ::testing::ContainsRegex(
                "rank (0|1) did not arrive at #1 of channel "
                "\"(gather|reduce)\".*it is in #1 of channel "
                "\"(gather|reduce)\", barrier \"unit\", and waits "
                "for rank (0|1)"));
  // In a cycle the rank that was waited for first is missing.
  EXPECT_EQ(group->missing().size(), 1u);
}

// A late rank may itself wait for the missing one.
TEST(LocalTest, WhomALateRankWaitsForIsNamedToo) {
  const auto group = ShortGroup(3);
  std::vector<absl::Status> statuses(3);
  const absl::Status status = RunRanks(3, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const auto stream = device->MakeStream(StreamRole::kReduce);
    std::vector<std::unique_ptr<Communicator>> ends;
    const auto connect = [&](const char* name, std::vector<int> members) {
      ends.push_back(group->Connect(rank, name, std::move(members)));
      return ends.back().get();
    };
    if (rank > 0) {
      Communicator* const within = connect("reduce", {1, 2});
      if (rank == 1) {
        // Rank 0's patience ends first.
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        within->Barrier(*stream, "unit");
      }
    }
    if (rank < 2) connect("across", {0, 1})->Barrier(*stream, "unit");
    if (rank == 2) connect("scalar", {2});
    while (ends[0]->status().ok()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    stream->Synchronize();
    statuses[rank] = ends[0]->status();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectAll(
      statuses, absl::StatusCode::kDeadlineExceeded,
      AllOf(HasSubstr("rank 1 did not arrive at #1 of channel \"across of "
                      "ranks 0, 1\""),
            HasSubstr("it is in #1 of channel \"reduce of ranks 1, 2\", "
                      "barrier \"unit\", and waits for rank 2")));
  // Rank 1 was late because of rank 2, which alone is missing.
  EXPECT_EQ(group->missing(), std::vector<int>{2});
}

TEST(LocalTest, ARankThatNeverConnectedIssuedNothing) {
  const auto group = ShortGroup(2);
  const auto device = MakeCpuDevice(1);
  const auto comm = group->Connect(0, "gather");
  const auto stream = device->MakeStream(StreamRole::kCompute);
  comm->Barrier(*stream, "start");
  ExpectAll({comm->status()}, absl::StatusCode::kDeadlineExceeded,
            HasSubstr("rank 1 issued nothing here"));
}

// The default timeout is minutes: the test does not wait for it.
TEST(LocalTest, ARankThatLeavesIsMissedAtOnce) {
  const auto group = LocalGroup::Make(3);
  std::vector<absl::Status> statuses(2);
  const absl::Status status = RunRanks(3, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const auto comm = group->Connect(rank, "gather");
    const auto stream = device->MakeStream(StreamRole::kReduce);
    comm->Barrier(*stream, "one");
    if (rank == 2) return absl::OkStatus();  // its barrier is still queued
    comm->Barrier(*stream, "two");
    stream->Synchronize();
    statuses[rank] = comm->status();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectAll(statuses, absl::StatusCode::kUnavailable,
            HasSubstr("rank 2 left before #2 of channel \"gather\", barrier "
                      "\"two\""));
}

TEST(LocalTest, AbortWakesEverybodyAndTheFirstCounts) {
  const auto statuses =
      RankOutcomes(LocalGroup::Make(3), [](RankContext& rank) {
        if (rank.rank == 1) {
          rank.comm->Abort(absl::DataLossError("the token file is torn"));
          rank.comm->Abort(absl::InternalError("later"));
        }
        rank.comm->Barrier(*rank.stream, "start");
      });
  ExpectAll(statuses, absl::StatusCode::kDataLoss,
            "local: rank 1 aborted the run: the token file is torn");
}

TEST(LocalTest, WhatIsQueuedBehindAFailureChangesNothing) {
  const auto statuses =
      RankOutcomes(LocalGroup::Make(2), [](RankContext& rank) {
        float send[2] = {1, 2}, recv[2] = {5, 6}, all = 7;
        rank.comm->Barrier(*rank.stream, rank.rank == 0 ? "a" : "b");
        for (int i = 0; i < 100; ++i) {
          rank.comm->AllGather(*rank.stream, "unit", DType::kF32,
                               {{send, recv, 2}});
          rank.comm->Broadcast(*rank.stream, "norm", DType::kF32, 0,
                               {{send, &all, 1}});
        }
        rank.stream->Synchronize();
        rank.comm->Barrier(*rank.stream, "after");
        rank.stream->Synchronize();
        EXPECT_EQ(recv[0], 5);
        EXPECT_EQ(recv[1], 6);
        EXPECT_EQ(all, 7);
      });
  ExpectAll(statuses, absl::StatusCode::kFailedPrecondition,
            HasSubstr("rank 1 is in barrier \"b\", rank 0 in barrier \"a\""));
}

// Ranks that fail in the middle of a collective free their memory behind it,
// while others may still be reading: asan and TSan would see that.
TEST_P(AlgorithmTest, AnAbortNeverReleasesMemoryThatIsBeingRead) {
  constexpr int64_t kN = 20000;
  for (int round = 0; round < 40; ++round) {
    const auto group = LocalGroup::Make(4, {.algorithm = GetParam()});
    const absl::Status status = RunRanks(4, [&](int rank) {
      const auto device = MakeCpuDevice(1);
      const auto comm = group->Connect(rank, "reduce");
      const auto stream = device->MakeStream(StreamRole::kReduce);
      std::vector<std::unique_ptr<std::vector<float>>> memory(4);
      std::vector<std::unique_ptr<Staging>> staging(4);
      for (int i = 0; i < 4; ++i) {
        memory[i] = std::make_unique<std::vector<float>>(4 * kN);
        staging[i] = std::make_unique<Staging>(*comm, DType::kF32, 4 * kN);
        float* const full = memory[i]->data();
        comm->ReduceScatter(*stream, "unit", DType::kF32, false,
                            {{full, full + rank * kN, 4 * kN}}, *staging[i]);
        stream->Enqueue([&, i] { staging[i].reset(); });
        comm->AllGather(*stream, "unit", DType::kF32,
                        {{full + rank * kN, full, 4 * kN}});
        stream->Enqueue([&memory, i] { memory[i].reset(); });
      }
      if (rank == round % 4) {
        std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
        comm->Abort(absl::CancelledError("stop"));
      }
      stream->Synchronize();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Messages name the ranks of the run, and a group that is not waiting itself
// learns of it as well.
TEST(LocalTest, AFailureInOneGroupIsTheFailureOfAll) {
  const auto group = ShortGroup(4);
  std::vector<absl::Status> statuses(4);
  const absl::Status status = RunRanks(4, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const int first = rank / 2 * 2;
    const auto within = group->Connect(rank, "reduce", {first, first + 1});
    const auto stream = device->MakeStream(StreamRole::kReduce);
    within->Barrier(*stream, "start");
    if (rank != 3) within->Barrier(*stream, "next");
    while (within->status().ok()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    stream->Synchronize();
    statuses[rank] = within->status();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectAll(statuses, absl::StatusCode::kDeadlineExceeded,
            AllOf(HasSubstr("rank 3 did not arrive at #2 of channel \"reduce "
                            "of ranks 2, 3\", barrier \"next\""),
                  HasSubstr("rank 3 issued #1, barrier \"start\" last")));
}

TEST(LocalTest, ADifferenceWithinAGroupNamesRanksOfTheRun) {
  const auto group = ShortGroup(4);
  std::vector<absl::Status> statuses(4);
  const absl::Status status = RunRanks(4, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    const auto across =
        group->Connect(rank, "across", {rank % 2, rank % 2 + 2});
    const auto stream = device->MakeStream(StreamRole::kReduce);
    across->Barrier(*stream, rank == 3 ? "b" : "a");
    while (across->status().ok()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    stream->Synchronize();
    statuses[rank] = across->status();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  ExpectAll(statuses, absl::StatusCode::kFailedPrecondition,
            HasSubstr("rank 3 differs from rank 1 at #1 of channel \"across "
                      "of ranks 1, 3\": rank 3 is in barrier \"b\", rank 1 "
                      "in barrier \"a\""));
}

TEST(LocalDeathTest, ARankOutsideOfAChannelIsACallerMistake) {
  EXPECT_DEATH(LocalGroup::Make(4)->Connect(0, "reduce", {2, 3}),
               "rank 0 is not a member of channel \"reduce of ranks 2, 3\"");
  EXPECT_DEATH(LocalGroup::Make(4)->Connect(0, "reduce", {0, 4}),
               "rank 4 is not in \\[0, 4\\)");
}

TEST(LocalTest, StreamsOfOneChannelThatAreNotOrderedAreReported) {
  const auto group = LocalGroup::Make(1);
  const auto device = MakeCpuDevice(1);
  const auto comm = group->Connect(0, "gather");
  const auto worker = device->MakeStream(StreamRole::kReduce);
  const auto own = device->MakeStream(StreamRole::kCompute);
  std::mutex mutex;
  {
    std::lock_guard<std::mutex> hold(mutex);
    worker->Enqueue([&] { std::lock_guard<std::mutex> wait(mutex); });
    comm->Barrier(*worker, "first");
    comm->Barrier(*own, "second");
  }
  worker->Synchronize();
  ExpectAll({comm->status()}, absl::StatusCode::kFailedPrecondition,
            AllOf(HasSubstr("rank 0 performs #2 of channel \"gather\""),
                  HasSubstr("#1 has not finished")));
}

TEST(LocalTest, ARankIsBusyWithWhatItCopiesItself) {
  const auto group = LocalGroup::Make(2);
  const absl::Status status =
      RunOnGroup(group, StreamRole::kGather, [&](RankContext& rank) {
        EXPECT_EQ(rank.comm->busy_ms(), 0);
        Values piece(DType::kF32, 1 << 16), all(DType::kF32, 2 << 16);
        rank.comm->AllGather(*rank.stream, "all", DType::kF32,
                             {{piece.data(), all.data(), 2 << 16}});
        rank.stream->Synchronize();
        EXPECT_GT(rank.comm->busy_ms(), 0);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace zero
