#include "tests/support/tiny_model.h"

#include <algorithm>
#include <cmath>

#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/philox.h"
#include "models/registry.h"
#include "tests/support/max_or_nan.h"

namespace zero {

ModelConfig TinyConfig(ModelFamily family) {
  const bool is_gpt2 = family == ModelFamily::kGpt2;
  ModelConfig config;
  config.family = family;
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = is_gpt2 ? 4 : 2;
  config.head_dim = family == ModelFamily::kQwen3 ? 12 : 8;
  config.intermediate_size = 40;
  config.max_position_embeddings = 27;
  config.norm_eps = is_gpt2 ? 1e-5 : 1e-6;
  config.activation = is_gpt2 ? "gelu_new" : "silu";
  config.attention_bias = is_gpt2 || family == ModelFamily::kQwen2;
  config.tie_word_embeddings = family != ModelFamily::kLlama;
  // Large enough for every part of the model to matter at once.
  config.initializer_range = 0.1;
  return config;
}

TokenBatch::TokenBatch(int64_t batch, int64_t length, int64_t vocab,
                       uint64_t seed)
    : batch(batch), length(length) {
  for (int64_t b = 0; b < batch; ++b) {
    sample_ids.push_back(100 * seed + b);
    for (int64_t t = 0; t <= length; ++t) {
      const auto id = static_cast<int32_t>(Philox(seed, b, t).x[0] % vocab);
      if (t < length) {
        tokens.push_back(id);
        positions.push_back(static_cast<int32_t>(t));
      }
      if (t > 0) targets.push_back(id);
    }
  }
}

HostBatch TokenBatch::Rows(int64_t begin, int64_t count) const {
  const int64_t at = begin * length;
  HostBatch rows{.batch = count,
                 .length = length,
                 .tokens = tokens.data() + at,
                 .targets = targets.data() + at,
                 .positions = positions.data() + at,
                 .sample_ids = sample_ids.data() + begin};
  if (!cut_) return rows;
  const int64_t end = count * length;
  std::vector<int32_t>& offsets = offsets_.emplace_back();
  for (int32_t i = 0; i < end; ++i) {
    if (positions[at + i] == 0) offsets.push_back(i);
  }
  rows.num_sequences = offsets.size();
  offsets.resize(end + 1, end);
  rows.offsets = offsets.data();
  return rows;
}

void TokenBatch::CutAtTokensBelow(int32_t below) {
  cut_ = true;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool begins = i % length == 0 || tokens[i] < below;
    positions[i] = begins ? 0 : positions[i - 1] + 1;
  }
}

std::vector<HostBatch> TokenBatch::Split(int64_t size) const {
  std::vector<HostBatch> parts;
  for (int64_t begin = 0; begin < batch; begin += size) {
    parts.push_back(Rows(begin, std::min(size, batch - begin)));
  }
  return parts;
}

int64_t TokenBatch::NumValid() const {
  return std::count_if(targets.begin(), targets.end(),
                       [](int32_t target) { return target >= 0; });
}

PlanOptions RigOptions::plan_options(int world, int shards,
                                     BulkAlgorithm algorithm) const {
  PlanOptions options = plan;
  options.world = world;
  options.shards = shards;
  options.parameters = CodecOf(param_dtype, algorithm);
  options.gradients = CodecOf(plan.gradients.dtype, algorithm);
  return options;
}

Rig::Rig(const Rank& rank, std::unique_ptr<Model> model,
         const RigOptions& options, const TransientBytes& transient,
         uint64_t seed)
    : model_(std::move(model)) {
  const Plan plan = MakePlan(DescribeUnits(*model_),
                             options.plan_options(rank.world(), rank.shards(),
                                                  rank.reduce->algorithm()));
  auto executor = Executor::Make(rank, *model_, plan, options, transient,
                                 &ledger_, &host_ledger_);
  ZERO_CHECK(executor.ok()) << executor.status();
  executor_ = *std::move(executor);
  executor_->states().Initialize(seed);
}

Rig::Rig(std::unique_ptr<Rank> lone, std::unique_ptr<Model> model,
         const RigOptions& options, int64_t activation_bytes, uint64_t seed)
    : Rig(*lone, std::move(model), options, {activation_bytes, 0}, seed) {
  lone_ = std::move(lone);
}

