#include "engine/train/session.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/optional.h"
#include "engine/base/direct_file.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/portable.h"
#include "engine/nn/freeze.h"
#include "engine/train/console.h"
#include "engine/train/evaluate.h"
#include "engine/train/fit_search.h"
#include "engine/train/memory_fit.h"
#include "kernels/check.h"
#include "kernels/options.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

int64_t MaxPositions(const Config& config, const Workload& workload) {
  const int64_t longest =
      std::max(config.data.sequence_length, workload.generate_tokens);
  return std::min(longest, config.model.max_position_embeddings);
}

ExecutorOptions OptionsOf(const Config& config, const Workload& workload) {
  return MakeExecutorOptions(config, workload.train,
                             MaxPositions(config, workload));
}

Home HomeOf(OffloadDevice device) {
  return device == OffloadDevice::kNone  ? Home::kDevice
         : device == OffloadDevice::kCpu ? Home::kHost
                                         : Home::kNvme;
}

// Row numbers are 32-bit in some kernels' libraries.
absl::Status CheckRows(const Config& config) {
  const int64_t tokens = config.train_micro_batch_size_per_gpu *
                         std::max<int64_t>(config.data.sequence_length, 1);
  if (config.train_micro_batch_size_per_gpu <= INT32_MAX &&
      tokens <= INT32_MAX) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "train_micro_batch_size_per_gpu %d x data.sequence_length %d is more "
      "than 2^31 tokens in one pass; lower one of them",
      config.train_micro_batch_size_per_gpu, config.data.sequence_length));
}

absl::Status CheckWidth(const Config& config, const Device& device) {
  if (device.kind() != DeviceKind::kCuda ||
      config.model.hidden_size <= kMaxGpuNormWidth) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "model.hidden_size %d: norms on a GPU take rows of up to %d; lower it, "
      "or use --device cpu",
      config.model.hidden_size, kMaxGpuNormWidth));
}

// Whether the head's table is worth computing in parts. With replicated
// parameters, a part's gradient is reduced while the next one's is computed.
// That pays if all logits of a micro-batch are kept, so that none is
// recomputed, and take at most a sixteenth of the model states. With sharded
// gradients, two parts replace the table and its gradient. That must save a
// quarter of the model states, or all of them if the head waits for the lookup:
// it then computes five products instead of three. A function of only shapes.
bool VocabularyPartsPay(const Config& config, const Plan& plan,
                        const OpSizes& sizes) {
  const PlannedUnit& last =
      plan.units[plan.units[plan.num_computing - 1].required_units.back()];
  const Shape& table = last.parameters[0].spec.shape;
  const int64_t rows = table[0], width = table[1];
  const DType dtype = config.param_dtype();
  const ExecutorOptions options =
      MakeExecutorOptions(config, /*train=*/true, /*max_positions=*/0);
  const int64_t tokens =
      config.train_micro_batch_size_per_gpu * config.data.sequence_length;
  const auto logits = static_cast<int64_t>(
      sizes.LossLogitsBytes({.x = {nullptr, dtype, tokens, width, width},
                             .w = {nullptr, dtype, rows, width, width}}));
  const bool keeps_logits =
      !last.head_waits && logits <= MaxKeptLogitsBytes(plan, options);
  const int64_t states = StateBytes(plan, options);
  const bool hides_reduction = keeps_logits && logits <= states / 16 &&
                               options.overlap && last.trained_elems > 0;
  if (!plan.shards_gradients()) return hides_reduction;
  if (!plan.shards_parameters() && hides_reduction) return true;
  int64_t bytes = DTypeBytes(config.grad_accum_dtype);  // of an element
  if (plan.shards_parameters()) bytes += DTypeBytes(dtype);
  int64_t saved =
      bytes * width * std::max<int64_t>(rows - 2 * last.part.rows, 0);
  if (keeps_logits) saved -= logits;
  return saved > (last.head_waits ? states : states / 4);
}

