// Communication overlaps with computation: tested not by the clock, but by
// holding every collective back until the last computation that the schedule
// puts before the wait for its result is done. If the executor waited any
// earlier, the two would deadlock.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"

namespace zero {
namespace {

bool Computes(const Action& action) {
  return action.kind == ActionKind::kForward ||
         action.kind == ActionKind::kForwardBackward ||
         action.kind == ActionKind::kBackward ||
         action.kind == ActionKind::kUpdate;
}

bool IsGather(const Action& action) {
  return action.kind == ActionKind::kGather ||
         action.kind == ActionKind::kGatherUpdated;
}

// For every collective of `steps` steps of a list, the last computation after
// it and before the first action that waits for it; -1: none.
std::map<size_t, int64_t> LastUnder(const std::vector<Action>& list,
                                    int steps) {
  const int64_t size = static_cast<int64_t>(list.size());
  std::map<size_t, int64_t> last;
  std::set<int64_t> open;  // collectives not yet waited for
  for (int64_t k = 0; k < steps * size; ++k) {
    const Action& action = list[k % size];
    for (int wait : action.waits) open.erase(k / size * size + wait);
    if (Computes(action)) {
      for (int64_t i : open) last[i] = k;
    }
    if (IsGather(action) || action.kind == ActionKind::kReduce) {
      open.insert(k);
      last[k] = -1;
    }
  }
  return last;
}

// The actions of one rank, counted as they are done.
class Progress {
 public:
  void Add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_done_;
    changed_.notify_all();
  }
  // False: that did not happen, and never will.
  bool Await(int64_t num_done) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30),
                             [&] { return num_done_ >= num_done; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_done_ = 0;
};

// Holds the n-th collective back until `until[n]` actions are done.
class Holding final : public CommunicatorWrapper {
 public:
  Holding(std::unique_ptr<Communicator> inner, Progress* progress,
          std::vector<int64_t> until)
      : CommunicatorWrapper(std::move(inner)),
        progress_(progress),
        until_(std::move(until)) {}

  void Run(Stream& stream, Collective collective) override {
    if (next_ < until_.size()) {
      stream.Enqueue([progress = progress_, until = until_[next_],
                      name = collective.name] {
        EXPECT_TRUE(progress->Await(until)) << name << " is not overlapped";
      });
      ++next_;
    }
    inner_->Run(stream, std::move(collective));
  }

