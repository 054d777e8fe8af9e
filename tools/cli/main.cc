// `zero`: trains transformers from config files. See README.md.

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "engine/base/file.h"
#include "tools/cli/commands.h"

namespace zero {
namespace {}  // namespace

absl::Status WithinMemory(const Command& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "the system refused memory; use a smaller model or micro-batch, or "
        "raise the limit (ulimit -v)");
  }
}

namespace {

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  if (status.code() == absl::StatusCode::kCancelled) return 130;
  std::fprintf(stderr, "zero: %s\n", std::string(status.message()).c_str());
  return 1;
}

int Main(int argc, char** argv) {
  CLI::App app{"zero: trains transformer models from JSON config files"};
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  using Add = Command (*)(CLI::App&);
  const struct {
    const char* name;
    const char* help;
    Add add;
  } kCommands[] = {
      {"train", "Train the model of a config file", AddTrain},
      {"eval", "Loss of a model on a config's validation data", AddEval},
      {"generate", "Continue a text with a model", AddGenerate},
      {"tokenize", "Make token files from text; train a tokenizer",
       AddTokenize},
      {"models", "List the model presets", AddModels},
      {"config", "Check a config and print what it resolves to", AddConfig},
      {"plan", "Who owns what, and the actions of a step", AddPlan},
      {"devices", "What this machine offers", AddDevices},
  };
  std::vector<std::pair<CLI::App*, Command>> commands;
  for (const auto& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.help);
    commands.emplace_back(sub, command.add(*sub));
  }
  if (argc > 1 && argv[1][0] != '-') {
    std::vector<std::string> names;
    for (const auto& command : kCommands) names.push_back(command.name);
    if (std::find(names.begin(), names.end(), argv[1]) == names.end()) {
      const std::vector<std::string> near = NearestNames(argv[1], names, 1);
      std::fprintf(
          stderr, "zero: no command \"%s\"%s; zero --help lists them\n",
          argv[1], near.empty() ? "" : (", did you mean " + near[0]).c_str());
      return 2;
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  for (const auto& [sub, command] : commands) {
    if (sub->parsed()) return ExitCode(WithinMemory(command));
  }
  return 2;
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::Main(argc, argv); }
