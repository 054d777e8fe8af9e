// `zero`: trains transformers from config files. See README.md.

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "engine/base/exceptions.h"
#include "engine/base/nearest.h"
#include "engine/comm/launch.h"
#include "kernels/cpu/host_memory.h"
#include "tools/cli/commands.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

// Of several: "process 1 on node2: ".
std::string Process() {
  const absl::StatusOr<absl::optional<Launch>> launch = ReadLaunch();
  if (!launch.ok() || !launch->has_value()) return "";
  return absl::StrCat("process ", (*launch)->rank, " on ", HostName(), ": ");
}

int Ended(const absl::Status& status) {
  if (!status.ok()) {
    std::fflush(stdout);  // may be the same file
    std::fprintf(stderr, "zero: %s%s\n", Process().c_str(),
                 std::string(status.message()).c_str());
  }
  return ExitCodeOf(status);
}

// A failed write to stdout is also an error.
int Flushed(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "zero: could not write everything to stdout%s\n",
               code == 0 ? "; all else was done" : "");
  return code == 0 ? 1 : code;
}

// libgomp lets waiting threads spin for milliseconds. On busy cores that takes
// time from the threads they wait for: next to a compiler on two cores,
// gpt2_tiny trained at a third of its speed with 2000 turns; on idle cores
// these are enough for the gaps between parallel loops. libgomp reads the
// variable when it is loaded, so the program restarts itself.
void BoundSpinning(char** argv) {
  constexpr char kTurns[] = "GOMP_SPINCOUNT";
  if (std::getenv(kTurns) || std::getenv("OMP_WAIT_POLICY")) return;
  char program[PATH_MAX] = {};
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) <= 0) return;
  setenv(kTurns, "2000", /*overwrite=*/0);
  execv(program, argv);  // returns only on failure: then go on unchanged
}

// The remedy for an option that zero lacks: flags of other launchers and
// trainers, and misspelt ones. Starts with "; ", or is empty.
std::string Remedy(const std::string& option, const CLI::App& command) {
  // "--local_rank=0" and "--local-rank" are "local-rank".
  const std::string name = absl::StrReplaceAll(
      absl::StripPrefix(option.substr(0, option.find('=')), "--"),
      {{"_", "-"}});
  std::vector<std::string> known;
  for (const CLI::Option* one : command.get_options()) {
    if (!one->get_lnames().empty() && !one->get_group().empty()) {
      known.push_back(one->get_lnames().front());
    }
  }
  // needs: our option named by the remedy, if any.
  const struct {
    std::vector<std::string> names;
    std::string needs, remedy;
  } kOthers[] = {
      {{"local-rank"}, "", "leave it out: the launcher sets LOCAL_RANK"},
      {{"deepspeed"},
       "",
       "leave it out: the config file has zero_optimization"},
      {{"deepspeed-config", "config"},
       "set",
       "give the file by itself, without an option"},
      {{"nproc-per-node"},
       "ranks",
       "write --ranks N, or start torchrun with it"},
      {{"num-gpus", "gpus"}, "ranks", "write --ranks N --device cuda"},
      {{"stage", "zero-stage"}, "set", "write --set zero_optimization.stage=N"},
      {{"bf16"}, "set", "write --set bf16.enabled=true"},
      {{"fp16"}, "set", "write --set fp16.enabled=true"},
      {{"lr", "learning-rate"}, "set", "write --set optimizer.params.lr=X"},
      {{"output-dir", "out-dir"}, "set", "write --set training.out_dir=DIR"},
      {{"out", "output"}, "html", "write --html FILE"},
      {{"steps"}, "set", "write --set training.steps=N"},
      {{"resume-from-checkpoint"}, "resume", "write --resume latest"},
  };
  for (const auto& [names, needs, remedy] : kOthers) {
    if (absl::c_linear_search(names, name) &&
        (needs.empty() || absl::c_linear_search(known, needs))) {
      return absl::StrCat("; ", remedy);
    }
  }
  const std::vector<std::string> near = NearestNames(name, known, 1);
  return near.empty() ? "" : absl::StrCat("; did you mean --", near[0], "?");
}

// `zero help` and `zero help COMMAND` are `--help`; `--set a=1 b=2` is
// `--set a=1 --set b=2`.
std::vector<std::string> Arguments(int argc, char** argv) {
  std::vector<std::string> arguments;
  bool sets = false;  // the previous argument is a value of --set
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool is_key =
        argument[0] != '-' && argument.find('=') != std::string::npos;
    if (sets && is_key && arguments.back() != "--set") {
      arguments.push_back("--set");
    }
    sets = argument == "--set" || (sets && is_key);
    arguments.push_back(argument);
  }
  if (!arguments.empty() && arguments[0] == "help") {
    arguments.erase(arguments.begin());
    arguments.push_back("--help");
  }
  return arguments;
}

std::vector<std::string> CommandsOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    names.push_back(command->get_name());
  }
  return names;
}