 private:
  Progress* const progress_;
  const std::vector<int64_t> until_;
  size_t next_ = 0;
};

std::vector<Action> ScheduleOf(const Job& job, const Plan& plan) {
  return MakeSchedule(plan, job.options.schedule_options(job.micro_steps));
}

TEST(OverlapTest, AllButTheFirstGatherAndTheLastReductionRunUnderCompute) {
  for (const ModelConfig& config :
       {TinyConfig(ModelFamily::kGpt2), TiedLlama()}) {
    for (int stage : {0, 1, 2, 3}) {
      for (int64_t micro_steps : {1, 2}) {
        SCOPED_TRACE(testing::Message()
                     << ModelFamilyName(config.family) << ", stage " << stage
                     << ", " << micro_steps << " micro-steps");
        const bool rows = config.vocab_size == kManyWords;
        Job job;
        job.config = config;
        job.rows = rows;
        job.config.num_hidden_layers = 3;
        job.micro_steps = micro_steps;
        job.steps = 3;
        job.options = AtStage(job.options, stage);
        job.options.plan.reduce_bucket_elems = 1;
        job.options.plan.gather_bucket_elems = 1;
        const Plan plan = PlanOf(job);
        const std::vector<Action> step = ScheduleOf(job, plan);
        std::vector<Action> actions;
        for (int i = 0; i < job.steps; ++i) {
          actions.insert(actions.end(), step.begin(), step.end());
        }
        const auto last_under = LastUnder(step, job.steps);

        for (int i = 0; i < job.steps; ++i) {
          std::vector<std::string> alone;
          for (const auto& [at, last] : last_under) {
            if (at / step.size() == static_cast<size_t>(i) && last < 0) {
              alone.push_back(ActionName(actions[at], plan));
            }
          }
          std::vector<std::string> want;
          if (rows) {
            if (stage == 3) want.push_back("Gather(embedding.table)");
            want.push_back("Reduce(bucket 5: rows of embedding.table)");
          } else {
            if (stage == 3) {
              want.push_back("Gather(embedding)");
              want.push_back("Gather(embedding.wte)");
            }
            want.push_back("Reduce(bucket 4: embedding)");
            want.push_back("Reduce(bucket 5: embedding.wte)");
          }
          // After the last step nothing hides the gather of the last updates.
          if (i + 1 == job.steps && (stage == 1 || stage == 2)) {
            want.push_back(rows ? "GatherUpdated(bucket 4: head)"
                                : "GatherUpdated(bucket 5: head)");
          }
          EXPECT_EQ(alone, want) << "step " << i + 1;
        }

        const Outcome want = Train(job);
        std::vector<Progress> progress(job.world);
        job.wrap = [&](int rank, const std::string& channel,
                       auto end) -> std::unique_ptr<Communicator> {
          if (channel != "gather" && channel != "reduce") return end;
          std::vector<int64_t> until;
          for (const auto& [at, last] : last_under) {
            if (IsGather(actions[at]) != (channel == "gather")) continue;
            until.push_back(last + 1);
            // Stage 0 gathers the reduced gradients; rows follow their tokens.
            until.resize(until.size() + TransfersOf(actions[at], plan).size() -
                         1);
          }
          return std::make_unique<Holding>(std::move(end), &progress[rank],
                                           std::move(until));
        };
        job.prepare = [&](const Rank& rank, Rig& rig) {
          EXPECT_EQ(rig->plan().reduce_buckets, plan.reduce_buckets);
          rig->clock().set_hook(
              [at = &progress[rank.rank()]](const Action&, bool done) {
                if (done) at->Add();
              });
        };
        EXPECT_EQ(Train(job), want);
      }
    }
  }
}

// With a table of several buckets, and a position table: only its rows and the
// positions are left for the end.
TEST(OverlapTest, ASharedTableIsReducedUnderBackward) {
  for (int stage : {0, 1, 2, 3}) {
    Job job;
    job.config.vocab_size = 3 * Plan::kMaxSegmentElems / 32;
    job.config.tie_word_embeddings = true;
    job.options = AtStage(job.options, stage);
    job.options.plan.reduce_bucket_elems = 1;
    const Plan plan = PlanOf(job);
    ASSERT_EQ(plan.units.back().name, "embedding.wte");
    ASSERT_GT(plan.units.back().segments.size(), 2u);
    const std::vector<Action> actions = ScheduleOf(job, plan);
    int num_under = 0;
    std::vector<std::string> alone;
    int64_t alone_bytes = 0;
    for (const auto& [at, last] : LastUnder(actions, 1)) {
      const Action& action = actions[at];
      if (action.kind != ActionKind::kReduce) continue;
      const Bucket& bucket = plan.reduce_buckets[action.index];
      if (last >= 0) {
        num_under += bucket.unit == plan.num_computing;
        continue;
      }
      alone.push_back(ActionName(action, plan));
      for (const Transfer& transfer : TransfersOf(action, plan)) {
        alone_bytes += transfer.BytesOf(0).sent;
      }
    }
    EXPECT_GT(num_under, 1);
    const size_t last = plan.reduce_buckets.size() - 1;
    EXPECT_EQ(
        alone,
        (std::vector<std::string>{
            absl::StrCat("Reduce(bucket ", last - 1, ": embedding)"),
            absl::StrCat("Reduce(bucket ", last, ": rows of embedding.wte)")}))
        << "stage " << stage;
    EXPECT_LT(alone_bytes, CountWire(plan, actions).reduced / 100);
  }
}

TEST(OverlapTest, WithoutItNothingRunsUnderCompute) {
  for (int stage : {0, 2, 3}) {
    Job job;
    job.options = AtStage(job.options, stage);
    job.options.overlap = false;
    const Plan plan = PlanOf(job);
    const std::vector<Action> actions = ScheduleOf(job, plan);
    for (const auto& [at, last] : LastUnder(actions, 1)) {
      if (actions[at].kind == ActionKind::kGatherUpdated) continue;
      EXPECT_EQ(last, -1) << ActionName(actions[at], plan);
    }
  }
}

using Time = std::chrono::steady_clock::time_point;

// When the actions of a rank ran: computations by the clock's hook, collectives
// by marks on their streams.
class Recording {
 public:
  struct Span {
    Time begin, end;
  };