// Makes the calls of a run on the executor's device.
absl::Status Rehearse(Executor& executor, const Config& config,
                      const Workload& workload) {
  static const int32_t kToken = 0;
  const HostBatch batch{
      .batch = config.train_micro_batch_size_per_gpu,
      .length = config.data.sequence_length,
      .tokens = &kToken,
      .targets = &kToken,
      .positions = &kToken,
      .offsets = config.data.reset_attention_mask ? &kToken : nullptr,
      .num_sequences = config.train_micro_batch_size_per_gpu};
  if (workload.train) {
    // All micro-batches are rehearsed: if units stay in place between them, the
    // arenas may differ in each.
    const std::vector<HostBatch> micro_batches(
        config.gradient_accumulation_steps, batch);
    ZERO_RETURN_IF_ERROR(
        executor
            .Step({.micro_batches = micro_batches,
                   .delayed_update = config.zero_optimization.delayed_update})
            .status());
  }
  if (workload.evaluate) {
    ZERO_RETURN_IF_ERROR(executor.EvalLossSum(batch).status());
  }
  if (workload.generate_tokens > 0) {
    KvCache cache = executor.MakeKvCache(workload.generate_tokens);
    HostBatch text = batch;
    text.batch = 1;
    text.length = workload.generate_tokens;
    text.targets = nullptr;
    text.offsets = nullptr;
    ZERO_RETURN_IF_ERROR(executor.LastLogits(text, &cache, nullptr));
    cache.length = workload.generate_tokens - 1;
    text.length = 1;
    ZERO_RETURN_IF_ERROR(executor.LastLogits(text, &cache, nullptr));
  }
  const bool saves = workload.train && config.training.save_final;
  return saves ? executor.states().Read(nullptr) : absl::OkStatus();
}

// A rank's share, of `sharers` in the host's memory, of the windows through
// which a training run writes files: its part of a checkpoint and, by one rank,
// final/.
int64_t WriterBytes(const Config& config, Executor& executor,
                    const Model& model, int sharers) {
  const auto windows = [](int64_t file_bytes) {
    return std::min(2 * DirectWriter::kWindowBytes, file_bytes);
  };
  int64_t bytes = 0;
  if (config.training.save_final) {
    bytes = windows(model.NumParameters() * DTypeBytes(config.param_dtype())) /
            sharers;
  }
  if (config.training.saves()) {
    int64_t kept = 0;
    for (const auto& piece : executor.states().KeptPieces()) {
      kept += piece.range.elems * DTypeBytes(piece.dtype);
    }
    bytes = std::max(bytes, windows(kept));
  }
  return bytes;
}

// What MPI takes in a process once ranks exchange messages, and for each other
// process on the host. With Open MPI 4.1 two processes took 11 MiB each, four
// 14 to 15, eight 20.
constexpr int64_t kMpiBytes = int64_t{19} << 19;
constexpr int64_t kMpiPeerBytes = int64_t{3} << 19;

// What oneDNN takes in a process for products of one row: code and kernels.
// fp32 samples took 5 to 6 MiB in configs/llama_tiny.json, 2 to 3 in GPT-2
// 124M.
constexpr int64_t kSampleBytes = int64_t{5} << 20;

// This rank's share of the memory that the program, its libraries and the
// device's context take, and, if the host's memory is the device's, of MPI's
// and samples', its batch buffers and `writers`.
int64_t FixedBytes(const Rank& rank, const Workload& workload,
                   const TransientBytes& transient, int64_t writers) {
  const int sharers = ContextSharersOf(rank);
  const int64_t context = rank.device->memory().context_bytes / sharers;
  if (rank.device->kind() != DeviceKind::kCpu) return context;
  const bool has_mpi = sharers < rank.world();
  const int peers = SharersOf(rank) / sharers - 1;
  const int64_t mpi = has_mpi ? kMpiBytes + peers * kMpiPeerBytes : 0;
  const int64_t samples = workload.generate_tokens > 0 ? kSampleBytes : 0;
  return context + (mpi + samples) / sharers +
         BatchUpload::kNumBuffers * transient.upload + writers;
}

absl::StatusOr<std::unique_ptr<StateSnapshot>> MakeSnapshot(
    const Workload& workload, Executor& executor, Device& device,
    MemoryLedger* ledger) {
  if (!workload.snapshot) return nullptr;
  return StateSnapshot::Make(executor.states(), device, ledger);
}

