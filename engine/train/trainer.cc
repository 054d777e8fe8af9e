#include "engine/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/config/run_length.h"
#include "engine/train/evaluate.h"
#include "engine/train/generator.h"
#include "engine/train/learning_rate.h"
#include "kernels/philox.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

LossScalerOptions ScalerOptions(const Config& config) {
  if (!config.fp16.enabled) return {.static_scale = 1};
  return config.fp16.scaler;
}

// The vendor's figure where there is one, else what was measured.
double PeakFlops(const DeviceInfo& info, DType dtype,
                 const ProductRate& measured) {
  return info.peak_flops_bf16 > 0 && dtype != DType::kF32 ? info.peak_flops_bf16
                                                          : measured.flops;
}

// Beside the sites of dropout under a step's key, which are counted from 0.
constexpr uint64_t kRoundingSite = uint64_t{1} << 63;

// Of steps; after fewer the device's ceiling is not measured once more.
constexpr double kLongRunSeconds = 10;

constexpr char kDivergenceRemedy[] =
    "Lower optimizer.params.lr, lengthen the warm-up, set gradient_clipping, "
    "or look at the data";

// For people: a NaN that prints as "nan", not as "-nan".
double WithoutSignOfNan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

// Milliseconds by the channels' names.
JsonLine PerChannel(const WaitTimes& waited) {
  JsonLine line;
  for (const Channel channel : kChannels) {
    line.Add(ChannelName(channel), waited[channel]);
  }
  return line;
}

// A folder of weights is no run's: its config.json would be lost.
absl::Status CheckHoldsNoModel(const std::string& out_dir) {
  for (const char* weights :
       {"model.safetensors", "model.safetensors.index.json"}) {
    if (PathExists(absl::StrCat(out_dir, "/", weights))) {
      return absl::FailedPreconditionError(absl::StrCat(
          out_dir, " holds a model (", weights,
          "), whose config.json a run would replace; choose another folder"));
    }
  }
  return absl::OkStatus();
}

// Now, and not when the weights are written. An earlier final/ goes only when
// the new one is complete.
absl::Status CheckRoom(const std::string& out_dir, int64_t weight_bytes) {
  const int64_t free = FreeDiskBytes(out_dir);
  if (free < 0 || weight_bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the weights take ", HumanBytes(static_cast<double>(weight_bytes)),
      " and the disk of ", out_dir, " has ",
      HumanBytes(static_cast<double>(free)),
      " free; make room, choose another folder, or set "
      "training.save_final=false"));
}

