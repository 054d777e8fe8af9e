// The typed configuration of one run: the JSON file, the `--set` overrides, the
// preset and the defaults combined.
//
// The names are the JSON keys: config.optimizer.lr is
// "optimizer": {"params": {"lr": ...}}. Rules, schedules and scales are the
// values of optim/ themselves. In-class values are the defaults, given only
// here: the key table (keys.cc) reads them. load.h makes a Config from a file;
// print.h shows one.
// 0 or "" in a field marked "unset" means that the key was not given. A key
// that a run does not read (KeySpec::unread) has its default here.
//
// To add a key: a field here, a line in keys.cc, and, if it depends on other
// keys, a check in resolve.cc. Parser, printer, schema and reference follow.
#ifndef ZERO_ENGINE_CONFIG_CONFIG_H_
#define ZERO_ENGINE_CONFIG_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/recompute.h"
#include "engine/config/model_config.h"
#include "engine/data/token_format.h"
#include "kernels/dtype.h"
#include "kernels/options.h"
#include "optim/loss_scaler.h"
#include "optim/lr_scaling.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"

namespace zero {

enum class WeightDecayOn { kMatrices, kAll };

// "optimizer": {"type", "params": {...}}.
struct OptimizerConfig {
  // The type and its parameters; those of other types are unused and cannot be
  // given. weight_decay_on says which tensors decay.
  OptimizerSpec spec;
  double lr = 1e-3;  // base_lr of lr_scaling; the schedulers' peak
  // Matrices: tensors of two or more dimensions (embeddings included).
  WeightDecayOn weight_decay_on = WeightDecayOn::kMatrices;

  bool operator==(const OptimizerConfig&) const = default;
};

// "lr_scaling": Goyal et al. 2017. lr = base_lr * global_batch / base_batch,
// reached from base_lr by a linear warm-up.
struct LrScalingConfig {
  LrScaleRule rule = LrScaleRule::kNone;
  int64_t base_batch_size = 0;  // unset only with kNone
  int64_t warmup_steps = 0;
  double warmup_epochs = 0;  // instead of warmup_steps

  bool active() const { return rule != LrScaleRule::kNone; }
  bool operator==(const LrScalingConfig&) const = default;
};

// "fp16": DeepSpeed's keys.
struct Fp16Config {
  bool enabled = false;
  LossScalerOptions scaler;  // static_scale is "loss_scale"

  bool operator==(const Fp16Config&) const = default;
};

// Whether vocabulary tables are in parts (engine/zero/plan.h).
enum class VocabularyParts {
  kAuto,  // if it saves enough memory, or hides communication for little
  kOn,    // if there are several ranks
  kOff,
};

// Where states off the device are kept.
enum class OffloadDevice { kNone, kCpu, kNvme };

// What the host keeps and updates: nothing, the optimizer's states, or also the
// parameters.
enum class Offload { kNone, kOptimizer, kAll };
inline constexpr const char* kOffloadNames[] = {"-", "optimizer", "all"};
inline constexpr Offload kOffloads[] = {Offload::kNone, Offload::kOptimizer,
                                        Offload::kAll};
// The lowest ZeRO stage that allows `offload`.
inline int64_t FirstStageOf(Offload offload) {
  return offload == Offload::kNone ? 0 : offload == Offload::kOptimizer ? 1 : 3;
}

struct ZeroConfig {
  // Changes memory and speed. Sizes in elements; 25 MB of fp32.
  int64_t stage = 0;
  OffloadDevice offload_optimizer = OffloadDevice::kNone;  // ".device"
  OffloadDevice offload_param = OffloadDevice::kNone;      // ".device"
  // The folder for device nvme, the same for both. Unset if neither is nvme.
  std::string optimizer_nvme_path, param_nvme_path;
  double offload_optimizer_ratio = 1;  // ".ratio"
  int64_t reduce_bucket_size = 6'553'600;
  int64_t allgather_bucket_size = 6'553'600;
  bool overlap_comm = true;
  // Limits for sharded parameters (engine/zero/schedule.h). -1: one unit is
  // prefetched, and two units are in place.
  int64_t stage3_prefetch_bucket_size = -1;
  int64_t stage3_max_live_parameters = -1;
  int64_t stage3_max_reuse_distance = -1;
  int64_t stage3_param_persistence_threshold = 0;
  int64_t stage3_model_persistence_threshold = 1'000'000'000'000;
  VocabularyParts vocabulary_parts = VocabularyParts::kAuto;
  bool ignore_unused_parameters = true;
  // Changes the order of sums as well.
  int64_t mics_shard_size = -1;  // -1: off
  // Changes results: ".delayed_update" of offload_optimizer.
  bool delayed_update = false;  // ".enabled"
  int64_t delayed_update_warmup_steps = 40;
  // Changes what becomes of a step with a gradient that is not finite.
  bool update_before_norm = false;  // of offload_optimizer