void AddConstants(const Rehearsal& rehearsal, MemoryLedger* ledger) {
  ledger->AddConstant(MemoryCategory::kFixed, rehearsal.fixed);
  ledger->AddConstant(MemoryCategory::kFragmentation, rehearsal.fragmentation);
}

// The cheapest --set options under which the run fits, or why there are none.
// None: not searched, rank 0 searches, or the run fits as it is.
absl::optional<std::string> FitAdvice(const Rank& rank, const Config& config,
                                      const ModelTools& tools,
                                      const Workload& workload) {
  const bool has_stages = config.communication.algorithm !=
                          CommunicationAlgorithm::kParameterServer;
  if (rank.rank() > 0 || !workload.train || !has_stages) {
    return absl::nullopt;
  }
  const FitLimits limits = {TakeableBytes(rank), TakeableHostBytes(rank),
                            TakeableDiskBytes(rank, DiskFolderOf(config))};
  FitSearch search(rank, config, tools, AssumedSpeedOf(*rank.device));
  const absl::StatusOr<std::vector<FitProposal>> fits = search.Propose(limits);
  if (!fits.ok()) return absl::nullopt;
  if (fits->empty()) {
    const auto reason = search.NothingFits(limits);
    return reason.ok() ? absl::optional<std::string>(*reason) : absl::nullopt;
  }
  const FitProposal& fit = fits->front();
  std::string patch = fit.Patch(config);
  if (patch.empty()) return absl::nullopt;
  if (fit.on_disk && !config.zero_optimization.uses_nvme()) {
    absl::StrAppend(&patch,
                    "; for nvme_path name a folder on a fast local disk, where "
                    "each rank takes ",
                    HumanBytes(static_cast<double>(fit.disk_bytes)));
  }
  return absl::StrCat("with the same global batch this fits: ", patch);
}

}  // namespace

Workload TrainingWorkload(const Config& config) {
  const DataConfig& data = config.data;
  const bool samples =
      data.tokenizer != "none" && config.training.sample.tokens > 0;
  return {.train = true,
          .evaluate = !data.validation.empty() || data.validation_fraction > 0,
          .generate_tokens =
              samples ? std::min(data.sequence_length,
                                 config.model.max_position_embeddings)
                      : 0,
          .snapshot = config.training.saves() && config.training.async_save &&
                      !config.zero_optimization.uses_nvme()};
}

absl::StatusOr<std::unique_ptr<Model>> MakeRunModel(const Config& config,
                                                    const ModelTools& tools,
                                                    bool train) {
  std::unique_ptr<Model> model = tools.make(config.model);
  if (train) {
    ZERO_RETURN_IF_ERROR(FreezeParameters(config.model.freeze, *model));
  }
  return model;
}

LocalRanksOptions MakeRanksOptions(const Config& config, int world) {
  LocalRanksOptions options;
  options.local.timeout = absl::Seconds(config.communication.timeout_seconds);
  if (config.communication.algorithm == CommunicationAlgorithm::kRing) {
    options.local.algorithm = BulkAlgorithm::kRing;
  } else if (config.communication.algorithm ==
             CommunicationAlgorithm::kHierarchical) {
    options.local.algorithm = BulkAlgorithm::kHierarchical;
    options.local.ranks_per_host =
        static_cast<int>(config.communication.ranks_per_host);
  }
  options.shards = static_cast<int>(config.zero_optimization.shards(world));
  return options;
}

