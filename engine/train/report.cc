#include "engine/train/report.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/comm/launch.h"
#include "engine/nn/freeze.h"
#include "engine/train/evaluate.h"
#include "engine/train/memory_fit.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Milliseconds by the channels' names.
Json PerChannel(const WaitTimes& waited) {
  Json times;
  for (const Channel channel : kWaits) {
    times[ChannelName(channel)] = waited[channel];
  }
  return times;
}

// This rank's arenas and its share of the process's code and files, on the CPU,
// where ranks are threads of one process.
Json ResidentBytes(const Session& session) {
  Json bytes;
  for (const Arena* arena : session.executor().arenas()) {
    bytes[arena->name()] = arena->ResidentBytes();
  }
  if (const Arena* const host = session.executor().host_arena()) {
    bytes[host->name()] = host->ResidentBytes();
  }
  if (const StateSnapshot* snapshot = session.snapshot()) {
    bytes["copy of the states"] = snapshot->ResidentBytes();
  }
  bytes["code and files"] =
      ResidentFileBytes() / ContextSharersOf(session.rank());
  return bytes;
}

// The bytes that a step moved, was planned to move, and moves by the formula.
std::string WireText(const Session& session, const StepWire& wire) {
  const Config& config = session.config();
  const Executor& executor = session.executor();
  const Plan& plan = executor.plan();
  const int64_t micro_steps = config.gradient_accumulation_steps;
  const int rank = session.rank().rank();
  const StepWire planned = CountWire(plan, executor.schedule(), rank);
  const StepWire formula = FormulaWire(plan, micro_steps, rank);
  const StepWire rows = RowsWire(plan, micro_steps);
  const auto describe = [](const char* what, int64_t moved, int64_t planned,
                           int64_t formula, int64_t rows = 0) {
    std::string text = absl::StrCat(what, " ", WithCommas(moved), " bytes");
    if (moved != planned) {
      absl::StrAppend(&text, " (the plan says ", WithCommas(planned), ")");
    }
    return text + AgainstFormula(planned, formula, rows);
  };
  if (!plan.owners.even()) {
    const StepWire worker = FormulaWire(plan, micro_steps, /*rank=*/1);
    return absl::StrCat(describe("the server sends", wire.gathered,
                                 planned.gathered, formula.gathered),
                        "; ",
                        describe("it receives", wire.received, planned.received,
                                 formula.received),
                        "; a worker sends ", WithCommas(worker.reduced),
                        " and receives ", WithCommas(worker.received));
  }
  std::string text =
      absl::StrCat(describe("gathered", wire.gathered, planned.gathered,
                            formula.gathered, rows.gathered),
                   "; ",
                   describe("reduced", wire.reduced, planned.reduced,
                            formula.reduced, rows.reduced));
  if (plan.replicate.size > 1) {
    absl::StrAppend(&text, "; ",
                    describe("reduced across groups", wire.across,
                             planned.across, formula.across, rows.across));
  }
  return text;
}

Json ToJson(const Straggler& straggler) {
  return {{"rank", straggler.rank},
          {"host", straggler.host},
          {"factor", straggler.factor},
          {"part", StepPartName(straggler.part)},
          {"step", straggler.step}};
}

// Counts how often a step gathers the parameters.
void CountGathers(const Session& session, RunSummary* summary) {
  const Executor& executor = session.executor();
  const Plan& plan = executor.plan();
  if (plan.placement.parameters != Placement::kSharded) return;
  double once = 0;
  for (const PlannedUnit& unit : plan.units) {
    for (const Transfer& transfer : unit.gather) {
      once += transfer.BytesOf(/*rank=*/0).sent;
    }
  }
  summary->gathers = CountWire(plan, executor.schedule()).gathered / once;
}

// The value of `communication` in metrics.jsonl.
Json Communication(const Plan& plan, const StepCommunication& communication) {
  const StepWire& wire = communication.wire;
  Json json = {{"exposed_ms", communication.waited.total()},
               {"waited_ms", PerChannel(communication.waited)},
               {"gathered_bytes", wire.gathered},
               {"reduced_bytes", wire.reduced}};
  if (plan.replicate.size > 1) json["across_bytes"] = wire.across;
  if (!plan.owners.even()) json["received_bytes"] = wire.received;
  json["collectives"] = communication.collectives;
  return json;
}

}  // namespace

RunReport::RunReport(const Session& session, const ModelTools& tools,
                     const ProductRate& measured, const RunRecord& start,
                     int64_t total_steps, std::string link, Console* console)
    : session_(&session),
      tools_(&tools),
      start_(start),
      total_steps_(total_steps),
      link_(std::move(link)),
      console_(console),
      tokens_per_step_(BatchShapeOf(config(), rank().world()).TokensPerStep()),
      flops_per_token_(WithoutFrozen(
          tools.flops_per_token(config().model, config().data.sequence_length,
                                config().recompute()),
          session.model())),
      line_step_(start.step),
      line_seconds_(start.train_seconds),
      // A server has the work of all workers.
      detector_(session.executor().plan().owners.even()
                    ? session.config().communication.straggler_factor
                    : 0) {
  KeepPeak(measured);
}

