// Values are read back as written, whoever holds them.

#include "engine/zero/state_access.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/rounding.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

// As engine/base/hash.h says.
std::string HashOf(const ValuesByName& parameters) {
  unsigned __int128 total = 0;
  uint64_t block = 0;
  for (const auto& [name, values] : parameters) {
    for (size_t at = 0; at < values.size(); at += 64, ++block) {
      const XXH128_hash_t hash = XXH3_128bits_withSeed(
          &values[at], 4 * std::min<size_t>(64, values.size() - at), block);
      total += static_cast<unsigned __int128>(hash.high64) << 64 | hash.low64;
    }
  }
  return absl::StrFormat("%016x%016x", static_cast<uint64_t>(total >> 64),
                         static_cast<uint64_t>(total));
}

// The ranks' kept states, as a checkpoint: bytes by state and parameter, and
// how often each came.
class KeptStates {
 public:
  void Put(const std::string& state, const Parameter& parameter, int64_t at,
           absl::Span<const char> bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    State& to = states_[absl::StrCat(state, " ", parameter.name)];
    if (to.bytes.empty()) {
      to.bytes.resize(parameter.shape.num_elems() * sizeof(float));
      to.times.resize(to.bytes.size());
    }
    std::copy(bytes.begin(), bytes.end(), to.bytes.begin() + at);
    for (size_t i = 0; i < bytes.size(); ++i) ++to.times[at + i];
  }
  void Get(const std::string& state, const Parameter& parameter, int64_t at,
           int64_t bytes, void* out) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const State& from = states_.at(absl::StrCat(state, " ", parameter.name));
    std::memcpy(out, &from.bytes.at(at), bytes);
  }
  StateAccess::ReadNextFn Reader(
      const std::vector<StateAccess::KeptRange>& ranges) const {
    return [this, ranges, i = size_t{0}](void* out) mutable {
      const StateAccess::KeptRange& range = ranges[i++];
      const int64_t item = DTypeBytes(range.dtype);
      Get(range.state, *range.parameter, range.begin * item, range.elems * item,
          out);
      return absl::OkStatus();
    };
  }
  bool operator==(const KeptStates& other) const {
    return std::equal(states_.begin(), states_.end(), other.states_.begin(),
                      other.states_.end(), [](const auto& a, const auto& b) {
                        return a.first == b.first &&
                               a.second.bytes == b.second.bytes;
                      });
  }
  // Of fp32 states.
  void ExpectEachByteOnce() const {
    EXPECT_FALSE(states_.empty());
    for (const auto& [name, state] : states_) {
      EXPECT_EQ(state.times, std::vector<int>(state.bytes.size(), 1)) << name;
    }
  }

 private:
  struct State {
    std::vector<char> bytes;
    std::vector<int> times;
  };
  mutable std::mutex mutex_;
  std::map<std::string, State> states_;
};

void Put(Rig& rig, KeptStates* kept) {
  rig->states().ForEachKept([&](const StateAccess::KeptRun& run) {
    kept->Put(run.state, *run.run.parameter,
              run.run.begin * DTypeBytes(run.dtype), rig->states().Bytes(run));
  });
}

// Calls `check` with a job for every stage, world and groups, with servers, and
// with states in the host's memory and on a disk.
void ForEachLayout(const std::function<void(const Job&)>& check) {
  const TempDir disk;
  for (int world : {1, 2, 3, 4, 6}) {
    for (int shards = 1; shards <= world; ++shards) {
      if (world % shards != 0) continue;
      for (int stage = 0; stage < 5; ++stage) {
        const bool server = stage == 4;
        if (server && shards < world) continue;
        Job job;
        job.config.vocab_size = 117;  // not a multiple of anything
        job.world = world;
        job.shards = shards;
        job.options.swap.path = disk.path();
        job.options.plan.owners = server ? 1 : 0;
        job.options.plan.placement =
            server ? PlacementOfServer() : PlacementOfStage(stage);
        SCOPED_TRACE(absl::StrCat("stage ", stage, ", ", world, " ranks, ",
                                  shards, " shards"));
        check(job);
        if (server || stage == 0) continue;
        for (const Home home : {Home::kHost, Home::kNvme}) {
          const char* const where = home == Home::kHost ? "host" : "disk";
          job.options.plan.homes = {.optimizer = home};
          SCOPED_TRACE(absl::StrCat("optimizer: ", where));
          check(job);
          if (stage < 3) continue;
          job.options.plan.homes.parameters = home;
          SCOPED_TRACE("parameters, too");
          check(job);
        }
      }
    }
  }
}