// Makes `out_dir` ready for a run that writes so many bytes of weights: nobody
// else in it, no leavings of one that was killed, and no summary of an earlier
// one beside this one's metrics.
absl::StatusOr<std::unique_ptr<FolderLock>> PrepareFolder(
    const std::string& out_dir, int64_t weight_bytes) {
  std::unique_ptr<FolderLock> lock;
  const absl::Status prepared = [&]() -> absl::Status {
    ZERO_RETURN_IF_ERROR(CheckHoldsNoModel(out_dir));
    ZERO_RETURN_IF_ERROR(MakeFolders(out_dir));
    ZERO_ASSIGN_OR_RETURN(lock, FolderLock::Take(out_dir));
    ZERO_RETURN_IF_ERROR(RemoveLeavings(
        out_dir, {"config.json", "summary.json", "final", "final.failed"}));
    ZERO_RETURN_IF_ERROR(CheckRoom(out_dir, weight_bytes));
    return RemoveFile(out_dir + "/summary.json");
  }();
  if (prepared.ok()) return lock;
  return absl::Status(prepared.code(),
                      absl::StrCat("training.out_dir: ", prepared.message()));
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
      validation_loss_(std::numeric_limits<double>::quiet_NaN()) {}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(
    const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
    Console* console, const std::atomic<bool>* stop, RunStart* start) {
  std::unique_ptr<Trainer> trainer(
      new Trainer(rank, loaded, tools, console, stop, start));
  ZERO_RETURN_IF_ERROR(trainer->OpenData());
  ZERO_RETURN_IF_ERROR(trainer->PlanSteps());
  const Config& config = trainer->config_;
  trainer->KeepPeak(
      trainer->start_->Product(tools, *rank.device, config.param_dtype()));
  ZERO_ASSIGN_OR_RETURN(
      trainer->session_,
      Session::Make(rank, config, tools,
                    {.train = true,
                     .evaluate = trainer->eval_loader_ != nullptr,
                     .generate_tokens = trainer->SampleContext()}));
  trainer->flops_per_token_ =
      tools.flops_per_token(config.model, config.data.sequence_length);
  if (!trainer->leads()) return trainer;
  const std::string& out_dir = config.training.out_dir;
  const int64_t weight_bytes =
      config.training.save_final
          ? trainer->session_->model().NumParameters() *
                static_cast<int64_t>(DTypeBytes(config.param_dtype()))
          : 0;
  ZERO_ASSIGN_OR_RETURN(trainer->lock_, PrepareFolder(out_dir, weight_bytes));
  const std::string metrics = out_dir + "/metrics.jsonl";
  if (PathExists(metrics)) {  // of one that was killed, too
    console->Line(absl::StrCat(
        "note: this run replaces the one in ", out_dir,
        "; to go on from the weights of a run, start with --model DIR/final "
        "and another training.out_dir"));
  }
  ZERO_RETURN_IF_ERROR(
      WriteFileAtomically(out_dir + "/config.json", PrintResolvedJson(config)));
  ZERO_ASSIGN_OR_RETURN(trainer->metrics_, MetricsWriter::Create(metrics));
  return trainer;
}

void Trainer::MeasurePeak() {
  if (!leads()) return;
  KeepPeak(tools_.product_rate(*rank_->device, config_.param_dtype()));
}

void Trainer::KeepPeak(const ProductRate& measured) {
  if (measured.flops > product_rate_.flops) product_rate_ = measured;
  peak_flops_ =
      PeakFlops(rank_->device->info(), config_.param_dtype(), product_rate_);
}

absl::Status Trainer::OpenData() {
  ZERO_ASSIGN_OR_RETURN(data_,
                        start_->Data(config_, DataThreads(*rank_->device)));
  ZERO_ASSIGN_OR_RETURN(
      Loader loader,
      Loader::Create(data_->train.get(), batch_shape(), config_.training.seed,
                     data_->document_token));
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
  scaling_ = MakeLrScaling(config_, per_epoch);
  ZERO_ASSIGN_OR_RETURN(schedule_,
                        MakeLrSchedule(config_, scaling_, total_steps_));
  // The parser says these where it knows the length without the data.
  if (config_.training.steps == 0 || config_.lr_scaling.warmup_epochs > 0) {
    for (std::string& note :
         ScheduleNotes(config_, scaling_.warmup_steps, total_steps_)) {
      loaded_.notes.push_back(std::move(note));
    }
  }
  return absl::OkStatus();
}

int64_t Trainer::SampleContext() const {
  if (data_->tokenizer == nullptr || config_.training.sample.tokens == 0) {
    return 0;
  }
  return std::min(config_.data.sequence_length,
                  config_.model.max_position_embeddings);
}

absl::StatusOr<RunSummary> Trainer::Run() {
  PrintStart();
  PrintDeviceNotes();
  absl::Status status = CatchForAll([this]() -> absl::Status {
    ZERO_RETURN_IF_ERROR(TakeSteps());
    ZERO_RETURN_IF_ERROR(EvaluateAndSampleAtEnd());
    ZERO_RETURN_IF_ERROR(CheckFinite());
    return SaveWeights("final");
  });
  if (!status.ok()) status = Rescue(status);
  std::string parameters_hash;
  double peak_bytes = 0;
  // Without the other ranks there is nobody to ask for parameters.
  if (rank_->status().ok()) {
    absl::StatusOr<std::string> hash = session_->ParametersHash();
    if (hash.ok()) parameters_hash = *std::move(hash);
    status.Update(hash.status());
    peak_bytes = session_->ledger().total_peak_bytes();
    status.Update(session_->executor().AllReduce("peak bytes", ReduceOp::kSum,
                                                 {&peak_bytes, 1}));
  }
  // Nobody waits any more, and what else ran on the machine may have ended
  // since the measurement at the start, if that is long ago.
  if (status.ok() && train_seconds_ > kLongRunSeconds) MeasurePeak();
  RunSummary summary = Summarize();
  summary.interrupted = status.ok() && step_ < total_steps_;
  summary.parameters_hash = parameters_hash;
  summary.peak_bytes = peak_bytes;
  const absl::Status written =
      WritesSummary() ? WriteSummary(summary, status) : absl::OkStatus();
  // Rank 0 leaves with its own words, which end this; ours must not be first.
  if (absl::IsUnavailable(status) && !leads()) AgreeToStop().IgnoreError();
  ZERO_RETURN_IF_ERROR(status);
  ZERO_RETURN_IF_ERROR(written);
  return summary;
}

absl::Status Trainer::CatchForAll(const std::function<absl::Status()>& work) {
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

absl::Status Trainer::Rescue(const absl::Status& status) {
  if (!rank_->status().ok() || step_ == 0) return status;
  const absl::StatusOr<std::string> bad =
      session_->executor().FirstNonFiniteParameter();
  if (!bad.ok() || !bad->empty()) return status;
  const absl::Status saved = SaveWeights("final.failed");
  if (saved.ok() && weights_.empty()) return status;  // not wanted
  return absl::Status(
      status.code(),
      saved.ok()
          ? absl::StrCat(status.message(), "; the weights after step ", step_,
                         " are in ", config_.training.out_dir, "/", weights_)
          : absl::StrCat(status.message(),
                         "; the weights are lost as well: ", saved.message()));
}

TrainingState Trainer::ExportState() {
  Executor& executor = session_->executor();
  TrainingState state;
  state.progress = {.step = step_,
                    .optimizer_steps = optimizer_steps_,
                    .consecutive_skips = consecutive_skips_,
                    .scaler = scaler_.state(),
                    .train_seconds = train_seconds_,
                    .waited = waited_,
                    .first_loss = first_loss_,
                    .last_loss = last_loss_,
                    .validation_loss = validation_loss_,
                    .last_eval_step = last_eval_step_,
                    .last_sample_step = last_sample_step_};
  for (const StateArray& array : executor.StateArrays()) {
    std::string bytes(array.values.bytes(), '\0');
    executor.CopyOut(array.values, bytes.data());
    state.arrays.push_back({array.name, std::move(bytes)});
  }
  return state;
}

absl::Status Trainer::Restore(const TrainingState& state) {
  Executor& executor = session_->executor();
  const std::vector<StateArray> arrays = executor.StateArrays();
  for (size_t i = 0; i < std::max(arrays.size(), state.arrays.size()); ++i) {
    const std::string have =
        i < state.arrays.size()
            ? absl::StrCat(state.arrays[i].name, " of ",
                           state.arrays[i].bytes.size(), " bytes")
            : "nothing";
    const std::string want =
        i < arrays.size() ? absl::StrCat(arrays[i].name, " of ",
                                         arrays[i].values.bytes(), " bytes")
                          : "nothing";
    if (have == want) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "this state is of another run: it has ", have, " where this one wants ",
        want,
        "; use the config and the number of ranks that it was made with"));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    executor.CopyIn(state.arrays[i].bytes.data(), arrays[i].values);
  }
  const TrainingProgress& progress = state.progress;
  step_ = progress.step;
  optimizer_steps_ = progress.optimizer_steps;
  consecutive_skips_ = progress.consecutive_skips;
  scaler_.Restore(progress.scaler);
  train_seconds_ = progress.train_seconds;
  waited_ = progress.waited;
  first_loss_ = progress.first_loss;
  last_loss_ = progress.last_loss;
  validation_loss_ = progress.validation_loss;
  last_eval_step_ = progress.last_eval_step;
  last_sample_step_ = progress.last_sample_step;
  return absl::OkStatus();
}