Plan MakeRunPlan(const Config& config, const Model& model, int world,
                 BulkAlgorithm algorithm, const OpSizes& sizes,
                 bool segment_per_tensor) {
  const ZeroConfig& zero = config.zero_optimization;
  const int64_t tokens = BatchShapeOf(config, world).TokensPerStep() / world;
  // Units that stay in place serve the lookups of several micro-steps.
  const bool units_stay =
      zero.stage3_max_live_parameters > 0 || zero.stage3_max_reuse_distance > 0;
  PlanOptions options{
      .world = world,
      .shards = zero.shards(world),
      .placement = PlacementOfStage(static_cast<int>(zero.stage)),
      .homes = {.parameters = HomeOf(zero.offload_param),
                .optimizer = HomeOf(zero.offload_optimizer)},
      .host_share = zero.offload_optimizer_ratio,
      .parameters = CodecOf(config.param_dtype(), algorithm),
      .gradients = CodecOf(config.communication_data_type, algorithm),
      .tokens = tokens,
      .micro_tokens =
          units_stay ? 0 : tokens / config.gradient_accumulation_steps,
      .vocabulary_parts = zero.vocabulary_parts != VocabularyParts::kOff,
      .segment_per_tensor = segment_per_tensor,
      .reduce_bucket_elems = zero.reduce_bucket_size,
      .gather_bucket_elems = zero.allgather_bucket_size};
  if (config.communication.algorithm ==
      CommunicationAlgorithm::kParameterServer) {
    options.placement = PlacementOfServer();
    options.owners = 1;
  }
  Plan plan = MakePlan(DescribeUnits(model), options);
  if (plan.in_parts() && zero.vocabulary_parts == VocabularyParts::kAuto &&
      !VocabularyPartsPay(config, plan, sizes)) {
    options.vocabulary_parts = false;
    plan = MakePlan(DescribeUnits(model), options);
  }
  return plan;
}

ExecutorOptions MakeExecutorOptions(const Config& config, bool train,
                                    int64_t max_positions) {
  ExecutorOptions options;
  options.param_dtype = config.param_dtype();
  options.grad_dtype = config.grad_accum_dtype;
  options.stochastic_rounding = config.stochastic_rounding;
  options.split_master = config.split_master_weights;
  options.optimizer = config.optimizer.spec;
  options.decay_all = config.optimizer.weight_decay_on == WeightDecayOn::kAll;
  options.max_grad_norm = static_cast<float>(config.gradient_clipping);
  options.recompute = config.recompute();
  const ZeroConfig& zero = config.zero_optimization;
  options.overlap = zero.overlap_comm;
  options.delayed_updates = train && zero.delayed_update;
  options.update_before_norm = train && zero.update_before_norm;
  options.gather = {
      .prefetch_elems = zero.stage3_prefetch_bucket_size,
      .max_live_elems = zero.stage3_max_live_parameters,
      .max_reuse_distance = zero.stage3_max_reuse_distance,
      .persistence_threshold = zero.stage3_param_persistence_threshold,
      .max_persistent_elems = zero.stage3_model_persistence_threshold};
  const AioConfig& aio = config.aio;
  options.swap = {.path = zero.nvme_path(),
                  .checksums = aio.checksums,
                  .block_bytes = aio.block_size,
                  .io = {.queue_depth = static_cast<int>(aio.queue_depth),
                         .threads = static_cast<int>(aio.thread_count),
                         .single_submit = aio.single_submit,
                         .overlap_events = aio.overlap_events}};
  options.max_positions = max_positions;
  options.train = train;
  return options;
}

