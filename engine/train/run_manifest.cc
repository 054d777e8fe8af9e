#include "engine/train/run_manifest.h"

#include <algorithm>
#include <random>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/hash.h"
#include "engine/config/print.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Calls visit(name, field) for every field that a later run needs.
template <typename Record, typename Visit>
void ForEachField(Record& record, const Visit& visit) {
  visit("optimizer_steps", record.optimizer_steps);
  visit("consecutive_skips", record.consecutive_skips);
  visit("loss_scale", record.scaler.scale);
  visit("loss_scale_steps", record.scaler.steps);
  visit("loss_scale_last_overflow", record.scaler.last_overflow_step);
  visit("loss_scale_hysteresis_left", record.scaler.hysteresis_left);
  visit("loss", record.last.output.loss);
  visit("grad_norm", record.last.output.grad_norm);
  visit("lr", record.last.lr);
  visit("first_loss", record.first_loss);
  visit("validation_loss", record.validation_loss);
  visit("last_eval_step", record.last_eval_step);
  visit("last_sample_step", record.last_sample_step);
  visit("train_seconds", record.train_seconds);
  for (const Channel channel : kWaits) {
    visit(absl::StrCat("waited_ms_", ChannelName(channel)),
          record.waited.ms[static_cast<size_t>(channel)]);
  }
}

Json ToJson(const RunRecord& record) {
  Json json;
  ForEachField(record, [&](const std::string& name, const auto& field) {
    json[name] = field;
  });
  json["resumed_at"] = record.resumed_at;
  return json;
}

}  // namespace

absl::StatusOr<RunRecord> ReadRecord(const CheckpointManifest& manifest) {
  RunRecord record{.step = manifest.step};
  const Json& json = manifest.progress;
  std::string wrong;
  ForEachField(record, [&](const std::string& name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    const auto it = json.find(name);
    // Older programs had no disk to wait for.
    if (it == json.end() && name == "waited_ms_disk") return;
    if (it == json.end()) {
      wrong = name;
    } else if (it->is_number()) {
      field = it->template get<Field>();
    } else if (it->is_null() && std::is_floating_point_v<Field>) {
      field = static_cast<Field>(kNotKnown);  // JSON has no NaN
    } else {
      wrong = name;
    }
  });
  for (const Json& step : json.value("resumed_at", Json::array())) {
    if (step.is_number_integer()) record.resumed_at.push_back(step);
  }
  if (wrong.empty()) return record;
  return absl::DataLossError(
      absl::StrCat("the manifest has no usable progress.", wrong));
}

// A fingerprint of the training data: its size and a sample of it; for packed
// samples, all their targets.
Json DescribeData(const TokenSource& tokens) {
  constexpr int64_t kWindows = 64, kWindow = 1024;
  const int64_t n = std::min(tokens.size(), kWindow);
  std::vector<int32_t> sample(kWindows * n);
  for (int64_t i = 0; i < kWindows; ++i) {
    tokens.Read((tokens.size() - n) / (kWindows - 1) * i, n, &sample[i * n]);
  }
  const auto hash = [](const std::vector<int32_t>& ids) {
    return HashOf({reinterpret_cast<const char*>(ids.data()),
                   ids.size() * sizeof(int32_t)});
  };
  Json json = {{"tokens", tokens.size()}, {"sample_xxh3_128", hash(sample)}};
  if (const PackedRows* const rows = tokens.rows()) {
    json["samples"] = rows->num_samples;
    json["targets_xxh3_128"] = hash(rows->targets);
  }
  return json;
}

// 52 random bits, which a double carries.
double RandomNumber() {
  std::random_device device;
  const uint64_t bits = (uint64_t{device()} << 32) ^ device();
  return static_cast<double>(bits >> 12);
}

std::string Id(double number) {
  return absl::StrFormat("%013x", static_cast<uint64_t>(number));
}

CheckpointManifest DescribeRun(const Session& session, const RunData& data,
                               const RunRecord& record, const std::string& run,
                               const std::string& save) {
  const Config& config = session.config();
  CheckpointManifest manifest{.step = record.step,
                              .samples = record.step * config.train_batch_size,
                              .parts = session.rank().world(),
                              .run = run,
                              .save = save,
                              .progress = ToJson(record),
                              .config = Json::parse(PrintResolvedJson(config))};
  manifest.progress["data"] = DescribeData(*data.train);
  for (const Parameter* parameter : session.model().AllParameters()) {
    manifest.parameters[parameter->name] = parameter->shape.dims();
  }
  return manifest;
}

}  // namespace zero