absl::Status Trainer::TakeSteps() {
  while (true) {
    // A resumed run begins with what a stop may have cut short.
    if (step_ > 0) ZERO_RETURN_IF_ERROR(DoWhatIsDue());
    if (step_ == total_steps_) return absl::OkStatus();
    ZERO_ASSIGN_OR_RETURN(const bool taken, Step());
    if (!taken) return absl::OkStatus();
  }
}

absl::Status Trainer::DoWhatIsDue() {
  if (Due(config_.training.eval_every, step_) && last_eval_step_ != step_) {
    ZERO_RETURN_IF_ERROR(EvaluateAndLog());
  }
  if (Due(config_.training.sample_every, step_) && last_sample_step_ != step_) {
    ZERO_RETURN_IF_ERROR(Sample());
  }
  return absl::OkStatus();
}

Trainer::Agreement Trainer::Propose(double num_valid_targets) const {
  Agreement own = {};
  own[kStop] = stop_ != nullptr && stop_->load() ? 1 : 0;
  own[kCanNotWrite] = metrics_status_.ok() ? 0 : 1;
  own[kValidTargets] = num_valid_targets;
  return own;
}

absl::StatusOr<bool> Trainer::ShouldStop(const Agreement& agreed) const {
  if (agreed[kCanNotWrite] == 0) return agreed[kStop] > 0;
  if (leads()) return metrics_status_;
  return absl::UnavailableError("rank 0 can not write");
}

