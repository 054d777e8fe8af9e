#include <unistd.h>

#include <cmath>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "engine/config/print.h"
#include "engine/train/trainer.h"
#include "tools/cli/commands.h"
#include "tools/cli/signals.h"

namespace zero {
namespace {

void PrintSummary(const RunSummary& summary, const Config& config,
                  Console* console) {
  std::vector<std::pair<std::string, std::string>> rows;
  rows.push_back({"steps", absl::StrFormat("%d, %s tokens in %s", summary.steps,
                                           WithCommas(summary.tokens),
                                           HumanSeconds(summary.seconds))});
  rows.push_back(
      {"speed",
       absl::StrCat(WithCommas(std::llround(summary.tokens_per_second)),
                    " tok/s, ", summary.utilization.ToString())});
  rows.push_back({"loss", absl::StrFormat("%.4f -> %.4f", summary.first_loss,
                                          summary.final_loss)});
  if (!std::isnan(summary.validation_loss)) {
    rows.push_back(
        {"validation loss", absl::StrFormat("%.4f", summary.validation_loss)});
  }
  rows.push_back({"parameters_hash", summary.parameters_hash});
  const std::string& out_dir = config.training.out_dir;
  rows.push_back(
      {"written",
       absl::StrCat(out_dir,
                    "/{config.json, "
                    "metrics.jsonl, summary.json",
                    config.training.save_final ? ", final/}" : "}")});
  console->Table(summary.interrupted ? "stopped by a signal" : "done", rows);
}

absl::Status Train(const RunOptions& options) {
  const std::atomic<bool>* stop = InstallStopSignals();
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(options, MissingFiles::kError));
  Console console(stdout, isatty(STDOUT_FILENO));
  Console silent(nullptr, /*is_terminal=*/false);
  if (loaded.config.dump_state) console.Line(PrintResolved(loaded));
  return RunLocalRanks(
      options.ranks, LocalOptions(),
      [&](int rank) { return OpenDevice(options, rank); },
      [&](const Rank& rank) -> absl::Status {
        const bool leads = rank.rank() == 0;
        ZERO_ASSIGN_OR_RETURN(const auto trainer,
                              Trainer::Make(rank, loaded, MakeModelTools(),
                                            leads ? &console : &silent, stop));
        ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
        if (leads) PrintSummary(summary, loaded.config, &console);
        return summary.interrupted ? absl::CancelledError("stopped by a signal")
                                   : absl::OkStatus();
      });
}

}  // namespace

Command AddTrain(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  AddRunOptions(app, options.get(), /*config_required=*/true);
  AddRanksOption(app, options.get());
  return [options] { return Train(*options); };
}

}  // namespace zero
