// Delayed updates: the bits of a plain run that keeps two sets of parameters
// and computes each gradient with those of the previous update.
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

struct Offload {
  int stage;
  Home parameters;
};
constexpr Offload kOffloads[] = {{1, Home::kDevice},
                                 {2, Home::kDevice},
                                 {3, Home::kDevice},
                                 {3, Home::kHost}};

std::string NameOf(const Offload& offload) {
  return absl::StrCat("stage ", offload.stage,
                      offload.parameters == Home::kHost ? ", all" : "");
}

Job Delayed(Job job, const Offload& offload) {
  job.options = AtStage(job.options, offload.stage);
  job.options.plan.homes = {.parameters = offload.parameters,
                            .optimizer = Home::kHost};
  job.options.delayed_updates = true;
  return job;
}

Job SomeJob() {
  Job job;
  job.steps = 6;
  job.delayed_from = 2;
  job.lr_factor = 0.7f;
  return job;
}

// The two sets of parameters of a rank that updates on its device.
class TwoSets {
 public:
  TwoSets(StateAccess& states, int delayed_from)
      : states_(&states), delayed_from_(delayed_from) {}

  void operator()(const Action& action, bool done) {
    if (done) return;
    const bool updates = action.kind == ActionKind::kMoments ||
                         action.kind == ActionKind::kTensorNorms ||
                         action.kind == ActionKind::kUpdate;
    if (updates == updating_) return;
    updating_ = updates;
    if (!updates) ++step_;
    if (step_ < delayed_from_) return;
    if (!updates) {
      if (step_ == delayed_from_) older_ = Get();
      newest_ = Get();
      Set(older_);
    } else {
      older_ = newest_;
      Set(newest_);
    }
  }

 private:
  using Bytes = std::vector<std::string>;

  template <typename Visit>
  void ForEachRun(const Visit& visit) {
    states_->ForEachRun([&](const FlatState& state, const StateRun& run) {
      if (state.name() == "parameters") visit(run.values);
    });
  }
  Bytes Get() {
    Bytes all;
    ForEachRun([&](const Tensor& values) {
      all.emplace_back(static_cast<const char*>(values.data()), values.bytes());
    });
    return all;
  }
  void Set(const Bytes& all) {
    auto next = all.begin();
    ForEachRun([&](const Tensor& values) {
      std::memcpy(values.data(), next->data(), next->size());
      ++next;
    });
  }

  StateAccess* states_;
  int delayed_from_;
  bool updating_ = true;  // as if after a step
  int step_ = -1;
  Bytes older_, newest_;
};

// The same with what `job` does itself at every action.
Outcome Reference(Job job, int stage) {
  job.options = AtStage(job.options, stage);
  const auto prepare = job.prepare;
  job.prepare = [prepare, from = job.delayed_from](const Rank& rank, Rig& rig) {
    auto sets = std::make_shared<TwoSets>(rig->states(), from);
    if (prepare) return prepare(rank, rig);
    rig->clock().set_hook(
        [sets](const Action& action, bool done) { (*sets)(action, done); });
  };
  return Train(job);
}

void ExpectEqualsReference(const Job& job) {
  const Outcome plain = Train(job);
  const Outcome want = Reference(job, 0);
  EXPECT_NE(want, plain);
  for (const Offload& offload : kOffloads) {
    SCOPED_TRACE(NameOf(offload));
    EXPECT_EQ(Train(Delayed(job, offload)), want);
  }
}

TEST(DelayedUpdateTest, EqualsARunWithTwoSetsOfParameters) {
  for (const ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int world : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << ModelFamilyName(family) << " "
                                        << dtype << " world " << world);
        Job job = SomeJob();
        job.config = TinyConfig(family);
        job.config.resid_pdrop = 0.1;
        job.world = world;
        job.options.param_dtype = dtype;
        ExpectEqualsReference(job);
      }
    }
  }
}