absl::StatusOr<bool> Trainer::AgreeToStop() {
  Agreement agreement = Propose(0);
  ZERO_RETURN_IF_ERROR(session_->executor().AllReduce("stop", ReduceOp::kSum,
                                                      {agreement.data(), 2}));
  return ShouldStop(agreement);
}

double Trainer::FillBatches(int64_t index) {
  double num_valid_targets = 0;
  int64_t micro_step = 0;
  for (Batch& batch : batches_[index % batches_.size()]) {
    loader_->Fill(index, micro_step++, rank_->rank(), &batch);
    num_valid_targets += static_cast<double>(batch.num_valid_targets);
  }
  return num_valid_targets;
}

absl::Status Trainer::InStep(const absl::Status& status, int64_t last) const {
  const std::string before =
      step_ < last ? absl::StrCat(step_ + 1, " or ") : "";
  return absl::Status(status.code(), absl::StrCat("step ", before, last + 1,
                                                  ": ", status.message()));
}

bool Trainer::RunsAheadOf(int64_t index) const {
  const int64_t done = index + 1;
  return rank_->device->asynchronous() && !scale_is_dynamic() &&
         index > 0 &&  // which is looked at: CheckUnused
         done < total_steps_ && !Due(config_.training.eval_every, done) &&
         !(Due(config_.training.sample_every, done) && SampleContext() > 0);
}

void Trainer::StartAgreement(int64_t index) {
  agreement_ = Propose(FillBatches(index));
  agreeing_on_ = index;
  session_->executor().StartAllReduce("stop, valid targets", ReduceOp::kSum,
                                      agreement_);
}

absl::StatusOr<bool> Trainer::LaunchNext() {
  const int64_t index = step_ + static_cast<int64_t>(launched_.size());
  if (agreeing_on_ != index) StartAgreement(index);
  agreeing_on_ = -1;
  const absl::Status agreed =
      session_->executor().FinishAllReduce(absl::MakeSpan(agreement_));
  if (!agreed.ok()) return InStep(agreed, index);
  const double num_valid_targets = agreement_[kValidTargets];
  // A rank that is alone may change its mind until now.
  if (rank_->world() == 1) agreement_ = Propose(num_valid_targets);
  if (!launched_.empty() && agreement_[kCanNotWrite] > 0) return false;
  ZERO_ASSIGN_OR_RETURN(const bool stop, ShouldStop(agreement_));
  if (stop) return false;
  // Before this step, so that it is there when those before this one are done.
  if (RunsAheadOf(index)) StartAgreement(index + 1);
  const absl::Status launched = Launch(index, num_valid_targets);
  if (!launched.ok()) return InStep(launched, index);
  return true;
}

absl::Status Trainer::Launch(int64_t index, double num_valid_targets) {
  std::vector<HostBatch> micro_batches;
  for (const Batch& batch : batches_[index % batches_.size()]) {
    micro_batches.push_back(AsHostBatch(batch));
  }
  // Schedules count optimizer steps: a skipped one is tried again at its rate.
  // Of the steps before this one that are not known yet, all update.
  const int64_t updates =
      optimizer_steps_ + static_cast<int64_t>(launched_.size());
  const double lr = config_.lr_scaling.active()
                        ? scaling_.LrAt(updates, config_.optimizer.lr,
                                        schedule_.LrAt(updates))
                        : schedule_.LrAt(updates);
  const uint64_t step_key = MixKey(config_.training.seed, index);
  const StepCommunication before = Communicated();
  ZERO_RETURN_IF_ERROR(session_->executor().Begin(
      {.micro_batches = micro_batches,
       .num_valid_targets = static_cast<int64_t>(num_valid_targets),
       .lr = static_cast<float>(lr),
       .beta1 = static_cast<float>(schedule_.MomentumAt(updates)),
       .loss_scale = static_cast<float>(scaler_.scale()),
       .optimizer_step = updates + 1,
       .dropout_key = step_key,
       .rounding_key = MixKey(step_key, kRoundingSite),
       .inherits_skip = !launched_.empty()}));
  launched_.push_back({num_valid_targets, lr, Communicated() - before});
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> Trainer::AwaitStep() {
  Executor& executor = session_->executor();
  ZERO_ASSIGN_OR_RETURN(const StepOutput output, executor.Finish());
  if (!output.skipped || launched_.size() == 1) return output;
  // The step behind it was launched as if this one would update, and has been
  // skipped with it: the states are still those before this step. Taken again,
  // alone, it leaves the gradients that CountSkips looks at, and the next one
  // is launched with the right rate.
  ZERO_RETURN_IF_ERROR(executor.Finish().status());
  agreeing_on_ = -1;
  const double num_valid_targets = launched_.front().num_valid_targets;
  launched_.clear();
  FillBatches(step_);
  ZERO_RETURN_IF_ERROR(Launch(step_, num_valid_targets));
  return executor.Finish();
}

absl::StatusOr<bool> Trainer::Step() {
  // A step that was launched ahead begins where the one before it ends.
  const auto start = launched_.empty() ? Clock::now() : step_end_;
  const WaitTimes waited = session_->executor().waited();
  const size_t under_way = RunsAheadOf(step_) ? 2 : 1;
  while (launched_.size() < under_way) {
    ZERO_ASSIGN_OR_RETURN(const bool launched, LaunchNext());
    if (!launched) break;
  }
  if (launched_.empty()) return false;
  const int64_t last = step_ + static_cast<int64_t>(launched_.size()) - 1;
  absl::StatusOr<StepOutput> output = AwaitStep();
  if (!output.ok()) return InStep(output.status(), last);
  output->loss = WithoutSignOfNan(output->loss);
  output->grad_norm = WithoutSignOfNan(output->grad_norm);
  ++step_;
  step_end_ = Clock::now();
  const double lr = launched_.front().lr;
  communication_ = launched_.front().communication;
  communication_.waited = session_->executor().waited() - waited;
  waited_ += communication_.waited;
  launched_.pop_front();
  const double seconds =
      std::chrono::duration<double>(step_end_ - start).count();
  train_seconds_ += seconds;
  Report(*output, seconds, lr);
  if (step_ == 1) {
    session_->MeasureFixed();
    ZERO_RETURN_IF_ERROR(CheckUnused());
  }
  ZERO_RETURN_IF_ERROR(CountSkips(*output));
  return true;
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
          .waited = session_->executor().waited()};
}

