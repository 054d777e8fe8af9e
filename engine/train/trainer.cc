#include "engine/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/config/run_length.h"
#include "engine/train/divergence.h"
#include "engine/train/evaluate.h"
#include "engine/train/generator.h"
#include "engine/train/learning_rate.h"
#include "engine/train/memory_fit.h"
#include "engine/train/start_table.h"
#include "kernels/philox.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

LossScalerOptions ScalerOptions(const Config& config) {
  if (!config.fp16.enabled) return {.static_scale = 1};
  return config.fp16.scaler;
}

// Distinct from dropout's sites under a step's key, which count from 0.
constexpr uint64_t kRoundingSite = uint64_t{1} << 63;

// After fewer seconds of steps the device's ceiling is not measured again.
constexpr double kLongRunSeconds = 10;

// `value` for output: a NaN prints as "nan", not as "-nan".
double WithoutSignOfNan(double value) {
  return std::isnan(value) ? kNotKnown : value;
}

}  // namespace

Trainer::Trainer(const Rank& rank, const LoadedConfig& loaded,
                 const ModelTools& tools, Console* console,
                 const std::atomic<bool>* stop, RunStart* start)
    : rank_(&rank),
      loaded_(loaded),
      config_(loaded_.config),
      tools_(tools),
      console_(console),
      stop_(stop),
      own_start_(start == nullptr ? std::make_unique<RunStart>() : nullptr),
      start_(start == nullptr ? own_start_.get() : start),
      scaler_(ScalerOptions(loaded.config)),
      record_{.scaler = scaler_.state()} {}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(
    const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
    Console* console, const std::atomic<bool>* stop, RunStart* start) {
  std::unique_ptr<Trainer> trainer(
      new Trainer(rank, loaded, tools, console, stop, start));
  ZERO_RETURN_IF_ERROR(trainer->OpenData());
  ZERO_RETURN_IF_ERROR(trainer->PlanSteps());
  const Config& config = trainer->config_;
  const ProductRate product_rate =
      trainer->start_->Product(tools, *rank.device, config.param_dtype());
  ZERO_ASSIGN_OR_RETURN(
      trainer->session_,
      Session::Make(rank, config, tools, TrainingWorkload(config)));
  ZERO_RETURN_IF_ERROR(trainer->OpenFolder());
  trainer->report_ = std::make_unique<RunReport>(
      *trainer->session_, trainer->tools_, product_rate, trainer->record_,
      trainer->total_steps_, trainer->start_->link(), console);
  return trainer;
}

absl::Status Trainer::OpenFolder() {
  ZERO_ASSIGN_OR_RETURN(
      folder_,
      RunFolder::Open(*session_, tools_, data_->tokenizer.get(), console_));
  ZERO_RETURN_IF_ERROR(folder_->CheckAllRanksSeeIt());
  ZERO_ASSIGN_OR_RETURN(const ResumedRun resumed,
                        ResumeRun(*session_, *data_, total_steps_, console_));
  checkpoints_ = std::make_unique<RunCheckpoints>(*session_, *data_, *folder_,
                                                  resumed, console_);
  if (resumed.record.has_value()) {
    record_ = *resumed.record;
    scaler_.Restore(record_.scaler);
  }
  return folder_->Begin(resumed.in_place ? record_.step : 0,
                        record_.last_eval_step);
}

absl::Status Trainer::OpenData() {
  ZERO_ASSIGN_OR_RETURN(data_,
                        start_->Data(config_, DataThreads(*rank_->device)));
  ZERO_ASSIGN_OR_RETURN(
      Loader loader,
      Loader::Create(data_->train.get(), BatchShapeOf(config_, rank_->world()),
                     config_.training.seed, data_->document_token));
  loader_ = std::make_unique<Loader>(std::move(loader));
  for (std::vector<Batch>& batches : batches_) {
    batches.resize(config_.gradient_accumulation_steps);
  }
  if (data_->validation == nullptr) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(EvalLoader eval,
                        MakeEvalLoader(config_, rank_->world(), *data_));
  eval_loader_ = std::make_unique<EvalLoader>(std::move(eval));
  return absl::OkStatus();
}