void OnRanks(const Job& job,
             const std::function<absl::Status(const Rank&, Rig&)>& body) {
  const absl::Status status =
      RunLocalRanks(job.world, RanksOf(job), OneThread, [&](const Rank& rank) {
        Rig rig(rank, job.Make(), job.options,
                Rehearse(job, rank, job.micro_steps));
        return body(rank, rig);
      });
  EXPECT_TRUE(status.ok()) << status;
}

std::set<std::string> HashesOf(const Job& job) {
  std::mutex mutex;
  std::set<std::string> hashes;
  OnRanks(job, [&](const Rank&, Rig& rig) -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(const std::string hash, rig->states().Hash());
    const std::string want = HashOf(*ReadParameters(*rig));
    std::lock_guard<std::mutex> lock(mutex);
    hashes.insert({hash, want});
    return absl::OkStatus();
  });
  return hashes;
}

TEST(StateAccessTest, TheHashKnowsNoStageWorldGroupOrServer) {
  std::set<std::string> fp32, bf16;
  ForEachLayout([&](Job job) {
    job.options.param_dtype = job.world % 2 ? DType::kBF16 : DType::kF32;
    fp32.merge(HashesOf(job));  // of masters, where there are any
    EXPECT_EQ(fp32.size(), 1u);
    job.options.param_dtype = DType::kBF16;
    job.options.stochastic_rounding = true;
    bf16.merge(HashesOf(job));  // of the parameters themselves
    EXPECT_EQ(bf16.size(), 1u);
  });
  EXPECT_NE(fp32, bf16);
}

// Tables of several pieces and segments.
TEST(StateAccessTest, TheHashOfLargeParametersIsTheSameToo) {
  std::set<std::string> hashes;
  for (int stage : {0, 3}) {
    for (int world : {1, 3}) {
      Job job;
      job.config.vocab_size = 5 * ModelStates::kPieceElems / 16 + 3;
      job.world = world;
      job.options = AtStage(job.options, stage);
      OnRanks(job, [&](const Rank& rank, Rig& rig) -> absl::Status {
        EXPECT_GT(rig->plan().units.back().segments.size(), 1u);
        ZERO_ASSIGN_OR_RETURN(const std::string hash, rig->states().Hash());
        if (rank.rank() == 0) hashes.insert(hash);
        return absl::OkStatus();
      });
    }
  }
  EXPECT_EQ(hashes.size(), 1u);
}

float ValueOf(const Parameter& parameter, int64_t i) {
  return static_cast<float>(parameter.name.size()) + 0.001f * i;
}

