// Communication, copies, files and the host's work overlap with computation:
// tested not by the clock, but by holding each back until the last computation
// that the schedule puts before the wait for its result is done. If the
// executor waited any earlier, the two would deadlock.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"

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
         action.kind == ActionKind::kLookUp ||
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

ModelConfig UntiedLlama() {
  ModelConfig config = TiedLlama();
  config.tie_word_embeddings = false;
  return config;
}

TEST(OverlapTest, AllButTheFirstGatherAndTheLastReductionRunUnderCompute) {
  for (const ModelConfig& config :
       {TinyConfig(ModelFamily::kGpt2), TiedLlama(), UntiedLlama()}) {
    for (int stage : {0, 1, 2, 3}) {
      for (int64_t micro_steps : {1, 2}) {
        SCOPED_TRACE(testing::Message()
                     << ModelFamilyName(config.family) << ", tied "
                     << config.tie_word_embeddings << ", stage " << stage
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
            const bool tied = config.tie_word_embeddings;
            if (stage == 3) {
              want.push_back(tied ? "Gather(embedding.table)"
                                  : "LookUp(embedding.table)");
            }
            want.push_back(absl::StrCat("Reduce(bucket ",
                                        plan.reduce_buckets.size() - 1,
                                        ": rows of embedding.table)"));
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
            want.push_back(absl::StrCat(
                "GatherUpdated(bucket ", plan.gather_buckets.size() - 1, ": ",
                plan.units[plan.forward_order.back()].name, ")"));
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

// On streams that copy, compute on the host, or use files.
bool IsOffload(StreamRole role) { return role >= StreamRole::kUp; }

// When the actions of a rank ran: computations by the clock's hook, collectives
// by marks on their streams, offload as a trace has it.
class Recording {
 public:
  struct Span {
    Time begin, end;
  };

  Recording(const std::vector<Action>& list, int steps)
      : spans_(steps * list.size()) {
    for (size_t k = 0; k < spans_.size(); ++k) {
      const StreamRole role = list[k % list.size()].stream;
      if (IsOffload(role)) offloads_[role].push_back(k);
    }
  }

  // To be called in the hooks of a clock.
  void Hook(const Action& action, bool done) {
    if (!done) current_ = next_++;
    if (IsOffload(action.stream)) return;
    if (!done) Begin(current_);
    if (done && !moved_.contains(current_)) End(current_);
  }
  void AddTime(const Action& action, Time begin, Time end) {
    if (!IsOffload(action.stream)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t n = num_offloads_[action.stream]++;
    ASSERT_LT(n, offloads_[action.stream].size());
    spans_[offloads_[action.stream][n]] = {begin, end};
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
  // The action that is launched next.
  int64_t next() const { return static_cast<int64_t>(next_); }
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
  std::map<StreamRole, std::vector<size_t>> offloads_;  // actions in order
  std::map<StreamRole, size_t> num_offloads_;           // done
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

// The actions that action k of repeated steps waits for: by its list, and the
// one before it on its stream.
std::vector<int64_t> Predecessors(const std::vector<Action>& list, int64_t k) {
  const auto size = static_cast<int64_t>(list.size());
  const Action& action = list[k % size];
  std::vector<int64_t> before;
  for (const int wait : action.waits) before.push_back(k / size * size + wait);
  for (int64_t i = k - 1; i >= 0 && i > k - size; --i) {
    if (list[i % size].stream != action.stream) continue;
    before.push_back(i);
    break;
  }
  std::erase_if(before, [](int64_t i) { return i < 0; });  // before the run
  return before;
}

// Replays steps of a list on a fake clock with the measured durations: an
// action begins when its dependencies and its predecessor on its stream have
// ended. The executor must have begun it after both; holding collectives back
// shows that it waits for nothing else. Actions overlap on that clock only if
// the list lets them.
void ExpectReplayed(const Plan& plan, const std::vector<Action>& list,
                    const std::vector<Recording::Span>& measured,
                    bool overlap) {
  const size_t size = list.size();
  const Time start = measured[0].begin;
  std::vector<Time> ends;
  Time last_end = start, one_by_one = start;
  for (size_t k = 0; k < measured.size(); ++k) {
    const Action& action = list[k % size];
    Time begin = start;
    for (const int64_t i : Predecessors(list, static_cast<int64_t>(k))) {
      begin = std::max(begin, ends[i]);
      EXPECT_LE(measured[i].end, measured[k].begin)
          << ActionName(list[i % size], plan) << " before "
          << ActionName(action, plan);
    }
    EXPECT_LE(measured[k].begin, measured[k].end) << ActionName(action, plan);
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

// Called on a rank's thread before and after it launches action k of a run.
using LaunchFn = std::function<void(int rank, int64_t k, bool done)>;

// Trains, and returns the times of all ranks.
std::vector<std::unique_ptr<Recording>> Record(
    Job job, const std::vector<Action>& list, const LaunchFn& launch = nullptr,
    const MakeDeviceFn& make_device = OneThread) {
  std::vector<std::unique_ptr<Recording>> recordings;
  for (int rank = 0; rank < job.world; ++rank) {
    recordings.push_back(std::make_unique<Recording>(list, job.steps));
  }
  job.wrap = [&](int rank, const std::string& channel,
                 auto end) -> std::unique_ptr<Communicator> {
    if (channel != "gather" && channel != "reduce") return end;
    return std::make_unique<Recorded>(std::move(end), recordings[rank].get());
  };
  job.prepare = [&](const Rank& rank, Rig& rig) {
    Recording* const recording = recordings[rank.rank()].get();
    rig->clock().set_hook([&launch, recording, rank = rank.rank()](
                              const Action& action, bool done) {
      if (done) recording->Hook(action, done);
      if (launch) launch(rank, recording->next() - done, done);
      if (!done) recording->Hook(action, done);
    });
    rig->clock().set_time_hook(
        [recording](const Action& action, bool, Time begin, Time end) {
          recording->AddTime(action, begin, end);
        });
  };
  Train(job, make_device);
  return recordings;
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
      for (const auto& recording : Record(job, list)) {
        ExpectReplayed(plan, list, recording->spans(), overlap);
      }
    }
  }
}

// Two parties, each of which can wait until the other has come.
class Meeting {
 public:
  enum Party { kOffload, kComputation };

  void Come(Party party) {
    std::lock_guard<std::mutex> lock(mutex_);
    come_[party] = true;
    changed_.notify_all();
  }
  // False: that did not happen, and never will.
  bool Await(Party party) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30),
                             [&] { return come_[party]; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool come_[2] = {};
};

// The CPU whose offload streams call `launched` after everything that the
// rank's thread launches on one: the function that it returns, if any, is next
// on that stream.
class FollowedDevice final : public Device {
 public:
  using LaunchedFn = std::function<std::function<void()>()>;

  explicit FollowedDevice(LaunchedFn launched)
      : inner_(MakeCpuDevice(1)), launched_(std::move(launched)) {}

  DeviceKind kind() const override { return inner_->kind(); }
  DeviceInfo info() const override { return inner_->info(); }
  DeviceMemory memory() const override { return inner_->memory(); }
  int64_t stream_bytes(StreamRole role) const override {
    return inner_->stream_bytes(role);
  }
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return inner_->Allocate(bytes, kind);
  }
  std::unique_ptr<Stream> MakeStream(StreamRole role) override {
    std::unique_ptr<Stream> stream = inner_->MakeStream(role);
    if (!IsOffload(role)) return stream;
    return std::make_unique<Followed>(*this, std::move(stream));
  }
  std::unique_ptr<Event> MakeEvent() override { return inner_->MakeEvent(); }
  Ops& ops() override { return inner_->ops(); }
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override {
    inner_->Copy(stream, dst, src, bytes);
  }

 private:
  class Followed final : public Stream {
   public:
    Followed(FollowedDevice& device, std::unique_ptr<Stream> inner)
        : device_(device), inner_(std::move(inner)) {}
    void Enqueue(std::function<void()> work) override {
      inner_->Enqueue(std::move(work));
      if (auto next = device_.launched_()) inner_->Enqueue(std::move(next));
    }
    void Record(Event& event) override { inner_->Record(event); }
    void Wait(Event& event) override { inner_->Wait(event); }
    void Synchronize() override { inner_->Synchronize(); }
    Device& device() override { return device_; }

   private:
    FollowedDevice& device_;
    std::unique_ptr<Stream> inner_;
  };

  void Free(void*, size_t, MemoryKind) override {}  // buffers are inner_'s

  std::unique_ptr<Device> inner_;
  LaunchedFn launched_;
};

// For every action of the second step that offloads: the last computation of
// three steps that may run before it ends; only actions that have one.
std::map<int64_t, int64_t> OffloadUnder(const std::vector<Action>& list) {
  const auto size = static_cast<int64_t>(list.size());
  std::map<int64_t, int64_t> under;
  for (int64_t k = size; k < 2 * size; ++k) {
    if (!IsOffload(list[k % size].stream)) continue;
    std::set<int64_t> after = {k};  // what waits for it
    for (int64_t i = k + 1; i < 3 * size; ++i) {
      const std::vector<int64_t> before = Predecessors(list, i);
      if (std::any_of(before.begin(), before.end(),
                      [&](int64_t b) { return after.contains(b); })) {
        after.insert(i);
      } else if (list[i % size].stream == StreamRole::kCompute &&
                 Computes(list[i % size])) {
        under[k] = i;
      }
    }
  }
  return under;
}

// Trains three steps in which an action that offloads begins before the
// computation `under` it and ends after it; a run in which one of them waited
// for the other would not end. Returns the times of all ranks.
std::vector<std::unique_ptr<Recording>> RecordUnder(
    const Job& job, const std::vector<Action>& list, int64_t action,
    int64_t under) {
  std::vector<Meeting> meetings(job.world);
  std::vector<char> launches(job.world);  // not bits: ranks are threads
  const auto open = [&](int rank) -> absl::StatusOr<std::unique_ptr<Device>> {
    return std::make_unique<FollowedDevice>([&, rank] {
      std::function<void()> hold;
      if (launches[rank]) {
        hold = [meeting = &meetings[rank]] {
          meeting->Come(Meeting::kOffload);
          EXPECT_TRUE(meeting->Await(Meeting::kComputation));
        };
      }
      return hold;
    });
  };
  return Record(
      job, list,
      [&](int rank, int64_t k, bool done) {
        Meeting& meeting = meetings[rank];
        if (k == action) launches[rank] = !done;
        if (k != under) return;
        if (done) return meeting.Come(Meeting::kComputation);
        EXPECT_TRUE(meeting.Await(Meeting::kOffload));
      },
      open);
}

// One action of each kind is held under computation.
TEST(OverlapTest, CopiesFilesAndTheHostsWorkRunUnderComputation) {
  const TempDir folder;
  struct Case {
    StateHomes homes;
    std::set<std::string> kinds;  // that run under computation
  };
  const Case cases[] = {
      {{.optimizer = Home::kHost},
       {"Offload", "AddOffloaded", "SumSquares", "Update", "Upload"}},
      {{.parameters = Home::kHost, .optimizer = Home::kHost},
       {"Fetch", "Offload", "AddOffloaded", "SumSquares", "Update"}},
      {{.parameters = Home::kNvme, .optimizer = Home::kNvme},
       {"ReadParameters", "Fetch", "Offload", "AddOffloaded", "SumSquares",
        "ReadStates", "Update", "WriteStates"}}};
  for (const Case& c : cases) {
    Job job;
    job.config.num_hidden_layers = 4;
    job.micro_steps = 2;
    job.steps = 3;
    job.options = AtStage(job.options, 3);
    job.options.plan.homes = c.homes;
    job.options.plan.reduce_bucket_elems = 1;
    job.options.swap.path = folder.path();
    const Plan plan = PlanOf(job);
    const std::vector<Action> list = ScheduleOf(job, plan);
    std::set<std::string> kinds;
    for (const auto& [k, under] : OffloadUnder(list)) {
      const std::string name = ActionName(list[k % list.size()], plan);
      if (!kinds.insert(name.substr(0, name.find('('))).second) continue;
      SCOPED_TRACE(testing::Message()
                   << name << " under "
                   << ActionName(list[under % list.size()], plan));
      for (const auto& recording : RecordUnder(job, list, k, under)) {
        const auto& spans = recording->spans();
        EXPECT_LT(spans[k].begin, spans[under].begin);
        EXPECT_GT(spans[k].end, spans[under].end);
        ExpectReplayed(plan, list, spans, /*overlap=*/true);
      }
      if (HasFailure()) return;  // each would take its timeout
    }
    EXPECT_EQ(kinds, c.kinds);
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