absl::Status Trainer::CountSkips(const StepOutput& output) {
  scaler_.Update(output.skipped);
  if (!output.skipped) {
    ++optimizer_steps_;
    consecutive_skips_ = 0;
    return absl::OkStatus();
  }
  ++consecutive_skips_;
  ZERO_ASSIGN_OR_RETURN(const std::string culprit,
                        session_->executor().FirstNonFiniteGradient());
  // Squares are summed in fp64, so only the norm itself can be too large.
  const std::string reason =
      culprit.empty() ? "every gradient is finite, but their norm is beyond "
                        "fp32 (3.4e38)"
                      : "the gradient of " + culprit + " is not finite";
  // A streak is told when it begins and whenever its length has doubled.
  if (absl::has_single_bit(static_cast<uint64_t>(consecutive_skips_))) {
    console_->Line(absl::StrFormat(
        "step %d skipped%s: %s%s", step_,
        consecutive_skips_ == 1
            ? ""
            : absl::StrFormat(", the last %d in a row", consecutive_skips_),
        reason,
        config_.fp16.enabled
            ? absl::StrFormat("; loss scale now %g", scaler_.scale())
            : ""));
  }
  if (consecutive_skips_ < config_.training.max_consecutive_skips) {
    return absl::OkStatus();
  }
  return absl::AbortedError(absl::StrFormat(
      "step %d: %d steps in a row were skipped; in the last one %s. "
      "training.max_consecutive_skips is %d. %s",
      step_, consecutive_skips_, reason, config_.training.max_consecutive_skips,
      kDivergenceRemedy));
}

Utilization Trainer::UtilizationOf(double tokens_per_second) const {
  return UtilizationAt(tokens_per_second / rank_->world(), flops_per_token_,
                       config_.activation_checkpointing, peak_flops_);
}

void Trainer::WriteMetrics(const JsonLine& line) {
  if (leads() && metrics_status_.ok()) metrics_status_ = metrics_->Write(line);
}

