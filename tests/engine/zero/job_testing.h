// A small training job on ranks as threads, and its results: shared by the
// tests of stages, groups and algorithms.
#ifndef ZERO_TESTS_ENGINE_ZERO_JOB_TESTING_H_
#define ZERO_TESTS_ENGINE_ZERO_JOB_TESTING_H_

#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/support/tiny_model.h"

namespace zero {

using Floats = std::vector<float>;

inline constexpr int64_t kLength = 9;
inline constexpr int64_t kVocab = 61;
inline constexpr int64_t kUnlimited = int64_t{1} << 46;

// For tests that number their settings by bits: all of 16, or 0, 5, 10 and 15
// under tsan, which takes minutes for all and is about threads.
#if defined(__SANITIZE_THREAD__)
inline constexpr int kSettingsStep = 5;
#else
inline constexpr int kSettingsStep = 1;
#endif

// The results of the whole job.
struct Outcome {
  std::vector<double> losses, norms;
  Floats parameters;
  bool operator==(const Outcome&) const = default;
};

struct Job {
  ModelConfig config = TinyConfig(ModelFamily::kGpt2);
  RigOptions options =
      ExecutorOptions{.optimizer = {.weight_decay = 0.1, .beta2 = 0.95},
                      .max_grad_norm = 0.5,
                      .max_positions = 27};
  int world = 2;
  int shards = 0;  // ranks of a group; 0: one group
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  int64_t batch = 12;  // sequences of a step, over all ranks
  int64_t length = kLength;
  int64_t micro_steps = 1;
  int steps = 3;
  int first_step = 0;  // later for a resumed run
  // With options.delayed_updates, of steps [delayed_from, delayed_until).
  int delayed_from = 1, delayed_until = INT_MAX;
  float lr_factor = 1;  // of a step's rate to the previous step's
  float loss_scale = 1;
  bool ahead = false;   // steps begin before the previous one is finished
  bool packed = false;  // several sequences in a row
  bool rows = true;     // the table is exchanged by rows if they are few,
  bool lookups = true;  // and looked up by rows
  std::function<std::unique_ptr<Model>()> make;  // null: config's
  // Wraps the ranks' communicators.
  decltype(LocalRanksOptions::wrap) wrap;
  // Called on every rank before the first step, and after every step.
  std::function<void(const Rank&, Rig&)> prepare;
  std::function<void(Rig&)> between;