absl::StatusOr<Rehearsal> RehearseRun(const Rank& rank, const Config& config,
                                      const ModelTools& tools,
                                      const Workload& workload) {
  ZERO_RETURN_IF_ERROR(CheckRows(config));
  ZERO_RETURN_IF_ERROR(CheckWidth(config, *rank.device));
  constexpr int64_t kUnlimited = int64_t{1} << 50;
  Rehearsal rehearsal;
  rehearsal.one_memory = rank.one_memory();
  const std::unique_ptr<Device> meta = MakeMetaDevice(*rank.device);
  const Rank imagined = MakeRehearsalRank(*meta, rank);
  ZERO_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                        MakeRunModel(config, tools, workload.train));
  rehearsal.plan =
      MakeRunPlan(config, *model, rank.world(), rank.reduce->algorithm(),
                  rank.device->ops(), workload.segment_per_tensor);
  const Plan& plan = rehearsal.plan;
  ZERO_ASSIGN_OR_RETURN(
      auto executor,
      Executor::Make(imagined, *model, plan, OptionsOf(config, workload),
                     {kUnlimited}, &rehearsal.ledger, &rehearsal.host_ledger));
  ZERO_ASSIGN_OR_RETURN(
      auto snapshot,
      MakeSnapshot(
          workload, *executor, *meta,
          rehearsal.one_memory ? &rehearsal.ledger : &rehearsal.host_ledger));
  int64_t peak = rehearsal.ledger.total_peak_bytes();
  executor->clock().set_hook([&](const Action& action, bool done) {
    if (!done) return;
    rehearsal.timeline.push_back({ActionName(action, plan), action.kind,
                                  rehearsal.ledger.TakeRecentPeak()});
    if (rehearsal.ledger.total_peak_bytes() == peak) return;
    peak = rehearsal.ledger.total_peak_bytes();
    rehearsal.peak_action = rehearsal.timeline.back().action;
  });
  ZERO_RETURN_IF_ERROR(Rehearse(*executor, config, workload));
  rehearsal.transient = executor->high_water();
  rehearsal.wire = CountWire(plan, executor->schedule(), rank.rank());
  rehearsal.host_traffic =
      CountHostTraffic(plan, executor->schedule(), rank.rank(),
                       config.param_dtype(), config.grad_accum_dtype);
  if (const SwappedStates* const swapped = executor->swapped()) {
    rehearsal.disk_bytes = swapped->disk_bytes();
    rehearsal.disk_traffic = swapped->CountTraffic(executor->schedule());
  }
  if (workload.train && rank.device->kind() == DeviceKind::kCpu) {
    rehearsal.writers =
        WriterBytes(config, *executor, *model, ContextSharersOf(rank));
  }
  rehearsal.fixed =
      FixedBytes(rank, workload, rehearsal.transient, rehearsal.writers);
  rehearsal.fragmentation =
      executor->used_bytes() -
      (rehearsal.ledger.total_peak_bytes() -
       rehearsal.ledger.live_bytes(MemoryCategory::kSnapshot) -
       rehearsal.ledger.live_bytes(MemoryCategory::kFixed));
  snapshot.reset();
  executor.reset();  // writes to the ledger
  AddConstants(rehearsal, &rehearsal.ledger);
  for (Rehearsal::Moment& moment : rehearsal.timeline) {
    moment.bytes[static_cast<int>(MemoryCategory::kFixed)] += rehearsal.fixed;
    moment.bytes[static_cast<int>(MemoryCategory::kFragmentation)] +=
        rehearsal.fragmentation;
  }
  return rehearsal;
}

absl::StatusOr<std::unique_ptr<Session>> Session::Make(
    const Rank& rank, const Config& config, const ModelTools& tools,
    const Workload& workload) {
  const LocalRanksOptions wanted = MakeRanksOptions(config, rank.world());
  const BulkAlgorithm algorithm = rank.reduce->algorithm();
  ZERO_CHECK(rank.shards() == wanted.shards &&
             (rank.world() == 1 || algorithm == wanted.local.algorithm ||
              (algorithm == BulkAlgorithm::kNative &&
               wanted.local.algorithm == BulkAlgorithm::kDirect)))
      << "the ranks are not connected as in the config: MakeRanksOptions";
  std::unique_ptr<Session> session(new Session(rank, config));
  ZERO_ASSIGN_OR_RETURN(const Rehearsal rehearsal,
                        RehearseRun(rank, config, tools, workload));
  session->predicted_ = rehearsal.ledger;
  session->other_rank_peak_ = rehearsal.needed_bytes();
  ZERO_ASSIGN_OR_RETURN(session->model_,
                        MakeRunModel(config, tools, workload.train));
  const Plan& plan = rehearsal.plan;
  if (!plan.owners.even()) {
    Rank other = MakeSoloRank(*rank.device, rank.rank() == 0 ? 1 : 0,
                              rank.world(), rank.shards(), algorithm);
    other.memory = rank.memory;
    ZERO_ASSIGN_OR_RETURN(const Rehearsal others,
                          RehearseRun(other, config, tools, workload));
    session->other_rank_peak_ = others.needed_bytes();
  }
  ZERO_RETURN_IF_ERROR(CheckFits(
      rehearsal, session->other_rank_peak_, config, workload.train, rank,
      [&] { return FitAdvice(rank, config, tools, workload); }));
  AddConstants(rehearsal, &session->ledger_);
  ZERO_ASSIGN_OR_RETURN(
      session->executor_,
      Executor::Make(rank, *session->model_, plan, OptionsOf(config, workload),
                     rehearsal.transient, &session->ledger_,
                     &session->host_ledger_));
  ZERO_ASSIGN_OR_RETURN(
      session->snapshot_,
      MakeSnapshot(
          workload, *session->executor_, *rank.device,
          rehearsal.one_memory ? &session->ledger_ : &session->host_ledger_));
  if (config.model.from_pretrained.empty()) {
    session->executor_->states().Initialize(config.training.seed);
  } else {
    ZERO_ASSIGN_OR_RETURN(
        const ReadParameterFn read,
        OpenPortable(config.model.from_pretrained, *session->model_));
    ZERO_RETURN_IF_ERROR(session->executor_->states().Load(read));
  }
  // All memory is taken, and the first copies are done: see Rank::agree.
  if (rank.agree) {
    ZERO_RETURN_IF_ERROR(rank.agree("ready for collectives", true).status());
  }
  return session;
}