TEST(DelayedUpdateTest, EqualsItWithEveryOptimizer) {
  std::vector<RigOptions> all;
  const RigOptions base = SomeJob().options;
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLamb, OptimizerKind::kSgd}) {
    all.push_back(base);
    all.back().optimizer.kind = kind;
    if (kind == OptimizerKind::kSgd) all.back().optimizer.momentum = 0.9;
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    all.push_back(base);
    all.back().param_dtype = dtype;
    all.back().split_master = false;
    all.push_back(all.back());
    all.back().stochastic_rounding = true;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "options " << i);
    Job job = SomeJob();
    job.config = TiedLlama();
    job.options = all[i];
    ExpectEqualsReference(job);
  }
}

TEST(DelayedUpdateTest, EqualsItWithSeveralMicroBatches) {
  for (const bool in_parts : {false, true}) {
    Job job = SomeJob();
    job.config = TiedLlama();
    job.micro_steps = 3;
    job.options.plan.vocabulary_parts = in_parts;
    job.options.plan.min_part_elems = 640;
    for (const Offload& offload : kOffloads) {
      SCOPED_TRACE(NameOf(offload));
      EXPECT_EQ(Train(Delayed(job, offload)),
                Reference(job, offload.stage == 1 ? 0 : 3));
    }
  }
}

TEST(DelayedUpdateTest, FrozenParametersStay) {
  Job job = SomeJob();
  job.config.vocab_size = kManyWords;
  job.make = [config = job.config] { return MakePartlyFrozen(config); };
  ExpectEqualsReference(job);
}

TEST(DelayedUpdateTest, WhatChangesNoBitChangesNoneWithIt) {
  Job plain = SomeJob();
  plain.config = TiedLlama();
  const Outcome want = Reference(plain, 0);
  for (const Offload& offload : kOffloads) {
    for (int bits = 0; bits < 8; ++bits) {
      SCOPED_TRACE(testing::Message() << NameOf(offload) << " bits " << bits);
      Job job = Delayed(plain, offload);
      if (bits & 1) job.options.plan.reduce_bucket_elems = 1;
      if (bits & 2) job.options.overlap = false;
      if (bits & 4) job.options.recompute = Recompute::kFull;
      EXPECT_EQ(Train(job), want);
    }
    SCOPED_TRACE(NameOf(offload));
    Job job = Delayed(plain, offload);
    AddDelays(&job);
    EXPECT_EQ(Train(job), want);
  }
}

// Step 3's gradients overflow on one rank: all skip it, and no later one.
TEST(DelayedUpdateTest, ASkippedStepLeavesTheStatesAsTheyWere) {
  Job job = SomeJob();
  job.options.param_dtype = DType::kF16;
  const auto overflow = [](const Rank& rank, Rig& rig, auto also) {
    Parameter& bad = *rig.model().units()[2]->parameters()[1];
    rig->clock().set_hook([&bad, also, fails = rank.rank() == 1, step = 0](
                              const Action& action, bool done) mutable {
      also(action, done);
      const bool here =
          action.kind == ActionKind::kBackward && action.index == 2 && done;
      if (!here || ++step != 4 || !fails) return;
      bad.weight.sink->grad.As<float>()[5] =
          std::numeric_limits<float>::infinity();
    });
  };
  Job reference = job;
  reference.prepare = [&](const Rank& rank, Rig& rig) {
    auto sets = std::make_shared<TwoSets>(rig->states(), job.delayed_from);
    overflow(rank, rig, [sets](const Action& action, bool done) {
      (*sets)(action, done);
    });
  };
  const Outcome want = Reference(reference, 0);
  EXPECT_FALSE(std::isfinite(want.norms[3]));
  EXPECT_TRUE(std::isfinite(want.norms[4]));
  job.prepare = [&](const Rank& rank, Rig& rig) {
    overflow(rank, rig, [](const Action&, bool) {});
  };
  for (const Offload& offload : kOffloads) {
    SCOPED_TRACE(NameOf(offload));
    const Outcome got = Train(Delayed(job, offload));
    EXPECT_EQ(got.parameters, want.parameters);
    EXPECT_EQ(got.losses, want.losses);
  }
}

TEST(DelayedUpdateTest, LookingBetweenStepsChangesNoBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Offload& offload : kOffloads) {
      SCOPED_TRACE(testing::Message() << NameOf(offload) << " " << dtype);
      Job job = Delayed(SomeJob(), offload);
      job.options.param_dtype = dtype;
      const Outcome want = Train(job);
      job.between = [](Rig& rig) {
        const TokenBatch batch(2, kLength, kVocab, 9);
        const double before = rig.EvalLossSum(batch.All());
        EXPECT_TRUE(rig->states().Read(nullptr).ok());
        EXPECT_EQ(rig.EvalLossSum(batch.All()), before);
      };
      EXPECT_EQ(Train(job), want);
    }
  }
}

