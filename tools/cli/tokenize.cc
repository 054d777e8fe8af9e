#include "engine/data/tokenize.h"

#include <unistd.h>

#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/data/sentencepiece_tokenizer.h"
#include "engine/train/console.h"
#include "tools/cli/commands.h"

namespace zero {
namespace {

struct TokenizeFlags {
  TokenizeOptions options;
  int64_t train_vocab = 0;
  std::string model_type = "bpe";
};

// Trains FILE.model next to the output and uses it.
absl::Status TrainTokenizer(TokenizeFlags* flags) {
  const std::string prefix(absl::StripSuffix(flags->options.output, ".bin"));
  for (const char* end : {".model", ".bin"}) {
    if (flags->options.force || !PathExists(prefix + end)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("'", prefix, end,
                     "' exists; choose another output, or replace it with "
                     "--force"));
  }
  ZERO_RETURN_IF_ERROR(TrainSentencePiece({.inputs = flags->options.inputs,
                                           .model_prefix = prefix,
                                           .vocab_size = flags->train_vocab,
                                           .model_type = flags->model_type}));
  flags->options.tokenizer = prefix + ".model";
  absl::PrintF("trained %s with %s tokens\n", flags->options.tokenizer,
               WithCommas(flags->train_vocab));
  return absl::OkStatus();
}

// Draws the progress over the previous line.
void ShowProgress(int64_t done, int64_t total) {
  absl::FPrintF(stderr, "\r%s of %s%s", HumanBytes(static_cast<double>(done)),
                HumanBytes(static_cast<double>(total)),
                done == total ? "\n" : "");
}

absl::Status Tokenize(TokenizeFlags flags) {
  if (flags.train_vocab > 0) ZERO_RETURN_IF_ERROR(TrainTokenizer(&flags));
  if (flags.options.num_threads == 0) {
    flags.options.num_threads = AllowedCores();
  }
  if (isatty(STDERR_FILENO)) flags.options.progress = ShowProgress;
  ZERO_ASSIGN_OR_RETURN(const TokenizeStats stats,
                        TokenizeFiles(flags.options));
  for (const TokenizeStats::Output& output : stats.outputs) {
    absl::PrintF("%s: %s tokens of %d bytes\n", output.path,
                 WithCommas(output.num_tokens), stats.bytes_per_token);
  }
  const std::string validation =
      absl::StrCat(absl::StripSuffix(flags.options.output, ".bin"), "_val");
  if (flags.options.validation_fraction > 0 &&
      absl::c_none_of(stats.outputs, [&](const TokenizeStats::Output& output) {
        return absl::StartsWith(output.path, validation);
      })) {
    absl::PrintF(
        "note: %g of this text is less than a token, so there is no validation "
        "file; raise --validation-fraction\n",
        flags.options.validation_fraction);
  }
  absl::PrintF(
      "%s, %s, %s of text, %.2f bytes per token; set "
      "model.vocab_size to at least %d and data.tokenizer to \"%s\"\n",
      Counted(stats.num_files, "file"),
      Counted(stats.num_documents, "document"),
      HumanBytes(static_cast<double>(stats.text_bytes)),
      static_cast<double>(stats.text_bytes) /
          std::max<int64_t>(stats.num_tokens, 1),
      stats.vocab_size, flags.options.tokenizer);
  return absl::OkStatus();
}

}  // namespace

Command AddTokenize(CLI::App& app) {
  auto flags = std::make_shared<TokenizeFlags>();
  TokenizeOptions& options = flags->options;
  app.add_option("INPUT", options.inputs, "text files and globs")->required();
  app.add_option("--out", options.output, "token file to write, FILE.bin")
      ->required();
  CLI::Option* tokenizer = app.add_option("--tokenizer", options.tokenizer,
                                          "bytes, a tokenizer.json, a "
                                          "SentencePiece .model, or a model's "
                                          "folder")
                               ->capture_default_str();
  app.add_option("--train-sentencepiece", flags->train_vocab,
                 "first train a model with this many tokens on the input, "
                 "written next to the output")
      ->check(CLI::Range(int64_t{258}, int64_t{1} << 20))
      ->excludes(tokenizer);
  app.add_option("--sentencepiece-type", flags->model_type, "bpe or unigram")
      ->capture_default_str()
      ->check(CLI::IsMember({"bpe", "unigram"}));
  app.add_option("--separator", options.document_separator,
                 "cut documents inside a file at this text");
  app.add_option("--shard-tokens", options.tokens_per_shard,
                 "tokens per output file; 0: one file")
      ->capture_default_str();
  app.add_option("--validation-fraction", options.validation_fraction,
                 "put this last part of the text into FILE_val.bin")
      ->capture_default_str();
  app.add_flag("--allow-lossy", options.allow_lossy,
               "accept a tokenizer that changes the text");
  app.add_flag("--force", options.force, "replace what an earlier run wrote");
  options.num_threads = 0;
  app.add_option("--threads", options.num_threads,
                 "threads that encode (default: all cores)")
      ->check(CLI::Range(1, 1024));
  return [flags] { return Tokenize(*flags); };
}

}  // namespace zero