  std::unique_ptr<Model> Make() const {
    return make ? make() : MakeModel(config);
  }
};

// The whole first block and the embedding's table are frozen.
inline std::unique_ptr<Model> MakePartlyFrozen(const ModelConfig& config) {
  std::unique_ptr<Model> model = MakeModel(config);
  model->units()[0]->parameters()[0]->frozen = true;
  for (const auto& parameter : model->units()[1]->parameters()) {
    parameter->frozen = true;
  }
  return model;
}

inline RigOptions AtStage(RigOptions options, int stage) {
  options.plan.placement = PlacementOfStage(stage);
  return options;
}

inline absl::StatusOr<std::unique_ptr<Device>> OneThread(int) {
  return MakeCpuDevice(1);
}

inline LocalRanksOptions RanksOf(const Job& job) {
  return {.local = {.timeout = absl::Seconds(60), .algorithm = job.algorithm},
          .shards = job.shards,
          .wrap = job.wrap};
}

// A batch with ignored targets, more of them on some ranks than on others.
inline TokenBatch GlobalBatch(int64_t batch, int step, bool packed = false,
                              int64_t length = kLength,
                              int64_t vocab = kVocab) {
  TokenBatch tokens(batch, length, vocab, step + 1);
  if (packed) tokens.CutAtTokensBelow(vocab / 4);
  for (size_t i = 0; i < tokens.targets.size() / 3; i += 2) {
    tokens.targets[i] = -1;
  }
  return tokens;
}

// Memory predicted by a rehearsal on the meta device.
inline TransientBytes Rehearse(const Job& job, const Rank& rank, int64_t rows) {
  const std::unique_ptr<Device> meta = MakeMetaDevice(*rank.device);
  const Rank imagined = MakeRehearsalRank(*meta, rank);
  Rig rig(imagined, job.Make(), job.options, {kUnlimited});
  const TokenBatch batch = GlobalBatch(rows, 0, job.packed, job.length);
  rig.Step(batch, 0, rows / job.micro_steps);
  rig.EvalLossSum(batch.All());
  ZERO_CHECK(rig->states().Read(nullptr).ok());
  return rig->high_water();
}

// The bytes received are those expected: counted where they are copied or
// summed, compared with those computed from sizes.
inline void ExpectBytesAsAsked(const Rank& rank) {
  for (const auto* end : {&rank.gather, &rank.reduce, &rank.across}) {
    EXPECT_EQ((*end)->received_bytes(), (*end)->Total().received);
  }
}

// The job with its plan's knowledge of the batch.
inline Job Planned(Job job) {
  const int64_t tokens = job.batch / job.world * job.length;
  if (job.rows) job.options.plan.tokens = tokens;
  if (job.lookups) job.options.plan.micro_tokens = tokens / job.micro_steps;
  return job;
}

inline Plan PlanOf(const Job& of) {
  const Job job = Planned(of);
  return MakePlan(
      DescribeUnits(*job.Make()),
      job.options.plan_options(job.world, job.shards, job.algorithm));
}

inline absl::StatusOr<Outcome> RunRank(const Job& of, const Rank& rank) {
  const Job job = Planned(of);
  const int64_t rows = job.batch / job.world;
  ZERO_CHECK_EQ(rows * job.world, job.batch);
  ZERO_CHECK_EQ(rows % job.micro_steps, 0);
  Rig rig(rank, job.Make(), job.options, Rehearse(job, rank, rows));
  rig->transient().set_poison_freed(true);
  if (job.prepare) job.prepare(rank, rig);
  Outcome outcome;
  const auto finish = [&]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(const StepOutput output, rig->Finish());
    outcome.losses.push_back(output.loss);
    outcome.norms.push_back(output.grad_norm);
    if (job.between) job.between(rig);
    return absl::OkStatus();
  };
  for (int step = job.first_step; step < job.steps; ++step) {
    const TokenBatch batch = GlobalBatch(job.batch, step, job.packed,
                                         job.length, job.config.vocab_size);
    std::vector<HostBatch> parts;
    const int64_t size = rows / job.micro_steps;
    for (int64_t micro = 0; micro < job.micro_steps; ++micro) {
      parts.push_back(
          batch.Rows((micro * job.world + rank.rank()) * size, size));
    }
    ZERO_RETURN_IF_ERROR(
        rig->Begin({.micro_batches = parts,
                    .num_valid_targets = batch.NumValid(),
                    .lr = 1e-2f * std::pow(job.lr_factor, float(step)),
                    .loss_scale = job.loss_scale,
                    .optimizer_step = step + 1,
                    .dropout_key = static_cast<uint64_t>(step),
                    .rounding_key = 1000 + static_cast<uint64_t>(step),
                    .inherits_skip = job.ahead && step > 0,
                    .delayed_update = job.options.delayed_updates &&
                                      step >= job.delayed_from &&
                                      step < job.delayed_until}));
    if (job.between) rig.KeepGradients();
    if (job.ahead && step == 0) continue;
    ZERO_RETURN_IF_ERROR(finish());
  }
  if (job.ahead) ZERO_RETURN_IF_ERROR(finish());
  ZERO_ASSIGN_OR_RETURN(outcome.parameters, rig.TryReadAll());
  ExpectBytesAsAsked(rank);
  return outcome;
}

// RunLocalRanks, RunNcclRanks.
using RunJobFn =
    absl::Status (*)(int, const LocalRanksOptions&, const MakeDeviceFn&,
                     const std::function<absl::Status(const Rank&)>&);

