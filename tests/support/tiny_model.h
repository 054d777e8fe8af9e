// Small models, batches and executors that several tests train.
#ifndef ZERO_TESTS_SUPPORT_TINY_MODEL_H_
#define ZERO_TESTS_SUPPORT_TINY_MODEL_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/config/model_config.h"
#include "engine/nn/module.h"
#include "engine/tensor/ledger.h"
#include "engine/zero/executor.h"
#include "kernels/device.h"

namespace zero {

// Two layers of width 32 with awkward sizes: vocabulary 61, tables and norms
// that are not multiples of 64 elements, grouped heads, and for Qwen3 heads
// wider than the model.
ModelConfig TinyConfig(ModelFamily family);

// A unit that is a function.
class ToyUnit : public Unit {
 public:
  explicit ToyUnit(std::string name) : Unit(std::move(name)) {}
  using Unit::AddParameter;
  using Unit::Borrow;
  Var Forward(Context& ctx, const Var& in) override { return forward(ctx, in); }

  std::function<Var(Context&, const Var&)> forward;
};

// A model put together by a test.
class ToyModel : public Model {
 public:
  explicit ToyModel(int64_t vocab_size) : vocab_size_(vocab_size) {}
  ToyUnit* Add(const std::string& name) { return AddUnit<ToyUnit>(name); }

  void Prepare(Arena&, Stream&, int64_t) override {}
  void DropTables() override {}
  int64_t TableBytes(int64_t) const override { return 0; }
  int64_t vocab_size() const override { return vocab_size_; }
  std::vector<PortableTensor> PortableTensors() const override { return {}; }
  KvCache MakeKvCache(Context&, int64_t, int64_t, DType) const override {
    return {};
  }

 private:
  int64_t vocab_size_;
};

// Random sequences, a function of the seed; the target is the next token.
struct TokenBatch {
  TokenBatch(int64_t batch, int64_t length, int64_t vocab, uint64_t seed);

  // Sequences [begin, begin + count) as a micro-batch.
  HostBatch Rows(int64_t begin, int64_t count) const;
  HostBatch All() const { return Rows(0, batch); }
  // All rows in micro-batches of `size`.
  std::vector<HostBatch> Split(int64_t size) const;
  int64_t NumValid() const;
  // Cuts the rows into sequences, one of which begins at every token below
  // `below` and at every row's start.
  void CutAtTokensBelow(int32_t below);

  int64_t batch, length;
  std::vector<int32_t> tokens, targets, positions;
  std::vector<int64_t> sample_ids;

 private:
  bool cut_ = false;
  // Of micro-batches made by Rows; a list, whose elements stay in place.
  mutable std::list<std::vector<int32_t>> offsets_;
};

// An executor's options, and those of the plan that it is given.
struct RigOptions : ExecutorOptions {
  RigOptions(const ExecutorOptions& options = {}) : ExecutorOptions(options) {}
  PlanOptions plan;

  // For such ranks.
  PlanOptions plan_options(int world, int shards,
                           BulkAlgorithm algorithm) const;
};

// All parameters' fp32 values by name. All ranks call it.
using ValuesByName = std::map<std::string, std::vector<float>>;
absl::StatusOr<ValuesByName> ReadParameters(Executor& executor);

// A model with its memory and its executor, initialized from `seed`.
class Rig {
 public:
  Rig(Device& device, std::unique_ptr<Model> model, const RigOptions& options,
      int64_t activation_bytes = 8 << 20, uint64_t seed = 1);
  // As one rank of several; `rank` must outlive the rig.
  Rig(const Rank& rank, std::unique_ptr<Model> model, const RigOptions& options,
      const TransientBytes& transient, uint64_t seed = 1);
  Rig(Device& device, const ModelConfig& config, const RigOptions& options,
      int64_t activation_bytes = 8 << 20, uint64_t seed = 1);

  // One optimizer step over `batch` in micro-batches of `micro_size` (0: one).
  StepOutput Step(const TokenBatch& batch, float lr, int64_t micro_size = 0,
                  float loss_scale = 1);

  // The executor's, which must succeed.
  double EvalLossSum(const HostBatch& batch, float* losses = nullptr);
  void LastLogits(const HostBatch& batch, KvCache* cache, float* logits);

  Executor& operator*() { return *executor_; }
  Executor* operator->() { return executor_.get(); }
  Model& model() { return *model_; }
  MemoryLedger& ledger() { return ledger_; }
  MemoryLedger& host_ledger() { return host_ledger_; }
  // Aborts the test if there is none.
  Parameter& parameter(const std::string& name);

  void Load(const std::function<std::vector<float>(const Parameter&)>& values);
  // All ranks call it.
  std::vector<float> Read(const Parameter& parameter);
  // The fp32 gradient of a parameter that is whole on this rank: within a step
  // the current one, else that of the last Step or KeepGradients.
  std::vector<float> Gradient(const Parameter& parameter);
  // Between Begin and Finish, on the CPU.
  void KeepGradients();
  // Every parameter, one after the other.
  std::vector<float> ReadAll() { return TryReadAll().value(); }
  absl::StatusOr<std::vector<float>> TryReadAll();

 private:
  Rig(std::unique_ptr<Rank> lone, std::unique_ptr<Model> model,
      const RigOptions& options, int64_t activation_bytes, uint64_t seed);

  std::unique_ptr<Rank> lone_;  // if the rig was given a device
  MemoryLedger ledger_, host_ledger_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Executor> executor_;
  std::map<std::string, std::vector<float>> gradients_;  // KeepGradients
  int64_t optimizer_step_ = 1;
  uint64_t dropout_key_ = 1;
};

// max |a - b| / max |b|.
double RelativeDifference(const std::vector<float>& a,
                          const std::vector<float>& b);

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_TINY_MODEL_H_