// Evaluation and files see the newest parameters: those of a run that ends
// there.
TEST(DelayedUpdateTest, WhatIsReadBetweenStepsIsTheNewest) {
  for (const Offload& offload : kOffloads) {
    SCOPED_TRACE(NameOf(offload));
    Job job = Delayed(SomeJob(), offload);
    job.options.param_dtype = DType::kBF16;
    Job shorter = job;
    shorter.steps = job.steps - 1;
    const Floats want = Train(shorter).parameters;
    std::mutex mutex;
    std::vector<Floats> seen;
    job.between = [&, step = std::map<Rig*, int>()](Rig& rig) mutable {
      const Floats now = *rig.TryReadAll();
      const std::lock_guard<std::mutex> lock(mutex);
      if (++step[&rig] == shorter.steps) seen.push_back(now);
    };
    Train(job);
    EXPECT_THAT(seen, testing::ElementsAre(want, want));
  }
}

// A rank's part of a checkpoint, by state and place.
using Kept = std::map<std::string, std::string>;

std::string PlaceOf(const std::string& state, const Parameter& parameter,
                    int64_t begin) {
  return absl::StrCat(state, " ", parameter.name, " ", begin);
}

Kept KeptOf(Rig& rig) {
  Kept kept;
  StateAccess& states = rig->states();
  states.ForEachKept([&](const StateAccess::KeptRun& run) {
    const auto bytes = states.Bytes(run);
    kept[PlaceOf(run.state, *run.run.parameter, run.run.begin)] =
        std::string(bytes.begin(), bytes.end());
  });
  return kept;
}

void Restore(Rig& rig, const Kept& kept, bool has_stale) {
  const absl::Status restored = rig->states().Restore(
      [&](const std::vector<StateAccess::KeptRange>& ranges) {
        return [&kept, ranges, next = size_t{0}](void* out) mutable {
          const StateAccess::KeptRange& range = ranges[next++];
          const std::string& bytes =
              kept.at(PlaceOf(range.state, *range.parameter, range.begin));
          std::memcpy(out, bytes.data(), bytes.size());
          return absl::OkStatus();
        };
      },
      has_stale);
  EXPECT_TRUE(restored.ok()) << restored;
}

// A run that ends, and another rig that resumes for its last three steps.
Floats TrainInTwoParts(const Job& job, const Job& resumed,
                       bool has_stale = true) {
  std::mutex mutex;
  std::map<int, Kept> kept;  // by rank
  Job first = job;
  first.steps = job.steps - 3;
  const absl::Status ran =
      RunLocalRanks(job.world, RanksOf(job), OneThread,
                    [&](const Rank& rank) -> absl::Status {
                      Job one = first;
                      one.between = [&, step = 0](Rig& rig) mutable {
                        if (++step < first.steps) return;
                        Kept own = KeptOf(rig);
                        const std::lock_guard<std::mutex> lock(mutex);
                        kept[rank.rank()] = std::move(own);
                      };
                      return RunRank(one, rank).status();
                    });
  EXPECT_TRUE(ran.ok()) << ran;
  Job second = resumed;
  second.first_step = first.steps;
  second.prepare = [&](const Rank& rank, Rig& rig) {
    Restore(rig, kept.at(rank.rank()), has_stale);
  };
  return Train(second).parameters;
}

TEST(DelayedUpdateTest, ACheckpointGoesOnToTheBitsOfARunThatNeverStopped) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int world : {1, 2}) {
      for (const Offload& offload : kOffloads) {
        SCOPED_TRACE(testing::Message()
                     << NameOf(offload) << " " << dtype << " world " << world);
        Job job = Delayed(SomeJob(), offload);
        job.world = world;
        job.options.param_dtype = dtype;
        const Floats want = Train(job).parameters;
        EXPECT_EQ(TrainInTwoParts(job, job), want);
        // A checkpoint of a run without delay has no older parameters to resume
        // with.
        EXPECT_NE(TrainInTwoParts(job, job, /*has_stale=*/false), want);
        // Without delay it resumes from the newest ones.
        Job plain = job;
        plain.options.delayed_updates = false;
        EXPECT_EQ(TrainInTwoParts(job, plain),
                  TrainInTwoParts(job, plain, /*has_stale=*/false));
      }
    }
  }
}