void Trainer::Report(const StepOutput& output, double seconds, double lr) {
  const int64_t tokens = batch_shape().TokensPerStep();
  const double tokens_per_second = tokens / seconds;
  const bool keep = step_ == 1 || step_ == total_steps_ ||
                    Due(config_.steps_per_print, step_);
  Utilization utilization = UtilizationOf(tokens_per_second);
  // A device that is at work on the next step can not be measured.
  if (keep && leads() && !utilization.known() && launched_.empty()) {
    MeasurePeak();
    utilization = UtilizationOf(tokens_per_second);
  }
  const MemoryLedger& ledger = session_->ledger();
  if (step_ == 1) first_loss_ = output.loss;
  last_loss_ = output.loss;
  JsonLine line;
  line.Add("step", step_)
      .Add("loss", output.loss)
      .Add("grad_norm", output.grad_norm)
      .Add("lr", lr)
      .Add("tokens", step_ * tokens)
      .Add("tokens_per_second", tokens_per_second)
      .Add("step_ms", seconds * 1e3)
      .Add("flops_per_second", tokens_per_second * flops_per_token_.model);
  utilization.AddTo(&line);
  line.AddObject("peak_bytes", PeakBytes(ledger));
  if (rank_->world() > 1) {
    JsonLine communication;
    const StepWire& wire = communication_.wire;
    communication.Add("exposed_ms", communication_.waited.total())
        .AddObject("waited_ms", PerChannel(communication_.waited))
        .Add("gathered_bytes", wire.gathered)
        .Add("reduced_bytes", wire.reduced);
    const Plan& plan = session_->executor().plan();
    if (plan.groups() > 1) communication.Add("across_bytes", wire.across);
    if (plan.server) communication.Add("received_bytes", wire.received);
    communication.Add("collectives", communication_.collectives);
    line.AddObject("communication", communication);
  }
  if (config_.fp16.enabled) line.Add("loss_scale", scaler_.scale());
  if (output.skipped) line.Add("skipped", true);
  WriteMetrics(line);

  const double average = step_ * tokens / train_seconds_;
  console_->Progress(
      absl::StrFormat("step %d/%d  loss %.4f  norm %.3f  lr %.3e  %s tok/s"
                      "  %s  mem %s  eta %s",
                      step_, total_steps_, output.loss, output.grad_norm, lr,
                      WithCommas(std::llround(tokens_per_second)),
                      utilization.ToString(),
                      HumanBytes(ledger.total_peak_bytes()),
                      HumanSeconds((total_steps_ - step_) * tokens / average)),
      keep);
  if (!keep) return;
  PrintBreakdowns();
  PrintDeviceNotes();
}

std::string Trainer::WireText() const {
  const Executor& executor = session_->executor();
  const Plan& plan = executor.plan();
  const int64_t p = DTypeBytes(config_.param_dtype());
  const int64_t r = DTypeBytes(config_.communication_data_type);
  const int64_t micro_steps = config_.gradient_accumulation_steps;
  const int rank = rank_->rank();
  const StepWire planned = CountWire(plan, executor.schedule(), p, r, rank);
  const StepWire formula = FormulaWire(plan, micro_steps, p, r, rank);
  const auto describe = [](const char* what, int64_t moved, int64_t planned,
                           int64_t formula) {
    std::string text = absl::StrCat(what, " ", WithCommas(moved), " bytes");
    if (moved != planned) {
      absl::StrAppend(&text, " (the plan says ", WithCommas(planned), ")");
    }
    return text + AgainstFormula(planned, formula);
  };
  const StepWire& wire = communication_.wire;
  if (plan.server) {
    const StepWire worker = FormulaWire(plan, micro_steps, p, r, /*rank=*/1);
    return absl::StrCat(describe("the server sends", wire.gathered,
                                 planned.gathered, formula.gathered),
                        "; ",
                        describe("it receives", wire.received, planned.received,
                                 formula.received),
                        "; a worker sends ", WithCommas(worker.reduced),
                        " and receives ", WithCommas(worker.received));
  }
  std::string text = absl::StrCat(
      describe("gathered", wire.gathered, planned.gathered, formula.gathered),
      "; ",
      describe("reduced", wire.reduced, planned.reduced, formula.reduced));
  if (plan.groups() > 1) {
    absl::StrAppend(&text, "; ",
                    describe("reduced across groups", wire.across,
                             planned.across, formula.across));
  }
  return text;
}

void Trainer::CountGathers(RunSummary* summary) const {
  const Executor& executor = session_->executor();
  const Plan& plan = executor.plan();
  if (plan.placement.parameters != Placement::kSharded) return;
  const int64_t micro_steps = config_.gradient_accumulation_steps;
  const double once =
      FormulaWire(plan, micro_steps, 1, 1).gathered / (2.0 * micro_steps);
  ScheduleOptions all_stay =
      MakeExecutorOptions(config_, /*train=*/true, /*max_positions=*/0)
          .schedule_options(micro_steps);
  all_stay.gather.max_live_elems = INT64_MAX;
  summary->gathers = CountWire(plan, executor.schedule(), 1, 1).gathered / once;
  summary->fewest_gathers =
      CountWire(plan, MakeSchedule(plan, all_stay), 1, 1).gathered / once;
}