// The result of all ranks, which must be equal.
inline Outcome Train(const Job& job,
                     const MakeDeviceFn& make_device = OneThread,
                     RunJobFn run = RunLocalRanks) {
  std::mutex mutex;
  std::vector<Outcome> outcomes;
  LocalRanksOptions options = RanksOf(job);
  options.num_devices = job.world;
  const absl::Status status = run(
      job.world, options, make_device, [&](const Rank& rank) -> absl::Status {
        ZERO_ASSIGN_OR_RETURN(Outcome outcome, RunRank(job, rank));
        std::lock_guard<std::mutex> lock(mutex);
        outcomes.push_back(std::move(outcome));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(outcomes.size(), static_cast<size_t>(job.world));
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  return outcomes.empty() ? Outcome() : outcomes[0];
}

// Every rank and stream waits a little before and after every collective, and
// every rank before and after every action; each by its own counter. Sets
// `job`'s wrap and prepare.
inline void AddDelays(Job* job) {
  class Delays {
   public:
    explicit Delays(uint32_t seed) : state_(seed) {}
    std::chrono::microseconds Next() {
      state_ = state_ * 1664525u + 1013904223u;
      return std::chrono::microseconds((state_ >> 24) / 2);
    }

   private:
    uint32_t state_;
  };
  class Delaying final : public CommunicatorWrapper {
   public:
    Delaying(std::unique_ptr<Communicator> inner, uint32_t seed)
        : CommunicatorWrapper(std::move(inner)), delays_(seed) {}
    void Run(Stream& stream, Collective collective) override {
      Sleep(stream);
      inner_->Run(stream, std::move(collective));
      Sleep(stream);
    }

   private:
    void Sleep(Stream& stream) {
      stream.Enqueue(
          [delay = delays_.Next()] { std::this_thread::sleep_for(delay); });
    }
    Delays delays_;
  };
  job->wrap = [](int rank, const std::string& channel, auto end) {
    return std::make_unique<Delaying>(std::move(end), 100 * rank + channel[0]);
  };
  job->prepare = [](const Rank& rank, Rig& rig) {
    rig->clock().set_hook(
        [delays = Delays(rank.rank())](const Action&, bool) mutable {
          std::this_thread::sleep_for(delays.Next());
        });
  };
}

// A step on a small batch, different on each rank.
inline absl::Status SmallStep(Rig& rig) {
  const TokenBatch batch(2, kLength, kVocab, 2);
  const HostBatch all = batch.All();
  return rig
      ->Step({.micro_batches = {&all, 1}, .num_valid_targets = 1, .lr = 1e-3f})
      .status();
}

// How a job ended, and the results of ranks that did not throw.
struct Failure {
  absl::Status status;
  std::vector<std::string> messages;
};

// Runs `body` on all ranks of `job`, each with its rig.
inline Failure RunToFailure(
    const Job& job, const LocalRanksOptions& options,
    const std::function<absl::Status(const Rank&, Rig&)>& body) {
  std::mutex mutex;
  Failure failure;
  failure.status = RunLocalRanks(
      job.world, options, OneThread, [&](const Rank& rank) -> absl::Status {
        Rig rig(rank, job.Make(), job.options, Rehearse(job, rank, 2));
        const absl::Status status = body(rank, rig);
        EXPECT_FALSE(status.ok()) << "rank " << rank.rank();
        std::lock_guard<std::mutex> lock(mutex);
        failure.messages.push_back(std::string(status.message()));
        return status;
      });
  return failure;
}

// A rank that leaves with an error between two steps: all end, and name it.
inline void ExpectALeaverIsNamedByAll(const Job& job, int leaver) {
  const Failure failure =
      RunToFailure(job, RanksOf(job), [&](const Rank& rank, Rig& rig) {
        absl::Status status;
        // The others may learn of it at the end of the first step already.
        for (int step = 0; step < 2 && status.ok(); ++step) {
          if (rank.rank() == leaver && step == 1) {
            return absl::DataLossError("disk on fire");
          }
          status = SmallStep(rig);
        }
        return status;
      });
  const std::string name = absl::StrCat("rank ", leaver);
  EXPECT_EQ(failure.status.code(), absl::StatusCode::kDataLoss)
      << failure.status;
  // The lowest rank's message.
  const char* const says = leaver == 0 ? ": " : " aborted the run: ";
  EXPECT_TRUE(absl::StrContains(failure.status.message(),
                                absl::StrCat(name, says, "disk on fire")))
      << failure.status;
  EXPECT_EQ(failure.messages.size(), static_cast<size_t>(job.world));
  int named = 0;
  for (const std::string& message : failure.messages) {
    EXPECT_TRUE(absl::StrContains(message, "disk on fire")) << message;
    named += absl::StrContains(message, name);
  }
  EXPECT_GE(named, job.world - 1);
}

// A rank that hangs where it should start reducing `bucket`: the error of all
// of them after a timeout of two seconds.
inline Failure WithAHangingRank(const Job& job, int hanging, int bucket) {
  LocalRanksOptions options = RanksOf(job);
  options.local.timeout = absl::Seconds(2);
  return RunToFailure(job, options, [&](const Rank& rank, Rig& rig) {
    rig->clock().set_hook([&](const Action& action, bool done) {
      if (rank.rank() != hanging || done ||
          action.kind != ActionKind::kReduce || action.index != bucket) {
        return;
      }
      while (rank.status().ok()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    return SmallStep(rig);
  });
}

// More table rows than a job's batch has tokens.
inline constexpr int64_t kManyWords = 131;

inline ModelConfig TiedLlama() {
  ModelConfig config = TinyConfig(ModelFamily::kLlama);
  config.vocab_size = kManyWords;
  config.tie_word_embeddings = true;
  return config;
}

// The bytes sent so far.
inline StepWire WireOf(const Rank& rank) {
  const CollectiveCount gathered = rank.gather->Total();
  const CollectiveCount reduced = rank.reduce->Total();
  const CollectiveCount across = rank.across->Total();
  return {.gathered = gathered.bytes,
          .reduced = reduced.bytes,
          .across = across.bytes,
          .received = gathered.received + reduced.received + across.received};
}

// Gradients become small integers, different on every rank, whose sums are
// exact in every order.
inline void MakeGradientsIntegers(const Rank& rank, Rig& rig) {
  rig->clock().set_hook(
      [&rig, rank = rank.rank()](const Action& action, bool done) {
        if (done || action.kind != ActionKind::kReduce) return;
        const Bucket& bucket = rig->plan().reduce_buckets[action.index];
        for (const SegmentRef& ref : bucket.segments) {
          for (const auto& planned : rig->plan().units[ref.unit].parameters) {
            const Parameter& parameter = rig.parameter(planned.spec.name);
            const Tensor& grad = parameter.weight.sink->grad;
            for (int64_t i = 0; i < parameter.shape.num_elems(); ++i) {
              grad.As<float>()[i] =
                  static_cast<float>((7 * rank + 3 * i) % 41) - 20;
            }
          }
        }
      });
}

// The memory of rank 0 after a step at `stage`.
inline MemoryLedger Measure(Job job, int stage) {
  job.options = AtStage(job.options, stage);
  MemoryLedger ledger;
  const absl::Status status = RunLocalRanks(
      job.world, RanksOf(job), OneThread,
      [&](const Rank& rank) -> absl::Status {
        const int64_t rows = job.batch / job.world;
        const TransientBytes reserved = Rehearse(job, rank, rows);
        Rig rig(rank, MakeModel(job.config), job.options, reserved);
        rig.Step(TokenBatch(rows, kLength, kVocab, 1), 1e-3f);
        // After a step no lent memory is left.
        EXPECT_EQ(rig->transient().live_bytes(), 0);
        EXPECT_EQ(rig->high_water().device, reserved.device);
        if (rank.rank() == 0) ledger = rig.ledger();
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return ledger;
}

}  // namespace zero

#endif  // ZERO_TESTS_ENGINE_ZERO_JOB_TESTING_H_
