#include <unistd.h>

#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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
      "--prompt has %d tokens and the context %d (the smaller one of "
      "data.sequence_length %d and the model's %d positions); shorten the "
      "prompt%s",
      prompt_length, context, config.data.sequence_length,
      config.model.max_position_embeddings,
      context < config.model.max_position_embeddings
          ? ", or --set data.sequence_length=N"
          : ""));
}

absl::Status Run(GenerateFlags flags) {
  const std::atomic<bool>* stop = InstallStopSignals();
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadTrainedConfig(&flags.run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  std::string spec =
      flags.tokenizer.empty() ? config.data.tokenizer : flags.tokenizer;
  if (spec == "none") {
    if (config.model.vocab_size != kByteVocabSize) {
      return absl::InvalidArgumentError(
          absl::StrCat("which tokenizer does ", config.model.from_pretrained,
                       " speak? Its vocabulary is ", config.model.vocab_size,
                       "; give --tokenizer FILE.model (SentencePiece) or "
                       "--tokenizer bytes"));
    }
    spec = "bytes";
  }
  ZERO_ASSIGN_OR_RETURN(const auto tokenizer,
                        OpenModelTokenizer(spec, config.model.vocab_size));
  const std::vector<int32_t> prompt =
      EncodePrompt(*tokenizer, flags.prompt, config.model.vocab_size);
  const int64_t context = std::min(config.data.sequence_length,
                                   config.model.max_position_embeddings);
  NoteStrangeTokenizer(*tokenizer, config.model);
  ZERO_RETURN_IF_ERROR(CheckPrompt(config, prompt.size(), context));
  ZERO_ASSIGN_OR_RETURN(const auto device,
                        OpenDevice(flags.run, 0, config.device.cuda));
  const Rank rank = MakeLoneRank(*device);
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
  ZERO_RETURN_IF_ERROR(
      Generate(session->executor(), prompt,
               {.sampling = {.temperature = flags.temperature,
                             .top_k = flags.top_k,
                             .top_p = flags.top_p,
                             .seed = static_cast<uint64_t>(flags.seed)},
                .max_tokens = flags.tokens,
                .context_length = context,
                .vocab_size = tokenizer->vocab_size(),
                .stop_token = tokenizer->eot_id()},
               [&](int32_t id) -> absl::StatusOr<bool> {
                 print(decoder.Push(id));
                 return !stop->load();
               }));
  print(decoder.Finish() + "\n");
  return stop->load() ? absl::CancelledError("stopped by a signal")
                      : absl::OkStatus();
}

// Takes the numbers that the config's key `path` takes. The empty description
// keeps the help text as it is.
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
  app.parse_complete_callback([flags] {
    if (flags->run.config.empty() && flags->run.model_dir.empty()) {
      throw CLI::RequiredError(
          "CONFIG, or --model DIR with a Hugging Face "
          "folder,");
    }
  });
  app.add_option("--tokenizer", flags->tokenizer,
                 "bytes or a SentencePiece model (default: the config's)");
  app.add_option("--prompt", flags->prompt, "text to continue");
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
