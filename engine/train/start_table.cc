#include "engine/train/start_table.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/config/keys.h"
#include "engine/config/run_length.h"
#include "engine/nn/freeze.h"
#include "engine/train/console.h"
#include "engine/train/generator.h"
#include "engine/train/rank_notes.h"

namespace zero {
namespace {

using Row = std::pair<std::string, std::string>;

// The name of an enum's value in the config.
std::string Name(const Config& config, const char* path) {
  return std::get<std::string>(FindKey(path)->get(config));
}

std::string BatchText(const Config& config, int world) {
  return absl::StrFormat(
      "%s = %d micro-batch x %d accumulation x %s; %s tokens",
      Counted(config.train_batch_size, "sequence"),
      config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps,
      Counted(world, "rank"),
      WithCommas(config.train_batch_size * config.data.sequence_length));
}

// "WarmupCosineLR: log warm-up from 0 over 100 steps, then cosine to 3e-07 at
// step 1000".
std::string ScheduleText(const Config& config, int64_t total_steps) {
  LrSchedule s = config.scheduler;
  FillSchedule(total_steps, &s);
  const std::string type = Name(config, "scheduler.type");
  const bool cosine = s.kind == LrScheduleKind::kWarmupCosineLr;
  if (s.kind == LrScheduleKind::kConstant) return type;
  if (s.kind == LrScheduleKind::kOneCycle) {
    return absl::StrFormat("%s: from %g to %g in %s, back in %d", type,
                           s.cycle_min_lr, s.cycle_max_lr,
                           Counted(s.cycle_first_step_size, "step"),
                           s.cycle_second_step_size);
  }
  std::string text = absl::StrCat(type, ": ");
  // lr_scaling has a warm-up of its own.
  if (!config.lr_scaling.active() && s.warmup_num_steps > 1) {
    absl::StrAppendFormat(
        &text, "%s warm-up from %g over %d steps",
        s.warmup_type == LrWarmupType::kLog ? "log" : "linear",
        cosine ? s.warmup_min_ratio * s.lr : s.warmup_min_lr,
        s.warmup_num_steps);
    if (s.warmup_num_steps > total_steps) {
      return absl::StrFormat("%s, of which this run has %d", text, total_steps);
    }
    text += ", then ";
  }
  switch (s.kind) {
    case LrScheduleKind::kWarmupDecayLr:
      return absl::StrFormat("%slinear to %g at step %d", text, s.warmup_min_lr,
                             s.total_num_steps);
    case LrScheduleKind::kWarmupCosineLr:
      return absl::StrFormat("%scosine to %g at step %d", text,
                             s.cos_min_ratio * s.lr, s.total_num_steps);
    case LrScheduleKind::kWsd:
      return absl::StrFormat("%sconstant, %s to %g in the last %d of %s", text,
                             Name(config, "scheduler.params.decay_type"),
                             s.min_lr_ratio * s.warmup_max_lr,
                             s.decay_num_steps,
                             Counted(s.total_num_steps, "step"));
    default:
      return text + "constant";
  }
}

// "8e-04 = 1e-04 x 64 / 8 (linear), from 1e-04 over 100 steps; then Constant"
std::string LrText(const Config& config, const LrScaling& scaling,
                   int64_t total_steps) {
  const std::string scheduler = ScheduleText(config, total_steps);
  const double base = config.optimizer.lr;
  if (!config.lr_scaling.active()) {
    const LrSchedule& s = config.scheduler;
    const bool by_peak =
        FindKey("scheduler.params.warmup_max_lr")->Applies(config);
    return absl::StrFormat("%g, %s", by_peak ? s.warmup_max_lr : base,
                           scheduler);
  }
  const bool is_sqrt = scaling.rule == LrScaleRule::kSqrt;
  return absl::StrFormat(
      "%g = %g x %s%d / %d%s, linear warm-up from %g over %s, then %s",
      base * scaling.Factor(), base, is_sqrt ? "sqrt(" : "",
      scaling.global_batch_size, scaling.base_batch_size, is_sqrt ? ")" : "",
      base, Counted(scaling.warmup_steps, "step"), scheduler);
}

std::string ComputeText(const TokenFlops& flops, bool frozen) {
  return absl::StrFormat(
      "%s FLOP per token, forward and backward%s", HumanCount(flops.model),
      frozen ? "; of a frozen weight 4 instead of 6, 2 before the first "
               "block that is trained"
             : "");
}

// "AMD EPYC, avx512, 2 threads", "NVIDIA H200, sm_90, 132 SMs".
std::string DeviceText(const Device& device) {
  const DeviceInfo info = device.info();
  std::string text = absl::StrCat(
      info.name, ", ", info.isa, ", ",
      Counted(info.num_threads,
              device.kind() == DeviceKind::kCuda ? "SM" : "thread"));
  if (!info.driver.empty()) absl::StrAppend(&text, ", ", info.driver);
  return text;
}

// "optimizer, gradients sharded in each of 2 groups of 2"
std::string PlacementText(const Plan& plan) {
  if (!plan.owners.even()) return "rank 0 has the optimizer";
  const StatePlacement& placement = plan.placement;
  std::vector<std::string> sharded;
  const auto add = [&](Placement where, const char* state) {
    if (where == Placement::kSharded) sharded.push_back(state);
  };
  add(placement.optimizer, "optimizer");
  add(placement.gradients, "gradients");
  add(placement.parameters, "parameters");
  if (sharded.empty()) return "every rank has everything";
  std::string text = absl::StrJoin(sharded, ", ") + " sharded";
  if (plan.replicate.size > 1) {
    absl::StrAppend(&text, " in each of ", plan.replicate.size, " groups of ",
                    plan.shard.size);
  }
  return text;
}

// "201 GFLOP/s, the best fp32 product of 1024 x 1024 x 1024, measured just
// now with 2 threads"
std::string PeakText(const DeviceInfo& device, DType dtype,
                     const PeakRate& peak) {
  if (peak.flops <= 0) return "nothing, for lack of memory";
  const ProductRate& measured = peak.product;
  const std::string product = absl::StrFormat(
      "%.0f GFLOP/s, the best %s product of %d x %d x %d, measured %s",
      measured.flops / 1e9, DTypeName(dtype), measured.size, measured.size,
      measured.size, measured.earlier ? "in an earlier run" : "just now");
  if (peak.flops == measured.flops) {
    return device.driver.empty()
               ? absl::StrCat(product, " with ",
                              Counted(device.num_threads, "thread"))
               : product;
  }
  return absl::StrFormat("%.0f GFLOP/s, the vendor's dense peak; measured: %s",
                         peak.flops / 1e9, product);
}

std::string ModelText(const Session& session) {
  const Config& config = session.config();
  const ModelConfig& model = config.model;
  return absl::StrFormat(
      "%s%s, %s parameters, %s, width %d, %s (%d kv), "
      "vocabulary %d",
      ModelFamilyName(model.family),
      config.model_preset.empty() ? "" : " (" + config.model_preset + ")",
      WithCommas(session.model().NumParameters()),
      Counted(model.num_hidden_layers, "layer"), model.hidden_size,
      Counted(model.num_attention_heads, "head"), model.num_key_value_heads,
      model.vocab_size);
}

// "1,234 of 5,678 parameters, in 3 tensors"
std::string FrozenText(const Model& model) {
  int64_t tensors = 0;
  for (const Parameter* parameter : model.AllParameters()) {
    tensors += parameter->frozen ? 1 : 0;
  }
  std::string text = absl::StrFormat(
      "%s of %s parameters, in %d tensor%s", WithCommas(NumFrozen(model)),
      WithCommas(model.NumParameters()), tensors, tensors == 1 ? "" : "s");
  for (const auto& unit : model.units()) {
    for (const Parameter* tied : unit->borrowed()) {
      if (!tied->frozen) continue;
      absl::StrAppend(&text, "; ", tied->name, " is the ", unit->name(),
                      "'s too");
    }
  }
  return text;
}

std::string PrecisionText(const Config& config, int world) {
  return absl::StrFormat(
      "%s parameters and activations, %s gradients%s%s",
      DTypeName(config.param_dtype()), DTypeName(config.grad_accum_dtype),
      world > 1 && config.communication_data_type != config.grad_accum_dtype
          ? absl::StrCat(" sent as ", DTypeName(config.communication_data_type))
          : "",
      config.param_dtype() == DType::kF32 ? ""
      : config.stochastic_rounding
          ? ", fp32 master weights rounded stochastically"
          : ", fp32 master weights");
}

std::string RanksText(const Session& session) {
  const Config& config = session.config();
  return absl::StrFormat(
      "%d %s, ZeRO stage %d: %s%s", session.rank().world(), session.rank().kind,
      config.zero_optimization.stage, PlacementText(session.executor().plan()),
      config.communication.algorithm == CommunicationAlgorithm::kDirect
          ? ""
          : "; by " + Name(config, "communication.algorithm"));
}

// "120 samples of 4,567 tokens, 2,345 of them targets; packed,
// apart, into 20 sequences of 256 (89 % full)"
std::string SamplesText(const PackedRows& rows) {
  return absl::StrFormat(
      "%s of %s tokens, %s of them targets; packed, apart, into %s of %d "
      "(%.0f %% full)",
      Counted(rows.num_samples, "sample"), WithCommas(rows.num_tokens),
      WithCommas(rows.num_targets), Counted(rows.num_rows(), "sequence"),
      rows.length,
      100.0 * static_cast<double>(rows.num_tokens) /
          static_cast<double>(rows.tokens.size()));
}

std::string DataText(const RunData& data, const Sampler& sampler,
                     const DataConfig& config) {
  if (data.train->rows() != nullptr) return SamplesText(*data.train->rows());
  const auto num_files = static_cast<int64_t>(data.train->shards().size());
  return absl::StrFormat(
      "%s tokens in %s, %s of %d%s", WithCommas(data.train->size()),
      Counted(num_files, "file"), Counted(sampler.num_samples(), "sequence"),
      config.sequence_length,
      config.reset_attention_mask ? ", documents apart" : "");
}

std::string StepsText(int64_t steps, const Sampler& sampler) {
  const int64_t dropped = sampler.dropped_per_epoch();
  return absl::StrFormat(
      "%d, %.2g epochs of %s%s", steps,
      static_cast<double>(steps) / sampler.steps_per_epoch(),
      Counted(sampler.steps_per_epoch(), "step"),
      dropped == 0
          ? ""
          : absl::StrFormat("; %s at the end of an epoch, less than a batch, "
                            "dropped",
                            Counted(dropped, "sequence")));
}

std::string OptimizerText(const Config& config) {
  return absl::StrFormat(
      "%s%s, weight decay %g on %s, clipping %s",
      Name(config, "optimizer.type"),
      // DeepSpeed's Adam is AdamW unless adam_w_mode is false.
      config.optimizer.spec.kind == OptimizerKind::kAdam &&
              config.optimizer.spec.decoupled_decay
          ? " (decoupled weight decay)"
          : "",
      config.optimizer.spec.weight_decay,
      Name(config, "optimizer.params.weight_decay_on"),
      config.gradient_clipping > 0
          ? absl::StrFormat("at norm %g", config.gradient_clipping)
          : "off");
}

// "every step", "every 500 steps".
std::string EveryText(const absl::AlphaNum& count, const char* unit) {
  return count.Piece() == "1" ? absl::StrCat("every ", unit)
                              : absl::StrCat("every ", count, " ", unit, "s");
}

// "every 500 steps; training waits for a copy of 1.39 GiB in the host's memory"
std::string CheckpointsText(const Session& session) {
  const TrainingConfig& training = session.config().training;
  std::vector<std::string> when;
  if (training.save_every > 0) {
    when.push_back(EveryText(training.save_every, "step"));
  }
  if (training.save_every_minutes > 0) {
    when.push_back(EveryText(training.save_every_minutes, "minute"));
  }
  const StateSnapshot* const snapshot = session.snapshot();
  return absl::StrCat(
      absl::StrJoin(when, " and "), "; training waits ",
      snapshot == nullptr
          ? "while one is written"
          : absl::StrCat("for a copy of the states in the host's memory (",
                         HumanBytes(static_cast<double>(snapshot->bytes())),
                         "), which is written meanwhile"));
}

// " and on a disk (1.2 GiB in '/nvme', 8 requests of 1 MiB at once)".
std::string DiskText(const Session& session) {
  const SwappedStates* const swapped = session.executor().swapped();
  if (swapped == nullptr) return "";
  const Config& config = session.config();
  const AioConfig& aio = config.aio;
  return absl::StrCat(" and on a disk (",
                      HumanBytes(static_cast<double>(swapped->disk_bytes())),
                      " in '", swapped->folder(), "', ",
                      Counted(aio.queue_depth * aio.thread_count, "request"),
                      " of ", HumanBytes(static_cast<double>(aio.block_size)),
                      " at once", aio.single_submit ? ", given one by one" : "",
                      aio.overlap_events ? "" : ", waited for together",
                      aio.checksums ? "" : ", without checksums", ")");
}

std::string MemoryRow(const Session& session) {
  std::string text = MemoryText(session.predicted());
  if (!session.executor().plan().owners.even()) {
    absl::StrAppend(&text, "; a worker ",
                    HumanBytes(session.other_rank_peak()));
  }
  return text;
}

void PrintNotes(const LoadedConfig& loaded, const Session& session,
                const RunData& data, Console* console) {
  std::vector<std::string> notes = RankNotes(loaded, session.executor().plan());
  for (const std::vector<std::string>& more :
       {DeviceNotes(loaded, *session.rank().device), loaded.notes,
        data.notes}) {
    notes.insert(notes.end(), more.begin(), more.end());
  }
  if (const SwappedStates* const swapped = session.executor().swapped()) {
    for (std::string& note : swapped->notes()) notes.push_back(std::move(note));
  }
  const int64_t context = SampleContext(session.config(), data);
  const int64_t prompt =
      context == 0 ? 0 : SamplePrompt(session.config(), data).size();
  const int64_t visible = VisibleTokens(prompt, context);
  if (visible < prompt) {
    notes.push_back(
        absl::StrFormat("training.sample.prompt has %d tokens and the context "
                        "%d; samples continue from its last %d",
                        prompt, context, visible));
  }
  for (const std::string& note : notes) console->Line("note: " + note);
}

}  // namespace

void PrintStart(const LoadedConfig& loaded, const RunReport& report,
                const RunData& data, const Sampler& sampler,
                int64_t num_eval_targets, int64_t resumed_step,
                const LrScaling& scaling, Console* console) {
  const Session& session = report.session();
  const Config& config = session.config();
  const Rank& rank = session.rank();
  const std::string& pretrained = config.model.from_pretrained;
  std::vector<Row> rows = {
      {"model", ModelText(session)},
      {"weights",
       resumed_step > 0
           ? absl::StrCat("from the checkpoint of step ", resumed_step)
       : pretrained.empty()
           ? absl::StrCat("random, seed ", config.training.seed)
           : "from " + pretrained},
      {"device", DeviceText(*rank.device)},
      {"precision", PrecisionText(config, rank.world())},
      {"recompute", RecomputeName(config.recompute())}};
  if (NumFrozen(session.model()) > 0) {
    rows.push_back({"frozen", FrozenText(session.model())});
  }
  if (const Offload offload = config.zero_optimization.offload();
      offload != Offload::kNone) {
    rows.push_back(
        {"offload",
         absl::StrCat(
             config.zero_optimization.offload_optimizer_ratio < 1
                 ? "a part of the optimizer"
                 : "the optimizer",
             " and the gradients that it reads",
             offload == Offload::kAll ? ", and parameters," : "",
             " in the host's memory (", HumanBytes(session.offloaded_bytes()),
             ")", DiskText(session), ", updated there by ",
             Counted(rank.device->host().info().num_threads, "thread"),
             config.zero_optimization.delayed_update
                 ? absl::StrCat(
                       ", after step ",
                       config.zero_optimization.delayed_update_warmup_steps,
                       " during the next step")
             : config.zero_optimization.update_before_norm ? " during backward"
                                                           : "",
             rank.host_link.has_value()
                 ? absl::StrCat(", over ", rank.host_link->text,
                                " (--shape-host-link)")
                 : "")});
  }
  if (config.training.saves()) {
    rows.push_back({"checkpoints", CheckpointsText(session)});
  }
  if (rank.world() > 1) {
    rows.push_back({"ranks", RanksText(session)});
    if (!report.link().empty()) {
      rows.push_back({"link", report.link() + " between ranks (--shape-link)"});
    }
  }
  rows.push_back({"batch", BatchText(config, rank.world())});
  rows.push_back({"data", DataText(data, sampler, config.data)});
  if (num_eval_targets > 0) {
    rows.push_back({"validation",
                    WithCommas(num_eval_targets) + " targets per evaluation"});
  }
  rows.insert(rows.end(),
              {{"steps", StepsText(report.total_steps(), sampler)},
               {"optimizer", OptimizerText(config)},
               {"learning rate", LrText(config, scaling, report.total_steps())},
               {"compute", ComputeText(report.flops_per_token(),
                                       NumFrozen(session.model()) > 0)},
               {"mfu against", PeakText(rank.device->info(),
                                        config.param_dtype(), report.peak())},
               {"memory", MemoryRow(session)},
               {"output", config.training.out_dir}});
  console->Table("zero train", rows);
  PrintNotes(loaded, session, data, console);
}

}  // namespace zero
