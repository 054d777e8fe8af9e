#include <cmath>
#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/config/json_text.h"
#include "engine/train/console.h"
#include "engine/train/evaluate.h"
#include "engine/train/metrics.h"
#include "engine/train/run_data.h"
#include "engine/train/trained_model.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/signals.h"

namespace zero {
namespace {

// "256 tokens: the first 8 of 1,208 sequences of 32 (training.eval_batches)".
std::string EvaluatedText(const EvalLoader& loader, int64_t sequence_length) {
  const int64_t used = loader.num_windows(), all = loader.source_windows();
  const std::string part =
      used < all ? absl::StrCat("the first ", WithCommas(used), " of ") : "";
  return absl::StrCat(Counted(loader.num_targets(), "token"), ": ", part,
                      Counted(all, "sequence"), " of ",
                      WithCommas(sequence_length),
                      used < all ? " (training.eval_batches)" : "");
}

struct EvalFlags {
  RunOptions run;
  std::vector<std::string> data;
  bool json = false;
};

absl::Status Eval(EvalFlags flags) {
  RunOptions& options = flags.run;
  if (!flags.data.empty()) {
    const auto quote = [](std::string* out, const std::string& file) {
      out->append(JsonQuote(file));
    };
    options.sets.push_back(absl::StrCat(
        "data.validation=[", absl::StrJoin(flags.data, ", ", quote), "]"));
    options.sets.push_back("data.validation_fraction=0");
  }
  const std::atomic<bool>* stop = InstallStopSignals();
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadTrainedConfig(&options, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  const DataConfig& from = config.data;
  if (from.validation.empty() &&
      (from.train.empty() || from.validation_fraction == 0)) {
    return absl::InvalidArgumentError(
        "there is no validation data: give --data FILE, or set "
        "data.validation or data.validation_fraction");
  }
  if (const std::string other = OtherDataOfRun(loaded); !other.empty()) {
    absl::FPrintF(stderr, "zero: note: %s\n", other);
  }
  ZERO_ASSIGN_OR_RETURN(const auto device,
                        OpenDevice(options, 0, config.device.cuda));
  ZERO_ASSIGN_OR_RETURN(
      const RunData data,
      OpenRunData(config, /*need_train=*/false, DataThreads(*device)));
  for (const std::string& note : data.notes) {
    absl::FPrintF(stderr, "zero: note: %s\n", note);
  }
  if (data.tokenizer != nullptr) {
    NoteStrangeTokenizer(*data.tokenizer, config.model);
  }
  ZERO_ASSIGN_OR_RETURN(const EvalLoader loader,
                        MakeEvalLoader(config, /*world=*/1, data));
  const Rank rank = MakeSoloRank(*device);
  ZERO_ASSIGN_OR_RETURN(
      const auto session,
      Session::Make(rank, config, MakeModelTools(), {.evaluate = true}));
  ZERO_ASSIGN_OR_RETURN(
      const absl::optional<double> mean,
      MeanLoss(session->executor(), rank, loader,
               [stop]() -> absl::StatusOr<bool> { return stop->load(); }));
  if (!mean.has_value()) return absl::CancelledError("stopped by a signal");
  const double loss = *mean;
  const int64_t length = config.data.sequence_length;
  if (flags.json) {
    absl::PrintF("%s\n", ToLine({{"loss", loss},
                                 {"perplexity", std::exp(loss)},
                                 {"tokens", loader.num_targets()},
                                 {"sequences", loader.num_windows()},
                                 {"sequence_length", length},
                                 {"model", config.model.from_pretrained}}));
  } else {
    absl::PrintF("%s: loss %.6f, perplexity %.4f over %s\n",
                 config.model.from_pretrained, loss, std::exp(loss),
                 EvaluatedText(loader, length));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LoadedConfig> LoadTrainedConfig(RunOptions* options,
                                               MissingFiles missing_files) {
  ZERO_ASSIGN_OR_RETURN(LoadedConfig loaded,
                        LoadRunConfig(*options, missing_files));
  if (!options->model_dir.empty() || loaded.IsSet("model.from_pretrained")) {
    return loaded;
  }
  ZERO_ASSIGN_OR_RETURN(const TrainedModel trained,
                        FindTrainedModel(loaded.config));
  if (!trained.note.empty()) {
    absl::FPrintF(stderr, "zero: note: %s\n", trained.note);
  }
  options->model_dir = trained.dir;
  return LoadRunConfig(*options, missing_files);
}

Command AddEval(CLI::App& app) {
  auto flags = std::make_shared<EvalFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/false);
  RefuseRanksOption(app);
  RequireConfigOrModel(app, &flags->run);
  app.add_option("--data", flags->data,
                 "text, token files or .jsonl instead of the config's")
      ->allow_extra_args(false);
  app.add_flag("--json", flags->json,
               "print loss, perplexity and what they are over as JSON");
  return [flags] { return Eval(*flags); };
}

}  // namespace zero