TEST(StateAccessTest, LoadAsksForEveryElementOnceOfAllRanks) {
  ForEachLayout([](Job job) {
    job.options.param_dtype = DType::kBF16;
    std::mutex mutex;
    std::map<std::string, std::vector<int>> asked;
    OnRanks(job, [&](const Rank&, Rig& rig) -> absl::Status {
      ZERO_RETURN_IF_ERROR(
          rig->states().Load([&](const Parameter& parameter, int64_t begin,
                                 int64_t count, float* out) {
            EXPECT_LE(count, ModelStates::kPieceElems);
            std::lock_guard<std::mutex> lock(mutex);
            std::vector<int>& times = asked[parameter.name];
            times.resize(parameter.shape.num_elems());
            for (int64_t i = begin; i < begin + count; ++i) {
              ++times[i];
              *out++ = ValueOf(parameter, i);
            }
          }));
      // All have them: rounded parameters, and the rounding error.
      int64_t num_params = 0, num_others = 0;
      rig->states().ForEachRun([&](const FlatState& state,
                                   const StateRun& run) {
        for (int64_t i = 0; i < run.values.num_elems(); ++i) {
          const float want = ValueOf(*run.parameter, run.begin + i);
          if (state.name() == "parameters") {
            EXPECT_EQ(run.values.As<uint16_t>()[i], SplitMaster(want).param);
          } else if (state.name() == "master") {
            EXPECT_EQ(run.values.As<uint16_t>()[i], SplitMaster(want).rest);
          } else {
            EXPECT_EQ(run.values.As<float>()[i], 0);
          }
        }
        (state.name() == "parameters" ? num_params : num_others) +=
            run.values.num_elems();
      });
      const auto is_all = [&](Placement placement, int64_t elems) {
        const int64_t all = rig.model().NumParameters();
        return placement == Placement::kSharded ? elems <= all : elems == all;
      };
      EXPECT_TRUE(is_all(rig->plan().placement.parameters, num_params));
      EXPECT_TRUE(is_all(rig->plan().placement.optimizer, num_others / 3));
      const ValuesByName all = *ReadParameters(*rig);
      for (const auto& [name, values] : all) {
        const Parameter& parameter = rig.parameter(name);
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_EQ(values[i], ValueOf(parameter, i));
        }
      }
      return absl::OkStatus();
    });
    const auto model = job.Make();
    for (const Parameter* parameter : model->AllParameters()) {
      EXPECT_EQ(asked[parameter->name],
                std::vector<int>(parameter->shape.num_elems(), 1));
    }
  });
}