void Trainer::PrintBreakdowns() const {
  if (config_.wall_clock_breakdown) {
    const StepTimes& times = session_->executor().times();
    console_->Line(absl::StrFormat(
        "  forward %.1f ms  backward %.1f ms  norm and optimizer %.1f ms  "
        "waiting for other ranks %.1f ms",
        times.forward_ms, times.backward_ms, times.optimizer_ms,
        communication_.waited.total()));
  }
  if (config_.memory_breakdown) {
    const MemoryLedger& ledger = session_->ledger();
    std::string text = "  peak:";
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const auto category = static_cast<MemoryCategory>(i);
      if (category == MemoryCategory::kFixed &&
          ledger.peak_bytes(category) == 0) {
        continue;  // the CPU
      }
      absl::StrAppend(&text, " ", MemoryCategoryName(category), " ",
                      HumanBytes(ledger.peak_bytes(category)));
    }
    console_->Line(text);
  }
}

void Trainer::PrintDeviceNotes() {
  if (!leads()) return;
  const std::vector<std::string> notes = rank_->device->notes();
  for (; num_device_notes_ < notes.size(); ++num_device_notes_) {
    console_->Line("note: " + notes[num_device_notes_]);
  }
}

absl::Status Trainer::CheckUnused() const {
  const std::vector<std::string>& unused =
      session_->executor().unused_parameters();
  if (!unused.empty() && !config_.zero_optimization.ignore_unused_parameters) {
    return absl::FailedPreconditionError(
        absl::StrCat("no gradient reaches ", absl::StrJoin(unused, ", "),
                     "; freeze or remove them, or set "
                     "zero_optimization.ignore_unused_parameters to true"));
  }
  for (const std::string& name : unused) {
    console_->Line(
        absl::StrCat("note: no gradient reaches ", name, "; it only decays"));
  }
  return absl::OkStatus();
}

absl::Status Trainer::EvaluateAndLog() {
  const auto start = Clock::now();
  ZERO_ASSIGN_OR_RETURN(const absl::optional<double> loss,
                        MeanLoss(session_->executor(), *rank_, *eval_loader_,
                                 [this] { return AgreeToStop(); }));
  if (!loss.has_value()) return absl::OkStatus();  // a stop was asked for
  validation_loss_ = WithoutSignOfNan(*loss);
  console_->Line(absl::StrFormat(
      "step %d  validation loss %.4f  perplexity %.2f  (%s tokens, %s)", step_,
      validation_loss_, std::exp(validation_loss_),
      WithCommas(eval_loader_->num_targets()),
      HumanSeconds(SecondsSince(start))));
  last_eval_step_ = step_;
  WriteMetrics(JsonLine()
                   .Add("step", step_)
                   .Add("validation_loss", validation_loss_)
                   .Add("validation_tokens", eval_loader_->num_targets()));
  return absl::OkStatus();
}

std::vector<int32_t> Trainer::SamplePrompt() const {
  return EncodePrompt(*data_->tokenizer, config_.training.sample.prompt,
                      config_.model.vocab_size);
}

absl::Status Trainer::Sample() {
  if (SampleContext() == 0) return absl::OkStatus();
  const SampleConfig& sample = config_.training.sample;
  const Tokenizer& tokenizer = *data_->tokenizer;
  console_->Line(absl::StrCat("--- sample after step ", step_, " ---"));
  console_->Text(sample.prompt);
  StreamDecoder decoder(&tokenizer);
  ZERO_RETURN_IF_ERROR(
      Generate(session_->executor(), SamplePrompt(),
               {.sampling = {.temperature = sample.temperature,
                             .top_k = sample.top_k,
                             .top_p = sample.top_p,
                             .seed = static_cast<uint64_t>(sample.seed)},
                .max_tokens = sample.tokens,
                .context_length = SampleContext(),
                .vocab_size = tokenizer.vocab_size(),
                .stop_token = tokenizer.eot_id()},
               [&](int32_t id) -> absl::StatusOr<bool> {
                 console_->Text(decoder.Push(id));
                 ZERO_ASSIGN_OR_RETURN(const bool stop, AgreeToStop());
                 return !stop;
               }));
  console_->Line(decoder.Finish());
  console_->Line("---");
  last_sample_step_ = step_;
  return absl::OkStatus();
}

absl::Status Trainer::EvaluateAndSampleAtEnd() {
  const bool interrupted = step_ < total_steps_;
  if (eval_loader_ != nullptr && last_eval_step_ != step_ && !interrupted) {
    ZERO_RETURN_IF_ERROR(EvaluateAndLog());
  }
  if (last_sample_step_ != step_ && !interrupted) {
    ZERO_RETURN_IF_ERROR(Sample());
  }
  return AgreeToStop().status();  // the last line of metrics was written
}

