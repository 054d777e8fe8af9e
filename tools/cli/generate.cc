#include <unistd.h>

#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "engine/base/status.h"
#include "engine/config/keys.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "engine/train/console.h"
#include "engine/train/generator.h"
#include "engine/train/run_data.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/signals.h"

namespace zero {
namespace {

struct GenerateFlags {
  RunOptions run;
  std::string tokenizer;
  std::string prompt;
  int64_t tokens = 200;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1.0;
  int64_t seed = 0;
};

absl::Status CheckPrompt(const Config& config, int64_t prompt_length,
                         int64_t context) {
  if (prompt_length <= context) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--prompt is %d tokens long and the context %d (the smaller one of "
      "data.sequence_length %d and the model's %d positions); shorten the "
      "prompt%s",
      prompt_length, context, config.data.sequence_length,
      config.model.max_position_embeddings,
      context < config.model.max_position_embeddings
          ? ", or --set data.sequence_length=N"
          : ""));
}

constexpr char kTokenizers[] =
    "--tokenizer, a tokenizer.json or a SentencePiece model, or --tokenizer "
    "bytes for a model of bytes";

// The prompt of a model without a tokenizer: "50256 318 257".
absl::StatusOr<std::vector<int32_t>> ParseIds(const std::string& prompt,
                                              const ModelConfig& model) {
  std::vector<int32_t> ids;
  for (const auto word :
       absl::StrSplit(prompt, absl::ByAnyChar(" ,"), absl::SkipEmpty())) {
    int32_t id = -1;
    const bool is_id = absl::SimpleAtoi(word, &id) && id >= 0;
    if (!is_id || id >= model.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "which tokenizer does ", model.from_pretrained,
          " use? The folder has none, so --prompt takes token ids below ",
          model.vocab_size, ", and \"", word, "\" is none; for text give ",
          kTokenizers));
    }
    ids.push_back(id);
  }
  if (!ids.empty()) return ids;
  return absl::InvalidArgumentError(
      absl::StrCat("which tokenizer does ", model.from_pretrained,
                   " use? The folder has none: give ", kTokenizers,
                   ", or token ids as --prompt"));
}

absl::Status Run(GenerateFlags flags) {
  const std::atomic<bool>* stop = InstallStopSignals();
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadTrainedConfig(&flags.run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  std::string spec =
      flags.tokenizer.empty() ? config.data.tokenizer : flags.tokenizer;
  const int64_t vocab_size = config.model.vocab_size;
  if (spec == "none" && vocab_size == kByteVocabSize) spec = "bytes";
  std::unique_ptr<Tokenizer> tokenizer;  // null: ids in, ids out
  std::vector<int32_t> prompt;
  if (spec == "none") {
    ZERO_ASSIGN_OR_RETURN(prompt, ParseIds(flags.prompt, config.model));
  } else {
    ZERO_ASSIGN_OR_RETURN(tokenizer, OpenModelTokenizer(spec, vocab_size));
    NoteStrangeTokenizer(*tokenizer, config.model);
    prompt = EncodePrompt(*tokenizer, flags.prompt, vocab_size);
  }
  const int64_t context = std::min(config.data.sequence_length,
                                   config.model.max_position_embeddings);
  ZERO_RETURN_IF_ERROR(CheckPrompt(config, prompt.size(), context));
  ZERO_ASSIGN_OR_RETURN(const auto device,
                        OpenDevice(flags.run, 0, config.device.cuda));
  const Rank rank = MakeSoloRank(*device);
  ZERO_ASSIGN_OR_RETURN(const auto session,
                        Session::Make(rank, config, MakeModelTools(),
                                      {.generate_tokens = context}));
  const bool is_terminal = isatty(STDOUT_FILENO);
  const auto print = [is_terminal](const std::string& text) {
    std::fputs((is_terminal ? Printable(text) : text).c_str(), stdout);
    std::fflush(stdout);
  };
  print(flags.prompt);
  StreamDecoder decoder(tokenizer.get());
  ZERO_RETURN_IF_ERROR(Generate(
      session->executor(), prompt,
      {.sampling = {.temperature = flags.temperature,
                    .top_k = flags.top_k,
                    .top_p = flags.top_p,
                    .seed = static_cast<uint64_t>(flags.seed)},
       .max_tokens = flags.tokens,
       .context_length = context,
       .vocab_size =
           tokenizer != nullptr ? tokenizer->vocab_size() : vocab_size,
       .stop_token = tokenizer != nullptr ? tokenizer->eot_id() : -1},
      [&](int32_t id) -> absl::StatusOr<bool> {
        print(tokenizer != nullptr ? decoder.Push(id) : absl::StrCat(" ", id));
        return !stop->load();
      }));
  print(decoder.Finish() + "\n");
  return stop->load() ? absl::CancelledError("stopped by a signal")
                      : absl::OkStatus();
}

// Accepts the numbers of the config's key `path`. The empty description leaves
// the help text unchanged.
CLI::Validator NumberOf(const char* path) {
  const auto check = [key = FindKey(path)](const std::string& text) {
    JsonNode node = {.kind = JsonKind::kNumber, .text = text};
    node.is_integer = absl::SimpleAtoi(text, &node.integer);
    return absl::SimpleAtod(text, &node.number) && ReadValue(*key, node).ok()
               ? std::string()
               : absl::StrCat("\"", text, "\" is not ", Wanted(*key));
  };
  return CLI::Validator(check, "");
}

}  // namespace

Command AddGenerate(CLI::App& app) {
  auto flags = std::make_shared<GenerateFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/false);
  RefuseRanksOption(app);
  RequireConfigOrModel(app, &flags->run);
  app.add_option("--tokenizer", flags->tokenizer,
                 "bytes, none (ids in, ids out), a tokenizer.json, a "
                 "SentencePiece .model, or a model's folder (default: the "
                 "config's, or the model's own)");
  app.add_option("--prompt", flags->prompt,
                 "text to continue; without a tokenizer: token ids");
  app.add_option("--tokens", flags->tokens, "tokens to sample")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_option("--temperature", flags->temperature, "0: most likely token")
      ->capture_default_str()
      ->check(NumberOf("training.sample.temperature"));
  app.add_option("--top-k", flags->top_k,
                 "sample from the k most likely; 0: all")
      ->capture_default_str()
      ->check(NumberOf("training.sample.top_k"));
  app.add_option("--top-p", flags->top_p, "nucleus sampling; 1: off")
      ->capture_default_str()
      ->check(NumberOf("training.sample.top_p"));
  app.add_option("--seed", flags->seed, "same seed, same text")
      ->capture_default_str();
  return [flags] { return Run(*flags); };
}

}  // namespace zero