TEST(StateAccessTest, RanksShareOutWhatIsKept) {
  ForEachLayout([](const Job& job) {
    KeptStates kept;
    std::mutex mutex;
    std::vector<int64_t> shares;
    OnRanks(job, [&](const Rank&, Rig& rig) {
      Put(rig, &kept);
      int64_t elems = 0;
      for (const auto& piece : rig->states().KeptPieces()) {
        elems += piece.values.num_elems();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      shares.push_back(elems);
      return absl::OkStatus();
    });
    kept.ExpectEachByteOnce();
    if (job.options.plan.owners > 0) return;  // servers own all
    const auto [least, most] =
        std::minmax_element(shares.begin(), shares.end());
    // Each segment of each state may leave a rest.
    EXPECT_LT(*most - *least, 64);
  });
}

// Each kind of masters can resume from the other's checkpoint with the same
// bits.
TEST(StateAccessTest, SplitAndWholeMastersContinueEachOther) {
  for (int stage : {0, 1, 2, 3}) {
    for (const bool split : {false, true}) {
      SCOPED_TRACE(absl::StrCat("stage ", stage, ", split at first: ", split));
      Job job;
      job.options = AtStage(job.options, stage);
      job.options.param_dtype = DType::kBF16;
      job.options.optimizer.bias_correction = false;
      job.options.split_master = split;
      KeptStates kept;
      OnRanks(job, [&](const Rank& rank, Rig& first) -> absl::Status {
        const auto step = [](Rig& rig, int number) {
          rig.Step(TokenBatch(1, kLength, kVocab, number), 1e-2f);
        };
        for (int i = 0; i < 3; ++i) step(first, i);
        const ValuesByName all = *ReadParameters(*first);
        Job others = job;
        others.options.split_master = !split;
        Rig second(rank, others.Make(), others.options,
                   Rehearse(others, rank, others.micro_steps));
        Put(first, &kept);
        // After all ranks' files.
        ZERO_RETURN_IF_ERROR(first->states().Hash().status());
        ZERO_RETURN_IF_ERROR(second->states().Restore(
            [&](const std::vector<StateAccess::KeptRange>& ranges)
                -> absl::StatusOr<StateAccess::ReadNextFn> {
              return kept.Reader(ranges);
            }));
        EXPECT_EQ(*ReadParameters(*second), all);
        std::set<std::string> hashes;
        for (Rig* rig : {&first, &second}) {
          for (int i = 3; i < 6; ++i) step(*rig, i);
          ZERO_ASSIGN_OR_RETURN(const std::string hash,
                                (*rig)->states().Hash());
          hashes.insert(hash);
        }
        EXPECT_EQ(hashes.size(), 1u);
        return absl::OkStatus();
      });
    }
  }
}

// Where values come from: drawn, read from a file of weights, or restored.
TEST(StateAccessTest, EachBlockOnADiskIsWrittenOnceAndNoneIsRead) {
  const TempDir disk;
  for (const Home parameters : {Home::kDevice, Home::kNvme}) {
    SCOPED_TRACE(testing::Message()
                 << "parameters on the disk: " << (parameters == Home::kNvme));
    Job job;
    job.world = 1;
    job.options = AtStage(job.options, 3);
    job.options.param_dtype = DType::kBF16;
    job.options.plan.homes = {.parameters = parameters,
                              .optimizer = Home::kNvme};
    job.options.swap.path = disk.path();
    std::mutex mutex;               // of the threads that read and that write
    std::map<int64_t, int> writes;  // by place in the file
    int reads = 0;
    job.options.swap.io.fault = [&](DiskCall call, int64_t offset, int64_t,
                                    int64_t result) {
      std::lock_guard<std::mutex> lock(mutex);
      if (call == DiskCall::kWrite) ++writes[offset];
      reads += call == DiskCall::kRead;
      return result;
    };
    KeptStates kept;
    OnRanks(job, [&](const Rank&, Rig& rig) -> absl::Status {
      std::map<int64_t, int> want;
      const auto expect_each_once = [&](const char* what) {
        SCOPED_TRACE(what);
        std::lock_guard<std::mutex> lock(mutex);
        for (const auto& [offset, times] : writes) EXPECT_EQ(times, 1);
        if (want.empty()) want = writes;
        EXPECT_FALSE(want.empty());
        EXPECT_EQ(writes, want);
        EXPECT_EQ(reads, 0);
      };
      const auto count_anew = [&] {
        std::lock_guard<std::mutex> lock(mutex);
        writes.clear();
        reads = 0;
      };
      rig->states().Initialize(1);
      count_anew();
      rig->states().Initialize(1);
      expect_each_once("drawn");
      for (int i = 0; i < 2; ++i) {
        rig.Step(TokenBatch(1, kLength, kVocab, i), 1e-2f);
      }
      ZERO_ASSIGN_OR_RETURN(const std::string hash, rig->states().Hash());
      Put(rig, &kept);
      count_anew();
      ZERO_RETURN_IF_ERROR(
          rig->states().Load([](const Parameter& parameter, int64_t begin,
                                int64_t count, float* out) {
            for (int64_t i = 0; i < count; ++i) {
              out[i] = ValueOf(parameter, begin + i);
            }
          }));
      expect_each_once("read");
      count_anew();
      ZERO_RETURN_IF_ERROR(rig->states().Restore(
          [&](const std::vector<StateAccess::KeptRange>& ranges)
              -> absl::StatusOr<StateAccess::ReadNextFn> {
            return kept.Reader(ranges);
          }));
      expect_each_once("restored");
      EXPECT_EQ(*rig->states().Hash(), hash);
      KeptStates again;
      Put(rig, &again);
      EXPECT_TRUE(again == kept);
      return absl::OkStatus();
    });
  }
}

// A rank that needs nothing still takes part.
TEST(StateAccessTest, OneRankMayReadWhatAllHold) {
  for (int stage : {0, 3}) {
    Job job;
    job.world = 3;
    job.options = AtStage(job.options, stage);
    OnRanks(job, [&](const Rank& rank, Rig& rig) -> absl::Status {
      const ValuesByName all = *ReadParameters(*rig);
      if (rank.rank() != 1) return rig->states().Read(nullptr);
      EXPECT_EQ(*ReadParameters(*rig), all);
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace zero