void Session::MeasureFixed() {
  if (rank_->device->kind() != DeviceKind::kCuda) return;
  const DeviceMemory memory = rank_->device->memory();
  if (SharersOf(*rank_) > 1) return;
  const int64_t taken = memory.total_bytes - memory.free_bytes;
  const int64_t fixed = taken - executor_->reserved_bytes();
  ledger_.AddConstant(MemoryCategory::kFixed,
                      fixed - ledger_.live_bytes(MemoryCategory::kFixed));
}

std::map<std::string, std::string> ModelFolderFiles(
    const ModelConfig& model, DType dtype, const ModelTools& tools,
    const Tokenizer* tokenizer) {
  std::map<std::string, std::string> files;
  if (tokenizer != nullptr) files = tokenizer->Files();
  files["config.json"] =
      tokenizer == nullptr
          ? tools.hf_config_json(model, dtype, -1, -1)
          : tools.hf_config_json(model, dtype,
                                 tokenizer->DocumentStart().back(),
                                 tokenizer->eot_id());
  constexpr char kGeneration[] = "generation_config.json";
  auto generation = ReadFile(model.from_pretrained + "/" + kGeneration);
  if (!model.from_pretrained.empty() && generation.ok()) {
    files[kGeneration] = *std::move(generation);
    return files;
  }
  // The values come from config.json, as in transformers.
  const auto config = Json::parse(files["config.json"]);
  Json defaults = {{"_from_model_config", true}};
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    if (!config[key].is_null()) defaults[key] = config[key];
  }
  files[kGeneration] = defaults.dump(2) + "\n";
  return files;
}

absl::StatusOr<std::vector<std::string>> Session::Save(
    const std::string& dir, const ModelTools& tools,
    const Tokenizer* tokenizer) {
  const DType dtype = config_.param_dtype();
  absl::StatusOr<std::vector<std::string>> notes(std::vector<std::string>{});
  if (rank_->rank() > 0) {
    ZERO_RETURN_IF_ERROR(executor_->states().Read(nullptr));
  } else {
    const auto writer = PortableWriter::Create(FollowLink(dir), *model_, dtype,
                                               config_.training.max_shard_size);
    // If there is none, the others still wait for this rank.
    ZERO_RETURN_IF_ERROR(
        executor_->states().Read([&](const Parameter& parameter, int64_t begin,
                                     absl::Span<const float> values) {
          if (writer.ok()) (*writer)->Write(parameter, begin, values);
        }));
    if (!writer.ok()) {
      notes = writer.status();
    } else {
      notes = (*writer)->Commit(
          ModelFolderFiles(config_.model, dtype, tools, tokenizer));
    }
  }
  double failed = notes.ok() ? 0 : 1;
  ZERO_RETURN_IF_ERROR(
      executor_->numbers().AllReduce("saved", ReduceOp::kMax, {&failed, 1}));
  ZERO_RETURN_IF_ERROR(notes.status());
  if (failed > 0) return absl::UnavailableError("rank 0 cannot write");
  return notes;
}

}  // namespace zero