  explicit Recording(size_t size) : spans_(size) {}

  void Hook(bool done) {
    if (!done) {
      current_ = next_++;
      Begin(current_);
    }
    if (done && !moved_.contains(current_)) End(current_);
  }
  // Called while an action launches `collective`.
  void Run(Communicator& inner, Stream& stream, Collective collective) {
    const size_t action = current_;
    const bool first = moved_.insert(action).second;
    stream.Enqueue([this, action, first] {
      if (first) Begin(action);
    });
    inner.Run(stream, std::move(collective));
    stream.Enqueue([this, action] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + action % 3));
      End(action);
    });
  }
  const std::vector<Span>& spans() const { return spans_; }

 private:
  void Begin(size_t action) {
    std::lock_guard<std::mutex> lock(mutex_);
    spans_[action].begin = std::chrono::steady_clock::now();
  }
  void End(size_t action) {
    std::lock_guard<std::mutex> lock(mutex_);
    spans_[action].end = std::chrono::steady_clock::now();
  }

  std::mutex mutex_;
  std::vector<Span> spans_;
  // Used only by the rank's thread.
  size_t next_ = 0, current_ = 0;
  std::set<size_t> moved_;  // actions with collectives
};

class Recorded final : public CommunicatorWrapper {
 public:
  Recorded(std::unique_ptr<Communicator> inner, Recording* recording)
      : CommunicatorWrapper(std::move(inner)), recording_(recording) {}
  void Run(Stream& stream, Collective collective) override {
    recording_->Run(*inner_, stream, std::move(collective));
  }

 private:
  Recording* const recording_;
};

// Replays steps of a list on a fake clock with the measured durations: an
// action begins when its dependencies and its predecessor on its stream have
// ended. The executor must have begun it after both; holding collectives back
// shows that it waits for nothing else. Actions overlap on that clock only if
// the list lets them.
void ExpectReplayed(const Plan& plan, const std::vector<Action>& list,
                    const std::vector<Recording::Span>& measured,
                    bool overlap) {
  const auto size = static_cast<int64_t>(list.size());
  const Time start = measured[0].begin;
  std::vector<Time> ends;
  Time last_end = start, one_by_one = start;
  std::map<StreamRole, int64_t> last;
  for (int64_t k = 0; k < static_cast<int64_t>(measured.size()); ++k) {
    const Action& action = list[k % size];
    std::vector<int64_t> before;
    for (int wait : action.waits) before.push_back(k / size * size + wait);
    const auto [at, first] = last.emplace(action.stream, k);
    if (!first) before.push_back(std::exchange(at->second, k));
    Time begin = start;
    for (int64_t i : before) {
      if (i < 0) continue;  // of a step before the first
      begin = std::max(begin, ends[i]);
      EXPECT_LE(measured[i].end, measured[k].begin)
          << ActionName(list[i % size], plan) << " before "
          << ActionName(action, plan);
    }
    const auto duration = measured[k].end - measured[k].begin;
    ends.push_back(begin + duration);
    last_end = std::max(last_end, ends.back());
    one_by_one += duration;
  }
  if (overlap) {
    EXPECT_LT(last_end, one_by_one);
  } else {
    EXPECT_EQ(last_end, one_by_one);
  }
}