void RunReport::TakeRankTimes(int64_t step, std::vector<OwnTimes> of_ranks) {
  own_ms_.clear();
  for (const OwnTimes& times : of_ranks) own_ms_.push_back(times.total());
  const std::vector<std::string>& hosts = rank().hosts;
  for (Straggler& one : detector_.Add(step, std::move(of_ranks))) {
    one.host = hosts.empty() ? HostName() : hosts[one.rank];
    console_->Line(absl::StrCat("note: step ", step, ": ", StragglerText(one)));
    stragglers_.push_back(std::move(one));
  }
}

// Adds the changes since the previous line.
void RunReport::AddRankTimes(Json* line) {
  if (!own_ms_.empty()) {
    const auto slowest = std::max_element(own_ms_.begin(), own_ms_.end());
    (*line)["ranks_before"] = {{"own_ms_median", Median(own_ms_)},
                               {"own_ms_most", *slowest},
                               {"slowest_rank", slowest - own_ms_.begin()}};
    own_ms_.clear();
  }
  for (; num_written_ < stragglers_.size(); ++num_written_) {
    (*line)["stragglers"].push_back(ToJson(stragglers_[num_written_]));
  }
}

void RunReport::MeasurePeak() {
  if (rank().rank() > 0) return;
  const absl::Span<char> memory = session_->executor().UnusedMemory();
  if (memory.empty()) return;
  KeepPeak(
      tools_->product_rate(*rank().device, config().param_dtype(), memory));
}

void RunReport::KeepPeak(const ProductRate& measured) {
  if (measured.flops > peak_.product.flops) peak_.product = measured;
  // The vendor's figure if there is one, else the measured one.
  const double vendors = rank().device->info().peak_flops_bf16;
  const bool known = vendors > 0 && config().param_dtype() != DType::kF32;
  peak_.flops = known ? vendors : peak_.product.flops;
}

Utilization RunReport::UtilizationOf(double tokens_per_second) const {
  return UtilizationAt(tokens_per_second / rank().world(), flops_per_token_,
                       peak_.flops);
}

double RunReport::SpeedSinceLine(const RunRecord& record, bool keep) {
  const double speed =
      static_cast<double>((record.step - line_step_) * tokens_per_step_) /
      (record.train_seconds - line_seconds_);
  if (keep) {
    line_step_ = record.step;
    line_seconds_ = record.train_seconds;
  }
  return speed;
}

Json RunReport::Step(const RunRecord& record, bool idle) {
  const StepRecord& last = record.last;
  const int64_t step = record.step;
  const double tokens_per_second = tokens_per_step_ / last.seconds;
  const bool keep =
      step == 1 || step == total_steps_ || Due(config().steps_per_print, step);
  const double speed = SpeedSinceLine(record, keep);
  Utilization utilization = UtilizationOf(tokens_per_second);
  // A device that is running the next step cannot be measured.
  if (keep && idle && !(utilization.known() && UtilizationOf(speed).known())) {
    MeasurePeak();
    utilization = UtilizationOf(tokens_per_second);
  }
  const MemoryLedger& ledger = session_->ledger();
  Json line = {
      {"step", step},
      {"loss", last.output.loss},
      {"grad_norm", last.output.grad_norm},
      {"lr", last.lr},
      {"tokens", step * tokens_per_step_},
      {"step_targets", static_cast<int64_t>(last.num_targets)},
      {"tokens_per_second", tokens_per_second},
      {"step_ms", last.seconds * 1e3},
      {"flops_per_second", tokens_per_second * flops_per_token_.model}};
  utilization.AddTo(&line);
  line["peak_bytes"] = PeakBytes(ledger);
  if (session_->host_bytes() > 0) line["host_bytes"] = session_->host_bytes();
  if (rank().world() > 1 || session_->offloaded_bytes() > 0) {
    line["communication"] =
        Communication(session_->executor().plan(), last.communication);
  }
  AddRankTimes(&line);
  if (config().fp16.enabled) line["loss_scale"] = record.scaler.scale;
  if (last.output.skipped) line["skipped"] = true;

  const double seconds_per_step =
      (record.train_seconds - start_.train_seconds) / (step - start_.step);
  console_->Progress(
      absl::StrFormat(
          "step %d/%d  loss %.4f  norm %.3f  lr %.3e  %s tok/s"
          "  %s  mem %s  eta %s",
          step, total_steps_, last.output.loss, last.output.grad_norm, last.lr,
          WithCommas(std::llround(speed)), UtilizationOf(speed).ToString(),
          HumanBytes(ledger.total_peak_bytes()),
          HumanSeconds((total_steps_ - step) * seconds_per_step)),
      keep);
  if (keep) {
    PrintBreakdowns(record);
    PrintDeviceNotes();
  }
  return line;
}