absl::Status Trainer::CheckFinite() {
  if (step_ == 0) return absl::OkStatus();
  const auto diverged = [&](const std::string& what) {
    const bool stays = PathExists(config_.training.out_dir + "/final");
    return absl::AbortedError(absl::StrCat(
        "the run diverged: ", what, " at its last step, ", step_,
        stays ? "; an earlier final/ stays. " : ". ", kDivergenceRemedy));
  };
  if (!std::isfinite(last_loss_)) {
    return diverged(absl::StrCat("the loss is ", last_loss_));
  }
  // A skip that only lowers the fp16 scale is part of training.
  const bool scale_can_fall =
      scale_is_dynamic() &&
      scaler_.scale() > config_.fp16.scaler.min_loss_scale;
  if (consecutive_skips_ > 0 && !scale_can_fall) {
    return diverged(absl::StrCat(consecutive_skips_,
                                 " steps in a row were skipped, counted"));
  }
  if (last_eval_step_ == step_ && !std::isfinite(validation_loss_)) {
    return diverged(absl::StrCat("the validation loss is ", validation_loss_));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string culprit,
                        session_->executor().FirstNonFiniteParameter());
  if (!culprit.empty()) return diverged(culprit + " is not finite");
  return absl::OkStatus();
}

absl::Status Trainer::SaveWeights(const std::string& folder) {
  // A run that took no step has nothing to save, and maybe something to lose.
  if (!config_.training.save_final || step_ == 0) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(
      const std::vector<std::string> notes,
      session_->Save(
          config_.training.out_dir + "/" + folder, tools_,
          data_->tokenizer == nullptr ? -1 : data_->tokenizer->eot_id()));
  for (const std::string& note : notes) console_->Line("note: " + note);
  weights_ = folder;
  return absl::OkStatus();
}

RunSummary Trainer::Summarize() const {
  RunSummary summary;
  summary.steps = step_;
  summary.tokens = step_ * batch_shape().TokensPerStep();
  summary.seconds = train_seconds_;
  summary.tokens_per_second =
      train_seconds_ > 0 ? summary.tokens / train_seconds_ : 0;
  summary.waited = waited_;
  if (rank_->world() > 1 && step_ > 0) {
    summary.wire = WireText();
    CountGathers(&summary);
  }
  summary.utilization = UtilizationOf(summary.tokens_per_second);
  if (step_ > 0) {
    summary.first_loss = first_loss_;
    summary.final_loss = last_loss_;
  }
  summary.validation_loss = validation_loss_;
  summary.validation_step = last_eval_step_;
  summary.weights = weights_;
  return summary;
}

absl::Status Trainer::WriteSummary(const RunSummary& summary,
                                   const absl::Status& status) const {
  JsonLine line;
  line.Add("steps", summary.steps)
      .Add("total_steps", total_steps_)
      .Add("interrupted", summary.interrupted)
      .Add("ranks", int64_t{rank_->world()})
      .Add("threads", int64_t{rank_->device->info().num_threads});
  if (rank_->world() > 1 && !start_->link().empty()) {
    line.Add("shape_link", start_->link());
  }
  if (!status.ok()) line.Add("error", status.message());
  line.Add("tokens", summary.tokens)
      .Add("first_loss", summary.first_loss)
      .Add("final_loss", summary.final_loss)
      .Add("validation_loss", summary.validation_loss);
  if (summary.validation_step >= 0) {
    line.Add("validation_step", summary.validation_step);
  }
  line.Add("train_seconds", summary.seconds)
      .Add("tokens_per_second", summary.tokens_per_second)
      .Add("peak_flops_per_second", peak_flops_);
  summary.utilization.AddTo(&line);
  line.Add("parameters", session_->model().NumParameters())
      .Add("parameters_hash", summary.parameters_hash)
      .Add("weights", summary.weights)
      .AddObject("peak_bytes", PeakBytes(session_->ledger()))
      .AddObject("predicted_peak_bytes", PeakBytes(session_->predicted()))
      .Add("peak_resident_bytes", PeakResidentBytes());
  // Unknown where a rank was lost.
  if (summary.peak_bytes > 0) {
    line.Add("peak_bytes_of_all_ranks",
             static_cast<int64_t>(summary.peak_bytes));
  }
  if (rank_->world() > 1) {
    line.Add("exposed_seconds", 1e-3 * summary.waited.total())
        .AddObject("waited_ms", PerChannel(summary.waited));
  }
  return WriteFileAtomically(config_.training.out_dir + "/summary.json",
                             line.ToString() + "\n");
}

}  // namespace zero
