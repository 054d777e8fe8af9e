// One rank's running engine: device, model, memory and executor, ready to
// train, evaluate or generate.
//
// Memory is sized before it is taken: the run's calls are made on the meta
// device first, and the memory they needed is reserved.
#ifndef ZERO_ENGINE_TRAIN_SESSION_H_
#define ZERO_ENGINE_TRAIN_SESSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/local_ranks.h"
#include "engine/config/config.h"
#include "engine/data/tokenizer.h"
#include "engine/nn/module.h"
#include "engine/tensor/ledger.h"
#include "engine/train/product_rate.h"
#include "engine/train/utilization.h"
#include "engine/zero/executor.h"
#include "engine/zero/state_snapshot.h"
#include "kernels/device.h"

namespace zero {

// Provided by models/ (above the engine), or replaced by a test.
struct ModelTools {
  std::function<std::unique_ptr<Model>(const ModelConfig&)> make;
  // Hugging Face's config.json of a model saved in `dtype`; the tokens around a
  // text are < 0 if unknown.
  std::function<std::string(const ModelConfig&, DType, int64_t begin_of_text,
                            int64_t end_of_text)>
      hf_config_json;
  // Training FLOPs per token at a sequence length.
  std::function<TokenFlops(const ModelConfig&, int64_t, Recompute)>
      flops_per_token;
  // Measures the rate that counts as 100 % of utilization, if the device's peak
  // is unknown.
  std::function<ProductRate(Device&, DType, absl::Span<char> memory)>
      product_rate = MeasureProductRate;
};

// The work of a session; memory is reserved for the largest part of it.
struct Workload {
  bool train = false;
  bool evaluate = false;
  int64_t generate_tokens = 0;      // longest text, prompt included; 0: none
  bool snapshot = false;            // checkpoints are written during training
  bool segment_per_tensor = false;  // of PlanOptions, for a benchmark
};

// The workload of a training run, from its config alone.
Workload TrainingWorkload(const Config& config);

class Session {
 public:
  // `rank` must outlive the session. Weights are those of
  // config.model.from_pretrained, or initial values from training.seed. All
  // ranks make the same calls, here and below.
  // Errors: ResourceExhausted, before anything is taken, where predicted() does
  //         not fit, on a GPU with 128 MiB besides for kernels that load in
  //         the first step; those of OpenPortable.
  static absl::StatusOr<std::unique_ptr<Session>> Make(
      const Rank& rank, const Config& config, const ModelTools& tools,
      const Workload& workload);

  const Config& config() const { return config_; }
  const Rank& rank() const { return *rank_; }
  Model& model() const { return *model_; }
  Executor& executor() const { return *executor_; }
  const MemoryLedger& ledger() const { return ledger_; }
  // Permanent host memory: states, and the snapshot if the device has its own
  // memory.
  int64_t host_bytes() const { return host_ledger_.total_peak_bytes(); }
  // The part of host_bytes() that is model states.
  int64_t offloaded_bytes() const {
    return host_bytes() - host_ledger_.peak_bytes(MemoryCategory::kSnapshot);
  }
  // The snapshot; null if the workload has none.
  StateSnapshot* snapshot() const { return snapshot_.get(); }

  // Measures `fixed` again: libraries load more of themselves on first use.
  // Only for a rank that has its GPU to itself.
  void MeasureFixed();

  // Bytes per category at the peak of the run, from the meta device.
  const MemoryLedger& predicted() const { return predicted_; }
  // The predicted peak of any other rank, with its host memory if that is the
  // device's: ranks are alike, except a server (rank 0) and its workers.
  int64_t other_rank_peak() const { return other_rank_peak_; }

  // Rank 0 writes a Hugging Face folder, with the tokenizer (null: there is
  // none), and returns the notes of PortableWriter. If it cannot, the other
  // ranks return Unavailable and all can continue.
  absl::StatusOr<std::vector<std::string>> Save(const std::string& dir,
                                                const ModelTools& tools,
                                                const Tokenizer* tokenizer);

 private:
  Session(const Rank& rank, const Config& config)
      : config_(config), rank_(&rank) {}

  Config config_;
  const Rank* rank_;
  MemoryLedger ledger_, host_ledger_, predicted_;
  int64_t other_rank_peak_ = 0;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<StateSnapshot> snapshot_;
};

// The files of such a folder besides the weights. The generation_config.json of
// a model that training starts from is kept; else there is one with the tokens
// around a text.
std::map<std::string, std::string> ModelFolderFiles(const ModelConfig& model,
                                                    DType dtype,
                                                    const ModelTools& tools,
                                                    const Tokenizer* tokenizer);

// The calls of a run, made on the meta device.
struct Rehearsal {
  // An action ("Forward(block.3)"), and the memory in use at the highest total
  // since the previous action.
  struct Moment {
    std::string action;
    ActionKind kind;
    MemoryLedger::ByCategory bytes;
  };

  Plan plan;
  MemoryLedger ledger;
  MemoryLedger host_ledger;  // of the host's memory
  TransientBytes transient;
  // The permanent part of the ledger: no block's bytes.
  int64_t fixed = 0, fragmentation = 0;
  int64_t writers = 0;  // of fixed: windows through which files are written
  StepWire wire;        // of a step, with training
  HostTraffic host_traffic;             // likewise
  int64_t disk_bytes = 0;               // of the rank's file of states; 0: none
  SwappedStates::Traffic disk_traffic;  // likewise of a step
  std::string peak_action;              // at the peak; empty: before any
  // All actions, in order: those of a step, and of the run's evaluation and
  // sample.
  std::vector<Moment> timeline;

  bool one_memory = false;  // the host's memory is the device's

  int64_t host_bytes() const { return host_ledger.total_peak_bytes(); }
  // Peak device memory, with the host's if that is the same.
  int64_t needed_bytes() const {
    return ledger.total_peak_bytes() + (one_memory ? host_bytes() : 0);
  }
};

// Rehearses such a run on `rank`, whose communicators may move nothing: the
// first part of Session::Make, before it takes anything.
// Errors: InvalidArgument: more rows than kernels can number.
absl::StatusOr<Rehearsal> RehearseRun(const Rank& rank, const Config& config,
                                      const ModelTools& tools,
                                      const Workload& workload);

// The config's model, with the tensors of model.freeze frozen.
// Errors: those of FreezeParameters.
absl::StatusOr<std::unique_ptr<Model>> MakeRunModel(const Config& config,
                                                    const ModelTools& tools,
                                                    bool train);

// How `world` ranks are connected by a config.
LocalRanksOptions MakeRanksOptions(const Config& config, int world);

// The plan of a run: what `world` ranks own of the config's model and move in a
// step. `sizes` are those of the ops on their devices.
Plan MakeRunPlan(const Config& config, const Model& model, int world,
                 BulkAlgorithm algorithm, const OpSizes& sizes,
                 bool segment_per_tensor = false);

// The executor's options for a config.
ExecutorOptions MakeExecutorOptions(const Config& config, bool train,
                                    int64_t max_positions);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_SESSION_H_