void RunReport::PrintBreakdowns(const RunRecord& record) const {
  if (config().wall_clock_breakdown) {
    const StepTimes& times = session_->executor().times();
    console_->Line(absl::StrFormat(
        "  forward %.1f ms  backward %.1f ms  norm and optimizer %.1f ms  "
        "waiting for other ranks and the host %.1f ms",
        times.forward_ms, times.backward_ms, times.optimizer_ms,
        record.last.communication.waited.total()));
  }
  if (config().memory_breakdown) {
    console_->Line("  peak: " +
                   PartsText(MemoryLedger::Parts(session_->ledger().peaks())));
  }
}

void RunReport::PrintDeviceNotes() {
  if (rank().rank() > 0) return;
  const std::vector<std::string> notes = rank().device->notes();
  for (; num_device_notes_ < notes.size(); ++num_device_notes_) {
    console_->Line("note: " + notes[num_device_notes_]);
  }
}

RunSummary RunReport::Summarize(const RunRecord& record) const {
  RunSummary summary{
      .steps = record.step,
      .skipped = record.step - record.optimizer_steps,
      .tokens = record.step * tokens_per_step_,
      .seconds = record.train_seconds,
      .part_seconds = record.train_seconds - start_.train_seconds,
      .peak_flops = peak_.flops,
      .waited = record.waited - start_.waited,
      .first_loss = record.first_loss,
      .final_loss = record.last.output.loss,
      .validation_loss = record.validation_loss,
      .validation_step = record.last_eval_step,
      .resumed_at = record.resumed_at,
      .stragglers = stragglers_};
  if (!summary.took_steps()) return summary;
  summary.tokens_per_second =
      static_cast<double>((record.step - start_.step) * tokens_per_step_) /
      summary.part_seconds;
  summary.utilization = UtilizationOf(summary.tokens_per_second);
  if (rank().world() > 1) {
    summary.wire = WireText(*session_, record.last.communication.wire);
    CountGathers(*session_, &summary);
  }
  return summary;
}

std::string RunReport::SummaryJson(const RunSummary& summary,
                                   const absl::Status& status) const {
  Json line = {{"steps", summary.steps},
               {"total_steps", total_steps_},
               {"interrupted", summary.interrupted},
               {"ranks", rank().world()},
               {"threads", rank().device->info().num_threads}};
  if (rank().world() > 1 && !link_.empty()) line["shape_link"] = link_;
  if (summary.host_bytes > 0 && rank().host_link.has_value()) {
    line["shape_host_link"] = rank().host_link->text;
  }
  if (!status.ok()) line["error"] = std::string(status.message());
  if (summary.skipped > 0) line["skipped_steps"] = summary.skipped;
  line["tokens"] = summary.tokens;
  line["first_loss"] = summary.first_loss;
  line["final_loss"] = summary.final_loss;
  line["validation_loss"] = summary.validation_loss;
  line["validation_perplexity"] = std::exp(summary.validation_loss);
  if (summary.validation_step >= 0) {
    line["validation_step"] = summary.validation_step;
  }
  line["train_seconds"] = summary.seconds;
  if (summary.took_steps()) {
    line["tokens_per_second"] = summary.tokens_per_second;
    summary.utilization.AddTo(&line);
  }
  line["peak_flops_per_second"] = summary.peak_flops;
  line["parameters"] = session_->model().NumParameters();
  if (const int64_t frozen = NumFrozen(session_->model()); frozen > 0) {
    line["frozen_parameters"] = frozen;
  }
  line["parameters_hash"] = summary.parameters_hash;
  line["weights"] = summary.weights;
  line["checkpoint"] = summary.checkpoint;
  if (!summary.resumed_at.empty()) {
    line["resumed_at"] = summary.resumed_at;
    line["train_seconds_since_resume"] = summary.part_seconds;
  }
  line["peak_bytes"] = PeakBytes(session_->ledger());
  line["predicted_peak_bytes"] = PeakBytes(session_->predicted());
  line["host_bytes"] = session_->host_bytes();
  line["peak_resident_bytes"] = PeakResidentBytes();
  if (rank().device->kind() == DeviceKind::kCpu) {
    line["resident_bytes"] = ResidentBytes(*session_);
  }
  // The peak is unknown if a rank was lost.
  if (summary.peak_bytes > 0) {
    line["peak_bytes_of_all_ranks"] = static_cast<int64_t>(summary.peak_bytes);
  }
  if (summary.took_steps() && (rank().world() > 1 || summary.host_bytes > 0)) {
    line["exposed_seconds"] = 1e-3 * summary.waited.total();
    line["waited_ms"] = PerChannel(summary.waited);
  }
  for (const Straggler& one : summary.stragglers) {
    line["stragglers"].push_back(ToJson(one));
  }
  if (rank().sent_bytes != nullptr) {
    line["process_ranks"] = ContextSharersOf(rank());
    line["process_sent_bytes"] = rank().sent_bytes();
  }
  return ToLine(line);
}

}  // namespace zero