TEST(OverlapTest, TheListReplayedOnAFakeClockIsWhatWasMeasured) {
  for (int stage : {0, 1, 2, 3}) {
    for (bool overlap : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << ", overlap " << overlap);
      Job job;
      job.micro_steps = 2;
      job.steps = 2;
      job.options = AtStage(job.options, stage);
      job.options.overlap = overlap;
      job.options.plan.reduce_bucket_elems = 1;
      job.options.plan.gather_bucket_elems = 1;
      const Plan plan = PlanOf(job);
      const std::vector<Action> list = ScheduleOf(job, plan);
      std::vector<std::unique_ptr<Recording>> recordings;
      for (int rank = 0; rank < job.world; ++rank) {
        recordings.push_back(
            std::make_unique<Recording>(job.steps * list.size()));
      }
      job.wrap = [&](int rank, const std::string& channel,
                     auto end) -> std::unique_ptr<Communicator> {
        if (channel != "gather" && channel != "reduce") return end;
        return std::make_unique<Recorded>(std::move(end),
                                          recordings[rank].get());
      };
      job.prepare = [&](const Rank& rank, Rig& rig) {
        rig->clock().set_hook(
            [recording = recordings[rank.rank()].get()](
                const Action&, bool done) { recording->Hook(done); });
      };
      Train(job);
      for (const auto& recording : recordings) {
        ExpectReplayed(plan, list, recording->spans(), overlap);
      }
    }
  }
}

// The waits of the first `steps` steps, as reported by the wait hook; the
// hook's times are the counted ones.
std::vector<std::string> WaitsOf(Job job, int steps) {
  job.steps = steps;
  std::vector<std::string> waits;
  job.prepare = [&](const Rank& rank, Rig& rig) {
    auto counted = std::make_shared<WaitTimes>();
    rig->clock().set_wait_hook([&, counted, rank = rank.rank()](
                                   Channel channel, const std::string& name,
                                   auto from, auto to) {
      (*counted)[channel] +=
          std::chrono::duration<double, std::milli>(to - from).count();
      EXPECT_EQ(rig->clock().waited()[channel], (*counted)[channel]) << name;
      if (rank != 0) return;
      waits.push_back(absl::StrCat(ChannelName(channel), " ", name));
    });
  };
  job.between = [](Rig& rig) {
    double total = 0;
    for (const Channel channel : kWaits)
      total += rig->clock().waited()[channel];
    EXPECT_EQ(rig->clock().waited().total(), total);
  };
  const Outcome outcome = Train(job);
  EXPECT_EQ(outcome.losses.size(), static_cast<size_t>(steps));
  return waits;
}

TEST(OverlapTest, EveryWaitHasAChannelAndAName) {
  using Names = std::vector<std::string>;
  Job job;
  job.options.plan.reduce_bucket_elems = 1;
  job.options.plan.gather_bucket_elems = 1;
  // The rows of the table, after their tokens, are waited for before the norm.
  const Names step0 = {"reduce embedding.wte", "reduce embedding.wte",
                       "reduce head",          "reduce block.1",
                       "reduce block.0",       "reduce embedding",
                       "scalar norm and loss"};
  Names want = {"scalar schedule"};
  want.insert(want.end(), step0.begin(), step0.end());
  EXPECT_EQ(WaitsOf(job, 1), want);

  // After the step: the parameters that it updated.
  job.options = AtStage(job.options, 1);
  for (const char* unit :
       {"embedding.wte", "embedding", "block.0", "block.1", "head"}) {
    want.push_back(absl::StrCat("gather ", unit));
  }
  EXPECT_EQ(WaitsOf(job, 1), want);

  // Two groups of two wait for each bucket twice: within, and across.
  job.options = AtStage(job.options, 2);
  job.world = 4;
  job.shards = 2;
  const Names waits = WaitsOf(job, 1);
  for (const char* unit : {"embedding", "block.0", "block.1", "head"}) {
    const auto within =
        std::find(waits.begin(), waits.end(), absl::StrCat("reduce ", unit));
    ASSERT_NE(within, waits.end()) << unit;
    ASSERT_NE(within + 1, waits.end());
    EXPECT_EQ(*(within + 1), absl::StrCat("across ", unit));
  }
}

TEST(OverlapTest, OneRankWaitsForNobody) {
  Job job;
  job.world = 1;
  job.options = AtStage(job.options, 3);
  EXPECT_TRUE(WaitsOf(job, 2).empty());
}

}  // namespace
}  // namespace zero