// The last command of the command line and its path: "checkpoint diff ".
std::pair<const CLI::App*, std::string> LastCommand(const CLI::App& root) {
  const CLI::App* last = &root;
  std::string path;
  while (!last->get_subcommands().empty()) {
    last = last->get_subcommands()[0];
    absl::StrAppend(&path, last->get_name(), " ");
  }
  return {last, path};
}

// What `command`'s first missing argument is for. Starts with ": ", or is
// empty.
std::string MeaningOfMissing(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_required() && option->empty()) {
      return absl::StrCat(": ", option->get_description());
    }
  }
  return "";
}

// Whether `word` needs a value and `next` (null: nothing follows) is none, but
// another option, which CLI11 would take as one.
bool LacksValue(const CLI::App& app, const std::string& word,
                const std::string* next) {
  const CLI::Option* option = app.get_option_no_throw(word);
  if (option == nullptr || option->get_expected_min() == 0) return false;
  return next == nullptr ||
         (absl::StartsWith(*next, "-") &&
          app.get_option_no_throw(next->substr(0, next->find('='))) != nullptr);
}

// The first word that is no command, or the first option that lacks its value,
// as an error; empty: none.
std::string FindMistake(const CLI::App& root,
                        const std::vector<std::string>& arguments) {
  const CLI::App* app = &root;
  std::string path;  // "checkpoint " inside that command
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    const std::string help = absl::StrCat("; see zero ", path, "--help");
    const std::string* next =
        i + 1 < arguments.size() ? &arguments[i + 1] : nullptr;
    if (absl::StartsWith(word, "-")) {
      if (!LacksValue(*app, word, next)) continue;
      return absl::StrCat(word, " lacks its value",
                          next == nullptr ? "" : " before " + *next, ": ",
                          app->get_option(word)->get_description(), help);
    }
    const std::vector<std::string> commands = CommandsOf(*app);
    if (commands.empty()) continue;
    if (!absl::c_linear_search(commands, word)) {
      const std::vector<std::string> near = NearestNames(word, commands, 1);
      return absl::StrCat(
          "no command \"", path, word, "\"",
          near.empty() ? "; want one of " + absl::StrJoin(commands, ", ")
                       : absl::StrCat(", did you mean ", path, near[0], "?"),
          help);
    }
    app = app->get_subcommand(word);
    absl::StrAppend(&path, word, " ");
  }
  return "";
}

int Main(int argc, char** argv) {
  CLI::App app{"zero: trains transformer models from JSON config files"};
  app.require_subcommand(1);
  app.name("zero");
  app.set_version_flag("--version", kVersion);
  app.get_formatter()->column_width(34);
  using Add = Command (*)(CLI::App&);
  const struct {
    const char* name;
    const char* help;
    Add add;
    bool on_all_ranks = false;  // under a launcher
  } kCommands[] = {
      {"train", "Train the model of a config file", AddTrain, true},
      {"eval", "Loss of a model on a config's validation data", AddEval},
      {"generate", "Continue a text with a model", AddGenerate},
      {"tokenize", "Make token files from text; train a tokenizer", AddTokenize,
       true},
      {"models", "List the model presets", AddModels, true},
      {"config", "Check a config and print what it resolves to", AddConfig,
       true},
      {"plan", "Show who owns what, and the memory and actions of a step",
       AddPlan},
      {"memory", "Compare the memory and traffic of the ZeRO stages",
       AddMemory},
      {"report", "Draw the metrics of runs on one page", AddReport},
      {"checkpoint", "List, check, compare and export checkpoints",
       AddCheckpoint},
      {"devices", "Show this machine's devices and how fast they are",
       AddDevices, true},
  };
  std::vector<std::pair<CLI::App*, Command>> commands;
  for (const auto& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.help);
    Command run = command.add(*sub);
    if (!command.on_all_ranks) run = OnRankZero(command.name, std::move(run));
    commands.emplace_back(sub, std::move(run));
  }
  std::vector<std::string> arguments = Arguments(argc, argv);
  if (const std::string mistake = FindMistake(app, arguments);
      !mistake.empty()) {
    std::fprintf(stderr, "zero: %s\n", mistake.c_str());
    return 2;
  }
  try {
    // CLI11 takes the last argument first.
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return Flushed(app.exit(error));
    const auto& [command, path] = LastCommand(app);
    std::string remedy;
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      remedy = Remedy(app.remaining(/*recurse=*/true).front(), *command);
    } else if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
      remedy = MeaningOfMissing(*command);
    }
    std::fprintf(stderr, "zero: %s%s; see zero %s--help\n", error.what(),
                 remedy.c_str(), path.c_str());
    return 2;
  }
  for (const auto& [sub, command] : commands) {
    if (sub->parsed()) return Flushed(Ended(CatchExceptions(command)));
  }
  return 2;
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) {
  zero::BoundSpinning(argv);
  zero::cpu::ResidentAtStart();
  // A file above ulimit -f is an error of the write (EFBIG), as a full disk is.
  std::signal(SIGXFSZ, SIG_IGN);
  return zero::Main(argc, argv);
}
