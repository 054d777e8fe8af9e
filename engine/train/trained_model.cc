#include "engine/train/trained_model.h"

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/config/print.h"
#include "engine/train/metrics.h"
#include "nlohmann/json.hpp"

namespace zero {
LastRun ReadLastRun(const std::string& out_dir) {
  const auto text = ReadFile(out_dir + "/summary.json");
  if (!text.ok()) {
    return {absl::StrCat("still runs or was killed (", out_dir,
                         "/summary.json does not exist)")};
  }
  const auto summary = nlohmann::json::parse(*text, nullptr, false);
  if (!summary.is_object()) {
    return {absl::StrCat("left no readable ", out_dir, "/summary.json")};
  }
  const auto value_of = [&](const char* key) {
    return summary.value(key, nlohmann::json());
  };
  LastRun run{.interrupted = value_of("interrupted") == true};
  if (value_of("weights") == "final") return run;
  const nlohmann::json error = value_of("error");
  run.why_no_final = error.is_string() && error != ""
                         ? absl::StrCat("failed: ", error.get<std::string>())
                         : "wrote no weights";
  return run;
}

absl::StatusOr<TrainedModel> FindTrainedModel(const Config& config) {
  const std::string& out_dir = config.training.out_dir;
  const std::string& base = config.model.from_pretrained;
  const std::string dir = out_dir + "/final";
  if (!HoldsModel(dir)) {
    if (base.empty()) {
      return absl::NotFoundError(absl::StrCat(
          "there is no trained model: ", dir, " does not exist",
          absl::StartsWith(dir, "/") ? "" : " in the current folder",
          " (zero train writes it), and neither --model DIR nor "
          "model.from_pretrained is given"));
    }
    return TrainedModel{base,
                        absl::StrCat(dir, " does not exist yet: this is ", base,
                                     ", which training starts from")};
  }
  if (const std::string why = ReadLastRun(out_dir).why_no_final; !why.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(dir, " is from an earlier run: the last one ", why,
                     ". To use the earlier weights anyway, give --model ", dir,
                     base.empty() ? "" : ", or --model " + base));
  }
  if (base.empty() || base == dir) return TrainedModel{dir, ""};
  return TrainedModel{dir,
                      absl::StrCat("this is ", dir, ", trained from ", base,
                                   "; for that one, give --model ", base)};
}

std::string OtherDataOfRun(const LoadedConfig& loaded) {
  using Json = nlohmann::ordered_json;
  const Config& config = loaded.config;
  const std::filesystem::path dir(
      std::string(absl::StripSuffix(config.model.from_pretrained, "/")));
  const std::string out_dir = FolderOf(dir);
  if ((dir.filename() != "final" && dir.filename() != "final.failed") ||
      !PathExists(out_dir + "/metrics.jsonl")) {
    return "";
  }
  const std::string file = out_dir + "/config.json";
  const auto text = ReadFile(file);
  const Json was = Json::parse(text.ok() ? *text : "", /*cb=*/nullptr,
                               /*allow_exceptions=*/false);
  if (!was.is_object() || !was.contains("data")) return "";
  const Json is = Json::parse(PrintResolvedJson(config));
  for (const JsonDifference& one : Differences(was, is)) {
    const bool matters = config.data.validation.empty()
                             ? one.name == "data.train" ||
                                   one.name == "data.validation" ||
                                   one.name == "data.validation_fraction"
                             : one.name == "data.validation";
    if (!matters || loaded.IsSet(one.name)) continue;
    return absl::StrCat("this is the loss of other data than the run's: its ",
                        one.name, " was ", one.a, ", now ", one.b,
                        "; for that of the run, give ", file,
                        " as the config, or --data FILE");
  }
  return "";
}

}  // namespace zero