TEST(DelayedUpdateTest, PlainStepsMayFollow) {
  for (const Offload& offload : kOffloads) {
    SCOPED_TRACE(NameOf(offload));
    Job job = Delayed(SomeJob(), offload);
    // In the last three steps no update is delayed.
    job.delayed_until = 3;
    const Floats got = Train(job).parameters;
    Job plain = job;
    plain.options.delayed_updates = false;
    EXPECT_EQ(TrainInTwoParts(job, plain, /*has_stale=*/false), got);
  }
}

TEST(DelayedUpdateTest, TheHostKeepsASecondCopyOfGradientsAndParameters) {
  for (const int world : {1, 2}) {
    for (const Offload& offload : kOffloads) {
      SCOPED_TRACE(testing::Message() << NameOf(offload) << " world " << world);
      Job job = Delayed(SomeJob(), offload);
      job.world = world;
      job.options.param_dtype = DType::kBF16;
      const int64_t elems = PlanOf(job).trained_elems / world;
      const bool all = offload.parameters == Home::kHost;
      job.prepare = [&](const Rank&, Rig& rig) {
        const auto live = [&](MemoryCategory category) {
          return rig.host_ledger().live_bytes(category);
        };
        EXPECT_NEAR(live(MemoryCategory::kGradients), 2 * 4 * elems,
                    2 * Arena::kAlignment);
        EXPECT_NEAR(live(MemoryCategory::kParameters),
                    (all ? 2 : 1) * 2 * elems, 2 * Arena::kAlignment);
      };
      Train(job);
    }
  }
}

// The actions that action i waits for, directly or by stream order, in this
// step and (negative) in the previous one.
std::set<int> Before(const std::vector<Action>& actions, int i) {
  const int size = static_cast<int>(actions.size());
  const auto at = [&](int j) { return actions[j < 0 ? j + size : j]; };
  std::set<int> before, open = {i};
  while (!open.empty()) {
    const int j = *open.begin();
    open.erase(open.begin());
    if (j < -size || !before.insert(j).second) continue;
    for (const int wait : at(j).waits) open.insert(j < 0 ? wait - size : wait);
    for (int k = j - 1; k >= -size; --k) {
      if (at(k).stream != at(j).stream) continue;
      open.insert(k);
      break;
    }
  }
  before.erase(i);
  return before;
}

TEST(DelayedUpdateTest, NoComputationBeforeTheNormWaitsForTheHostsUpdate) {
  for (const Offload& offload : kOffloads) {
    SCOPED_TRACE(NameOf(offload));
    const Job job = Delayed(SomeJob(), offload);
    const Plan plan = PlanOf(job);
    const std::vector<Action> actions =
        MakeSchedule(plan, {.delayed_update = true});
    const int size = static_cast<int>(actions.size());
    for (int i = 0; i < size; ++i) {
      const bool computes = actions[i].kind == ActionKind::kForward ||
                            actions[i].kind == ActionKind::kForwardBackward ||
                            actions[i].kind == ActionKind::kBackward;
      const std::set<int> before = Before(actions, i);
      bool waits = false, waits_for_upload = false;
      for (const int j : before) {
        const Action& other = actions[j < 0 ? j + size : j];
        waits |= j < 0 && other.kind == ActionKind::kUpdate;
        waits_for_upload |= j < 0 && other.kind == ActionKind::kUpload;
      }
      if (computes) {
        EXPECT_FALSE(waits) << ActionName(actions[i], plan);
        EXPECT_TRUE(waits_for_upload) << ActionName(actions[i], plan);
      }
      if (actions[i].kind == ActionKind::kUpload ||
          actions[i].kind == ActionKind::kNorm) {
        EXPECT_TRUE(waits) << ActionName(actions[i], plan);
      }
    }
  }
}

}  // namespace
}  // namespace zero