  Offload offload() const {
    return offload_param != OffloadDevice::kNone       ? Offload::kAll
           : offload_optimizer != OffloadDevice::kNone ? Offload::kOptimizer
                                                       : Offload::kNone;
  }
  // Offloads exactly these states. What is newly offloaded goes to the host.
  void set_offload(Offload offload) {
    const auto set = [&](Offload from, OffloadDevice* device) {
      if (offload < from) {
        *device = OffloadDevice::kNone;
      } else if (*device == OffloadDevice::kNone) {
        *device = OffloadDevice::kCpu;
      }
    };
    set(Offload::kOptimizer, &offload_optimizer);
    set(Offload::kAll, &offload_param);
    // The host updates all the parameters that it keeps.
    if (offload == Offload::kAll) offload_optimizer_ratio = 1;
  }
  bool uses_nvme() const {
    return offload_optimizer == OffloadDevice::kNvme ||
           offload_param == OffloadDevice::kNvme;
  }
  // Whether states that the host updates may be on a disk.
  bool may_use_disk() const { return !delayed_update && !update_before_norm; }
  const std::string& nvme_path() const {
    return offload_optimizer == OffloadDevice::kNvme ? optimizer_nvme_path
                                                     : param_nvme_path;
  }
  // Whether the update of step `index` (from 0) runs during the next step.
  bool DelaysUpdateOf(int64_t index) const {
    return delayed_update && index >= delayed_update_warmup_steps;
  }
  // How many of `world` ranks share the states; a single rank keeps its own.
  int64_t shards(int64_t world) const {
    return mics_shard_size > 0 && world > 1 ? mics_shard_size : world;
  }

  bool operator==(const ZeroConfig&) const = default;
};

// "aio": how states on a disk are read and written.
struct AioConfig {
  // Changes speed.
  int64_t block_size = int64_t{1} << 20;  // bytes of a request
  int64_t queue_depth = 8;                // requests in flight, for each of
  int64_t thread_count = 1;
  bool single_submit = false;
  bool overlap_events = true;
  // Changes error detection.
  bool checksums = true;

  bool operator==(const AioConfig&) const = default;
};

// Bits are equal only between runs with the same algorithm.
enum class CommunicationAlgorithm {
  kDirect,           // every rank reads all the others
  kRing,             // every rank reads its neighbour
  kParameterServer,  // rank 0 gathers, updates and broadcasts
  kHierarchical,     // gradients are summed within each host first
};

// What connects the ranks.
enum class CommunicationBackend {
  kAuto,   // kNccl for several GPUs, kMpi for processes on the CPU, else kLocal
  kLocal,  // threads of one process, through its memory
  kMpi,    // ranks on the CPU, threads of several processes
  kNccl,   // GPUs, in threads or processes
};

struct CommunicationConfig {
  // Changes the order of sums.
  CommunicationAlgorithm algorithm = CommunicationAlgorithm::kDirect;
  // Read only by kHierarchical; 0: the launcher's number.
  int64_t ranks_per_host = 0;
  CommunicationBackend backend = CommunicationBackend::kAuto;
  // Changes when a run fails.
  double timeout_seconds = 300;
  // Changes what is printed (engine/train/stragglers.h); 0: never named.
  double straggler_factor = 1.5;

  bool operator==(const CommunicationConfig&) const = default;
};

// "device": how a GPU computes.
struct DeviceConfig {
  CudaOptions cuda;

  bool operator==(const DeviceConfig&) const = default;
};

struct DataConfig {
  // Files and globs as found: relative to the current directory, else to the
  // config file. Globs are checked to match, and expanded by the data room
  // (sorted by name).
  std::vector<std::string> train;
  std::vector<std::string> validation;  // empty: see validation_fraction
  double validation_fraction = 0;       // the last part of train
  TokenFormat format = TokenFormat::kAuto;
  // "bytes", "none" (token files), or the path of a SentencePiece model.
  std::string tokenizer = "bytes";
  int64_t sequence_length = 1024;
  // Documents within a sequence do not see each other (engine/data/loader.h).
  bool reset_attention_mask = false;
  int64_t eos_token_id = -1;  // between documents; unset: the tokenizer's

  bool operator==(const DataConfig&) const = default;
};

struct SampleConfig {
  std::string prompt;
  int64_t tokens = 200;      // 0: no samples
  double temperature = 0.8;  // 0: greedy
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // 1: off
  int64_t seed = 0;          // resolved: training.seed unless given