absl::Status Trainer::PlanSteps() {
  const int64_t per_epoch = loader_->sampler().steps_per_epoch();
  total_steps_ = config_.training.steps > 0
                     ? config_.training.steps
                     : static_cast<int64_t>(
                           std::ceil(config_.training.epochs * per_epoch));
  // Now the config says where the learning rate ends; a resumed run compares.
  FillSchedule(total_steps_, &loaded_.config.scheduler);
  scaling_ = MakeLrScaling(config_, per_epoch);
  ZERO_ASSIGN_OR_RETURN(schedule_,
                        MakeLrSchedule(config_, scaling_, total_steps_));
  // The parser reports these if it knows the length without the data.
  if (config_.training.steps == 0 || config_.lr_scaling.warmup_epochs > 0) {
    for (std::string& note :
         ScheduleNotes(config_, scaling_.warmup_steps, total_steps_)) {
      loaded_.notes.push_back(std::move(note));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<RunSummary> Trainer::Run() {
  // A finished run has said so, and takes no steps to describe.
  if (record_.step < total_steps_) {
    PrintStart(loaded_, *report_, *data_, loader_->sampler(),
               eval_loader_ == nullptr ? 0 : eval_loader_->num_targets(),
               record_.step, scaling_, console_);
    report_->PrintDeviceNotes();
  }
  absl::Status status = AbortOnThrow([this]() -> absl::Status {
    ZERO_RETURN_IF_ERROR(TakeSteps());
    ZERO_RETURN_IF_ERROR(CheckFinite(executor(), config_, record_));
    ZERO_RETURN_IF_ERROR(SaveLast());
    return SaveWeights();
  });
  const absl::Status saved = checkpoints_->Finish();
  if (!status.ok() && !checkpoints_->last_save().ok() &&
      checkpoints_->last_save() != status) {
    console_->Line(
        absl::StrCat("warning: ", checkpoints_->last_save().message()));
  }
  status.Update(saved);
  if (!updated_with_bad_) {
    status = Rescue(status, *session_, record_, folder_.get());
  }
  std::string parameters_hash;
  double peaks[] = {0, 0};  // of all ranks; of those in rank 0's process
  // Without the other ranks their parameters are gone.
  if (rank_->status().ok()) {
    absl::StatusOr<std::string> hash = executor().states().Hash();
    if (hash.ok()) parameters_hash = *std::move(hash);
    status.Update(hash.status());
    const int64_t own =
        session_->ledger().total_peak_bytes() + session_->host_bytes();
    peaks[0] = static_cast<double>(own);
    if (rank_->rank() < ContextSharersOf(*rank_)) peaks[1] = peaks[0];
    status.Update(executor().numbers().AllReduce("peak bytes", ReduceOp::kSum,
                                                 absl::MakeSpan(peaks)));
  }
  // No rank waits any more, and other work on the machine may have ended since
  // the measurement at the start, if that is long ago.
  if (status.ok() && record_.train_seconds > kLongRunSeconds) {
    report_->MeasurePeak();
  }
  RunSummary summary = report_->Summarize(record_);
  summary.interrupted = status.ok() && record_.step < total_steps_;
  summary.parameters_hash = parameters_hash;
  summary.peak_bytes = peaks[0];
  summary.process_peak_bytes = peaks[1];
  summary.host_bytes =
      static_cast<double>(session_->host_bytes()) * rank_->world();
  summary.weights = folder_->weights();
  summary.checkpoint = checkpoints_->saved();
  const absl::Status written =
      WritesSummary()
          ? folder_->WriteSummary(report_->SummaryJson(summary, status))
          : absl::OkStatus();
  // Let rank 0 report first: its message is the cause, ours the consequence.
  if (absl::IsUnavailable(status) && !leads()) AgreeToStop().IgnoreError();
  ZERO_RETURN_IF_ERROR(status);
  ZERO_RETURN_IF_ERROR(written);
  return summary;
}

absl::Status Trainer::AbortOnThrow(const std::function<absl::Status()>& work) {
  bool threw = true;
  const absl::Status status = CatchExceptions([&] {
    absl::Status returned = work();
    threw = false;
    return returned;
  });
  if (!threw) return status;
  // The others would wait, and this rank's executor is in the middle of a step.
  rank_->scalar->Abort(status);
  return rank_->world() == 1 ? status : rank_->status();
}

bool Trainer::WritesSummary() const {
  const std::vector<int> missing =
      rank_->missing ? rank_->missing() : std::vector<int>();
  int lowest = 0;
  while (std::find(missing.begin(), missing.end(), lowest) != missing.end()) {
    ++lowest;
  }
  return rank_->rank() == lowest;
}

absl::Status Trainer::TakeSteps() {
  while (true) {
    // A resumed run begins with work that a stop may have cut short.
    if (record_.step > 0) {
      ZERO_RETURN_IF_ERROR(EvaluateAndSampleIfDue());
      ZERO_RETURN_IF_ERROR(SaveIfDue());
    }
    if (record_.step >= total_steps_) break;
    ZERO_ASSIGN_OR_RETURN(const bool taken, Step());
    if (!taken) break;
  }
  return AgreeToStop().status();  // the last line of metrics was written
}

absl::StatusOr<bool> Trainer::Step() {
  // A step that was launched ahead begins when the previous one ends.
  const auto begin = launched_.empty() ? Clock::now() : step_end_;
  const WaitTimes waited = executor().clock().waited();
  while (launched_.size() < (RunsAheadOf(record_.step) ? 2u : 1u)) {
    const int64_t index = record_.step + static_cast<int64_t>(launched_.size());
    Fill(index);
    ZERO_ASSIGN_OR_RETURN(const absl::optional<double> num_valid_targets,
                          Agree(index));
    if (!num_valid_targets.has_value()) break;
    // It is filled now, so that the agreement is done with the previous steps.
    if (RunsAheadOf(index)) Fill(index + 1);
    ZERO_RETURN_IF_ERROR(InStep(Launch(index, *num_valid_targets), index));
  }
  if (launched_.empty()) return false;
  ZERO_ASSIGN_OR_RETURN(StepRecord taken, Await());
  if (record_.step + 1 >= total_steps_ && launched_.empty()) {
    executor().states();  // nothing hides what its update still takes
    step_end_ = Clock::now();
  }
  taken.seconds = Seconds(step_end_ - begin);
  taken.communication.waited = executor().clock().waited() - waited;
  own_times_ = OwnTimesOf(taken.seconds, taken.communication.waited);
  ZERO_RETURN_IF_ERROR(Report(taken));
  return true;
}

void Trainer::Fill(int64_t index) {
  if (agreeing_on_ == index) return;
  agreement_ = Propose(FillBatches(index));
  agreeing_on_ = index;
  executor().numbers().Start("stop, valid targets", ReduceOp::kSum, agreement_);
}

absl::StatusOr<absl::optional<double>> Trainer::Agree(int64_t index) {
  agreeing_on_ = -1;
  ZERO_RETURN_IF_ERROR(
      InStep(executor().numbers().Finish(absl::MakeSpan(agreement_)), index));
  if (leads() && record_.step > record_.first_step()) {
    report_->TakeRankTimes(record_.step, OwnTimesOfRanks());
  }
  const double num_valid_targets = agreement_[kValidTargets];
  // A single rank may decide until now.
  if (rank_->world() == 1) agreement_ = Propose(num_valid_targets);
  ZERO_RETURN_IF_ERROR(checkpoints_->Advance(
      {agreement_[kPhaseEnded], agreement_[kPhaseFailed]}));
  const bool cannot_write =
      agreement_[kCannotWrite] > 0 || !checkpoints_->last_save().ok();
  // The error comes after the step that is under way.
  if (!launched_.empty() && cannot_write) return absl::nullopt;
  ZERO_ASSIGN_OR_RETURN(const bool stop, ShouldStop(agreement_));
  if (stop) return absl::nullopt;
  save_agreed_ = save_agreed_ || agreement_[kSave] > 0;
  return num_valid_targets;
}

absl::Status Trainer::Launch(int64_t index, double num_valid_targets) {
  std::vector<HostBatch> micro_batches;
  for (const Batch& batch : batches_[index % batches_.size()]) {
    micro_batches.push_back(AsHostBatch(batch));
  }
  // Schedules count optimizer steps: after a skip the same rate is used again.
  // Earlier steps with unknown results are assumed to update.
  const int64_t updates =
      record_.optimizer_steps + static_cast<int64_t>(launched_.size());
  const double lr = config_.lr_scaling.active()
                        ? scaling_.LrAt(updates, config_.optimizer.lr,
                                        schedule_.LrAt(updates))
                        : schedule_.LrAt(updates);
  const uint64_t step_key = MixKey(config_.training.seed, index);
  const StepCommunication before = Communicated();
  ZERO_RETURN_IF_ERROR(executor().Begin(
      {.micro_batches = micro_batches,
       .num_valid_targets = static_cast<int64_t>(num_valid_targets),
       .lr = static_cast<float>(lr),
       .beta1 = static_cast<float>(schedule_.MomentumAt(updates)),
       .loss_scale = static_cast<float>(
           config_.fp16.enabled
               ? LossScaleOfStep(scaler_.scale(), config_.train_batch_size)
               : 1),
       .optimizer_step = updates + 1,
       .dropout_key = step_key,
       .rounding_key = MixKey(step_key, kRoundingSite),
       .inherits_skip = !launched_.empty(),
       .delayed_update = config_.zero_optimization.DelaysUpdateOf(index)}));
  launched_.push_back({num_valid_targets, lr, Communicated() - before});
  return absl::OkStatus();
}

absl::StatusOr<StepRecord> Trainer::Await() {
  const int64_t last =
      record_.step + static_cast<int64_t>(launched_.size()) - 1;
  absl::StatusOr<StepOutput> output = executor().Finish();
  if (output.ok() && output->skipped) {
    if (config_.zero_optimization.update_before_norm) {
      output = NotFinite(*output);
    } else if (launched_.size() > 1) {
      output = TakeAgain();
    }
  }
  if (!output.ok()) return InStep(output.status(), last);
  step_end_ = Clock::now();
  StepRecord taken{.output = *output,
                   .lr = launched_.front().lr,
                   .num_targets = launched_.front().num_valid_targets,
                   .communication = launched_.front().communication};
  taken.output.loss = WithoutSignOfNan(output->loss);
  taken.output.grad_norm = WithoutSignOfNan(output->grad_norm);
  launched_.pop_front();
  return taken;
}

absl::Status Trainer::NotFinite(const StepOutput& output) {
  updated_with_bad_ = true;
  return absl::DataLossError(absl::StrCat(
      output.non_finite.empty()
          ? "the norm of all gradients"
          : absl::StrCat("a gradient of ", output.non_finite),
      " is not finite, and the host may have updated parameters with it "
      "already (zero_optimization.offload_optimizer.update_before_norm): this "
      "step is not saved. Resume from the last checkpoint with that key off to "
      "skip such steps"));
}

absl::StatusOr<StepOutput> Trainer::TakeAgain() {
  // The next step was launched as if this one would update, and was skipped
  // with it: the states are still those before this step. Repeated alone, it
  // names the gradient to blame, and the next one is launched with the right
  // rate.
  ZERO_RETURN_IF_ERROR(executor().Finish().status());
  agreeing_on_ = -1;
  const double num_valid_targets = launched_.front().num_valid_targets;
  launched_.clear();
  FillBatches(record_.step);
  ZERO_RETURN_IF_ERROR(Launch(record_.step, num_valid_targets));
  return executor().Finish();
}

absl::Status Trainer::Report(const StepRecord& taken) {
  record_.Add(taken);
  folder_->WriteMetrics(report_->Step(record_, /*idle=*/launched_.empty()));
  if (record_.step == record_.first_step() + 1) {
    session_->MeasureFixed();
    ZERO_RETURN_IF_ERROR(CheckUnused(executor(), config_, console_));
  }
  scaler_.Update(taken.output.skipped);
  record_.scaler = scaler_.state();
  return CheckSkips(config_, record_, console_);
}

bool Trainer::RunsAheadOf(int64_t index) const {
  const int64_t done = index + 1;
  return rank_->device->asynchronous() && !scale_is_dynamic() &&
         index > record_.first_step() &&  // see CheckUnused
         done < total_steps_ && !save_agreed_ &&
         // A repeated step would compute with other parameters.
         !config_.zero_optimization.DelaysUpdateOf(done) &&
         // Nor can a step be repeated that has updated.
         !config_.zero_optimization.update_before_norm &&
         !Due(config_.training.save_every, done) &&
         !Due(config_.training.eval_every, done) &&
         !(Due(config_.training.sample_every, done) &&
           SampleContext(config_, *data_) > 0);
}

absl::Status Trainer::InStep(const absl::Status& status, int64_t last) const {
  const std::string before =
      record_.step < last ? absl::StrCat(record_.step + 1, " or ") : "";
  return WithContext(absl::StrCat("step ", before, last + 1), status);
}

double Trainer::FillBatches(int64_t index) {
  const auto begin = Clock::now();
  double num_valid_targets = 0;
  int64_t micro_step = 0;
  for (Batch& batch : batches_[index % batches_.size()]) {
    loader_->Fill(index, micro_step++, rank_->rank(), &batch);
    num_valid_targets += static_cast<double>(batch.num_valid_targets);
  }
  fill_seconds_ += Seconds(Clock::now() - begin);
  return num_valid_targets;
}

OwnTimes Trainer::OwnTimesOf(double seconds, const WaitTimes& waited) {
  const double busy_ms = rank_->gather->busy_ms() + rank_->reduce->busy_ms() +
                         rank_->across->busy_ms();
  const double fill_ms = 1e3 * std::exchange(fill_seconds_, 0);
  OwnTimes own;
  own[StepPart::kData] = fill_ms;
  own[StepPart::kOffload] = waited[Channel::kHost] + waited[Channel::kDisk];
  own[StepPart::kCommunication] = busy_ms - std::exchange(busy_ms_, busy_ms);
  // Batches for a device behind the host are read during its work.
  own[StepPart::kCompute] =
      std::max(1e3 * seconds - waited.total() - fill_ms, 0.0);
  return own;
}

std::vector<OwnTimes> Trainer::OwnTimesOfRanks() const {
  std::vector<OwnTimes> of_ranks;
  const absl::Span<const double> brought = executor().numbers().brought();
  for (size_t i = kOwnTimes; i < brought.size(); i += kNumAgreed) {
    OwnTimes& own = of_ranks.emplace_back();
    std::copy_n(&brought[i], own.ms.size(), own.ms.begin());
  }
  return of_ranks;
}

StepCommunication Trainer::Communicated() const {
  const CollectiveCount gathered = rank_->gather->Total();
  const CollectiveCount reduced = rank_->reduce->Total();
  const CollectiveCount across = rank_->across->Total();
  return {.wire = {.gathered = gathered.bytes,
                   .reduced = reduced.bytes,
                   .across = across.bytes,
                   .received =
                       gathered.received + reduced.received + across.received},
          .collectives = gathered.calls + reduced.calls + across.calls,
          .waited = executor().clock().waited()};
}

Trainer::Agreement Trainer::Propose(double num_valid_targets) const {
  Agreement own = {};
  const double max_minutes = config_.training.max_minutes;
  const bool stop = (stop_ != nullptr && stop_->load()) ||
                    (leads() && max_minutes > 0 &&
                     Seconds(Clock::now() - made_at_) >= 60 * max_minutes);
  own[kStop] = stop ? 1 : 0;
  own[kSave] = leads() && checkpoints_->MinutesPassed() ? 1 : 0;
  const RunCheckpoints::PhaseVotes votes = checkpoints_->Vote();
  own[kPhaseEnded] = votes.ended;
  own[kPhaseFailed] = votes.failed;
  own[kCannotWrite] = folder_->metrics_status().ok() ? 0 : 1;
  own[kValidTargets] = num_valid_targets;
  std::copy(own_times_.ms.begin(), own_times_.ms.end(), &own[kOwnTimes]);
  return own;
}

absl::StatusOr<bool> Trainer::ShouldStop(const Agreement& agreed) const {
  ZERO_RETURN_IF_ERROR(checkpoints_->last_save());
  if (agreed[kCannotWrite] == 0) return agreed[kStop] > 0;
  if (leads()) return folder_->metrics_status();
  return absl::UnavailableError("rank 0 cannot write");
}

absl::StatusOr<bool> Trainer::AgreeToStop() {
  Agreement agreement = Propose(0);
  ZERO_RETURN_IF_ERROR(executor().numbers().AllReduce(
      "stop", ReduceOp::kSum, {agreement.data(), kSave}));
  ZERO_RETURN_IF_ERROR(
      checkpoints_->Advance({agreement[kPhaseEnded], agreement[kPhaseFailed]}));
  return ShouldStop(agreement);
}

absl::Status Trainer::EvaluateAndSampleIfDue() {
  const int64_t step = record_.step;
  const bool complete = step == total_steps_;
  if (eval_loader_ != nullptr && record_.last_eval_step != step &&
      (complete || Due(config_.training.eval_every, step))) {
    ZERO_RETURN_IF_ERROR(Evaluate());
  }
  if (record_.last_sample_step != step &&
      (complete || Due(config_.training.sample_every, step))) {
    ZERO_RETURN_IF_ERROR(Sample());
  }
  return absl::OkStatus();
}

absl::Status Trainer::SaveIfDue() {
  save_agreed_ |= Due(config_.training.save_every, record_.step);
  // Skipped steps may mean that the run diverged, and each checkpoint replaces
  // an older one.
  if (!save_agreed_ || !launched_.empty() || record_.consecutive_skips > 0) {
    return absl::OkStatus();
  }
  return Save();
}

absl::Status Trainer::SaveLast() {
  const TrainingConfig& training = config_.training;
  const bool interrupted = record_.step < total_steps_;
  const bool wanted =
      interrupted ? training.save_interrupted : training.saves();
  if (wanted && record_.step > 0) ZERO_RETURN_IF_ERROR(Save());
  return checkpoints_->Finish();
}

absl::Status Trainer::SaveWeights() {
  // A run without steps has nothing to save, and may overwrite something.
  if (record_.step == 0) return absl::OkStatus();
  double keeps = record_.step < total_steps_ &&
                 config_.training.save_interrupted &&
                 folder_->has_final_of_whole_run();
  ZERO_RETURN_IF_ERROR(executor().numbers().AllReduce(
      "final/ of a whole run", ReduceOp::kMax, {&keeps, 1}));
  if (keeps == 0) return folder_->SaveWeights("final");
  console_->Line(absl::StrCat(
      "note: ", config_.training.out_dir,
      "/final still holds the weights of an earlier run: this run was "
      "interrupted, and has a checkpoint"));
  return absl::OkStatus();
}

absl::Status Trainer::Save() {
  save_agreed_ = false;
  return checkpoints_->Save(record_);
}

absl::Status Trainer::Evaluate() {
  const auto start = Clock::now();
  ZERO_ASSIGN_OR_RETURN(const absl::optional<double> loss,
                        MeanLoss(executor(), *rank_, *eval_loader_,
                                 [this] { return AgreeToStop(); }));
  if (!loss.has_value()) return absl::OkStatus();  // a stop was requested
  record_.validation_loss = WithoutSignOfNan(*loss);
  console_->Line(absl::StrFormat(
      "step %d  validation loss %.4f  perplexity %.2f  (%s tokens, %s)",
      record_.step, record_.validation_loss, std::exp(record_.validation_loss),
      WithCommas(eval_loader_->num_targets()),
      HumanSeconds(Seconds(Clock::now() - start))));
  record_.last_eval_step = record_.step;
  folder_->WriteMetrics(
      {{"step", record_.step},
       {"validation_loss", record_.validation_loss},
       {"validation_perplexity", std::exp(record_.validation_loss)},
       {"validation_tokens", eval_loader_->num_targets()}});
  return absl::OkStatus();
}

absl::Status Trainer::Sample() {
  const int64_t context = SampleContext(config_, *data_);
  if (context == 0) return absl::OkStatus();
  const SampleConfig& sample = config_.training.sample;
  const Tokenizer& tokenizer = *data_->tokenizer;
  console_->Line(absl::StrCat("--- sample after step ", record_.step, " ---"));
  console_->Text(sample.prompt);
  StreamDecoder decoder(&tokenizer);
  ZERO_RETURN_IF_ERROR(
      Generate(executor(), SamplePrompt(config_, *data_),
               {.sampling = {.temperature = sample.temperature,
                             .top_k = sample.top_k,
                             .top_p = sample.top_p,
                             .seed = static_cast<uint64_t>(sample.seed)},
                .max_tokens = sample.tokens,
                .context_length = context,
                .vocab_size = tokenizer.vocab_size(),
                .stop_token = tokenizer.eot_id()},
               [&](int32_t id) -> absl::StatusOr<bool> {
                 console_->Text(decoder.Push(id));
                 ZERO_ASSIGN_OR_RETURN(const bool stop, AgreeToStop());
                 return !stop;
               }));
  console_->Line(decoder.Finish());
  console_->Line("---");
  record_.last_sample_step = record_.step;
  return absl::OkStatus();
}

}  // namespace zero