Rig::Rig(Device& device, std::unique_ptr<Model> model,
         const RigOptions& options, int64_t activation_bytes, uint64_t seed)
    : Rig(std::make_unique<Rank>(MakeSoloRank(device)), std::move(model),
          options, activation_bytes, seed) {}

Rig::Rig(Device& device, const ModelConfig& config, const RigOptions& options,
         int64_t activation_bytes, uint64_t seed)
    : Rig(device, MakeModel(config), options, activation_bytes, seed) {}

StepOutput Rig::Step(const TokenBatch& batch, float lr, int64_t micro_size,
                     float loss_scale) {
  const std::vector<HostBatch> parts =
      batch.Split(micro_size == 0 ? batch.batch : micro_size);
  const absl::Status begun =
      executor_->Begin({.micro_batches = parts,
                        .num_valid_targets = batch.NumValid(),
                        .lr = lr,
                        .loss_scale = loss_scale,
                        .optimizer_step = optimizer_step_,
                        .dropout_key = dropout_key_});
  ZERO_CHECK(begun.ok()) << begun;
  KeepGradients();
  const absl::StatusOr<StepOutput> output = executor_->Finish();
  ++dropout_key_;
  ZERO_CHECK(output.ok()) << output.status();
  if (!output->skipped) ++optimizer_step_;
  return *output;
}

double Rig::EvalLossSum(const HostBatch& batch, float* losses) {
  const absl::StatusOr<double> sum = executor_->EvalLossSum(batch, losses);
  ZERO_CHECK(sum.ok()) << sum.status();
  return *sum;
}

void Rig::LastLogits(const HostBatch& batch, KvCache* cache, float* logits) {
  const absl::Status status = executor_->LastLogits(batch, cache, logits);
  ZERO_CHECK(status.ok()) << status;
}

Parameter& Rig::parameter(const std::string& name) {
  for (Parameter* parameter : model_->AllParameters()) {
    if (parameter->name == name) return *parameter;
  }
  ZERO_CHECK(false) << "no parameter " << name;
  return *model_->AllParameters()[0];
}

void Rig::Load(
    const std::function<std::vector<float>(const Parameter&)>& values) {
  const absl::Status loaded =
      executor_->states().Load([&](const Parameter& parameter, int64_t begin,
                                   int64_t count, float* out) {
        const std::vector<float> all = values(parameter);
        std::copy_n(all.begin() + begin, count, out);
      });
  ZERO_CHECK(loaded.ok()) << loaded;
}

std::vector<float> Rig::Read(const Parameter& parameter) {
  return ReadParameters(*executor_).value().at(parameter.name);
}

std::vector<float> Rig::Gradient(const Parameter& parameter) {
  const Tensor& grad = parameter.weight.sink->grad;
  if (!grad.defined()) return gradients_.at(parameter.name);
  return {grad.As<float>(), grad.As<float>() + grad.num_elems()};
}

void Rig::KeepGradients() {
  if (executor_->transient().device().kind() != DeviceKind::kCpu) return;
  for (const Parameter* parameter : model_->AllParameters()) {
    const GradSink* const sink = parameter->weight.sink;
    if (sink == nullptr || !sink->grad.defined()) continue;
    if (sink->grad.dtype() != DType::kF32) continue;
    gradients_[parameter->name] = Gradient(*parameter);
  }
}

absl::StatusOr<std::vector<float>> Rig::TryReadAll() {
  ZERO_ASSIGN_OR_RETURN(const ValuesByName values, ReadParameters(*executor_));
  std::vector<float> all;
  for (const Parameter* parameter : model_->AllParameters()) {
    const std::vector<float>& own = values.at(parameter->name);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

absl::StatusOr<ValuesByName> ReadParameters(Executor& executor) {
  ValuesByName all;
  ZERO_RETURN_IF_ERROR(
      executor.states().Read([&](const Parameter& parameter, int64_t begin,
                                 absl::Span<const float> values) {
        std::vector<float>& own = all[parameter.name];
        own.resize(parameter.shape.num_elems());
        std::copy(values.begin(), values.end(), own.begin() + begin);
      }));
  return all;
}

double RelativeDifference(const std::vector<float>& a,
                          const std::vector<float>& b) {
  ZERO_CHECK_EQ(a.size(), b.size());
  double difference = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = MaxOrNan(difference, std::fabs(double{a[i]} - b[i]));
    largest = std::max<double>(largest, std::fabs(b[i]));
  }
  return largest == 0 ? difference : difference / largest;
}

}  // namespace zero