  bool operator==(const SampleConfig&) const = default;
};

struct TrainingConfig {
  // Changes results. Exactly one of steps and epochs is set.
  int64_t steps = 0;
  double epochs = 0;
  int64_t seed = 1234;
  int64_t max_consecutive_skips = 50;  // non-finite steps in a row, then stop
  // Changes what is printed and written.
  std::string out_dir;       // resolved: out/NAME of the config file
  int64_t eval_every = 0;    // steps; 0: at the end only, if there is data
  int64_t eval_batches = 0;  // micro-batches per evaluation; 0: all
  int64_t sample_every = 0;  // steps; 0: at the end only
  SampleConfig sample;
  bool save_final = true;                  // write out_dir/final/
  int64_t max_shard_size = 5'000'000'000;  // bytes of a file of weights there
  bool tensorboard = false;                // write out_dir/tensorboard/
  // Checkpoints, in out_dir/checkpoints/.
  int64_t save_every = 0;         // steps; 0: not by steps
  double save_every_minutes = 0;  // 0: not by time
  bool async_save = true;         // during training, from a copy of the states
  bool save_interrupted = true;   // one when a signal or max_minutes ends a run
  int64_t keep_last = 2;          // checkpoints; 0: all
  int64_t keep_every = 0;         // and those at multiples of it; 0: none
  double max_minutes = 0;         // ends the run as a signal does; 0: never
  std::string resume;             // "auto", "latest", a folder; empty: no
  bool resume_changed = false;    // even with another config or other data

  bool saves() const { return save_every > 0 || save_every_minutes > 0; }

  bool operator==(const TrainingConfig&) const = default;
};

// "elasticity": DeepSpeed's keys, version 0.1 (elastic_batch.h).
struct ElasticityConfig {
  bool enabled = false;
  int64_t max_train_batch_size = 0;         // unset only if not enabled
  std::vector<int64_t> micro_batch_sizes;   // likewise
  int64_t min_gpus = 1, max_gpus = 10'000;  // ranks
  bool prefer_larger_batch = true;
  bool ignore_non_elastic_batch_info = false;

  bool operator==(const ElasticityConfig&) const = default;
};

struct Config {
  // Changes results.
  // train_batch_size = train_micro_batch_size_per_gpu *
  //                    gradient_accumulation_steps * world, always.
  int64_t train_batch_size = 0;                // sequences per step
  int64_t train_micro_batch_size_per_gpu = 0;  // sequences per rank and pass
  int64_t gradient_accumulation_steps = 0;
  ElasticityConfig elasticity;   // if enabled, chooses all three
  double gradient_clipping = 0;  // largest gradient norm; 0: no clipping
  std::string model_preset;      // "model.preset"; unset: ""
  ModelConfig model;             // complete: preset and explicit keys together
  OptimizerConfig optimizer;
  // "scheduler": {"type", "params"}. Resolved: lr and the peaks are the
  // optimizer's unless given; total_num_steps and decay_num_steps are 0 if only
  // the data determines the length of the run (training.epochs). With
  // lr_scaling it has no warm-up and applies to the scaled rate.
  LrSchedule scheduler;
  LrScalingConfig lr_scaling;
  bool bf16 = false;  // "bf16.enabled"
  Fp16Config fp16;
  DType grad_accum_dtype = DType::kF32;         // "data_types"
  DType communication_data_type = DType::kF32;  // gradients on the wire
  bool stochastic_rounding = false;  // of masters to parameters; "data_types"
  DataConfig data;
  TrainingConfig training;

  // The following fields change speed and memory. None changes a result, except
  // that GELU kept on a GPU may round differently.
  bool split_master_weights = true;                    // of bf16; "data_types"
  bool activation_checkpointing = false;               // ".enabled"
  Recompute recompute_granularity = Recompute::kFull;  // then
  bool keep_all_activations = false;                   // else; ".keep_all"
  ZeroConfig zero_optimization;
  AioConfig aio;
  CommunicationConfig communication;
  DeviceConfig device;  // results too, as CudaOptions says

  // Changes what is printed.
  int64_t steps_per_print = 10;
  bool wall_clock_breakdown = false;  // time of each phase, per printed step
  bool memory_breakdown = false;      // live bytes per category, likewise
  bool dump_state = false;            // print the resolved config at start

  // The storage dtype of parameters and activations.
  DType param_dtype() const {
    return bf16 ? DType::kBF16 : fp16.enabled ? DType::kF16 : DType::kF32;
  }

  // The recompute level that the three keys of activation_checkpointing choose.
  Recompute recompute() const {
    return activation_checkpointing ? recompute_granularity
           : keep_all_activations   ? Recompute::kKeepAll
                                    : Recompute::kOff;
  }
  void set_recompute(Recompute level) {
    activation_checkpointing = level > Recompute::kOff;
    if (activation_checkpointing) recompute_granularity = level;
    keep_all_activations = level == Recompute::kKeepAll;
  }

  bool operator==(const Config&) const = default;
};

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_CONFIG_H_
