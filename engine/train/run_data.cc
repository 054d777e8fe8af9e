#include "engine/train/run_data.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/data/samples.h"
#include "engine/data/tokenize.h"
#include "engine/train/console.h"

namespace zero {
namespace {

// Longer texts should be token files, which need no tokenizing at each start.
constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

absl::StatusOr<std::unique_ptr<TokenSource>> Tokenized(
    const TokenSource& text, const std::vector<std::string>& patterns,
    const Tokenizer& tokenizer, int num_threads) {
  const std::string& path = text.shards()[0].path;
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " ...: ", text.size(),
        " bytes of text are more than a run tokenizes at its start (",
        kMaxTextBytes, "); make token files first: zero tokenize ", path,
        " --out FILE.bin --tokenizer ", tokenizer.name()));
  }
  ZERO_ASSIGN_OR_RETURN(auto tokens,
                        TokenizeInMemory(patterns, tokenizer, num_threads));
  return TokenSource::FromTokens(path, std::move(tokens));
}

absl::StatusOr<std::unique_ptr<TokenSource>> OpenChecked(
    const std::vector<std::string>& patterns, const Config& config,
    const Tokenizer* tokenizer, int num_threads) {
  ZERO_ASSIGN_OR_RETURN(auto source,
                        TokenSource::Open(patterns, config.data.format));
  if (source->is_text() && tokenizer != nullptr &&
      config.data.tokenizer != "bytes") {
    ZERO_ASSIGN_OR_RETURN(
        source, Tokenized(*source, patterns, *tokenizer, num_threads));
  }
  if (source->is_text() && tokenizer == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data.tokenizer: \"none\" is for token files, but ",
        source->shards()[0].path,
        " is text; set data.tokenizer to \"bytes\", or make token files first "
        "with zero tokenize"));
  }
  const int64_t vocab_size = config.model.vocab_size;
  ZERO_RETURN_IF_ERROR(source->ValidateTokens(vocab_size, num_threads));
  if (source->is_text() || tokenizer == nullptr ||
      tokenizer->vocab_size() >= vocab_size ||
      source->ValidateTokens(tokenizer->vocab_size(), num_threads).ok()) {
    return source;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "data.tokenizer: ", tokenizer->name(), " has ", tokenizer->vocab_size(),
      " ids, but the tokens of ", absl::StrJoin(patterns, ", "),
      " include larger ones, from another tokenizer: name that one, or set "
      "data.tokenizer to \"none\""));
}

// Whether files are JSON lines.
absl::StatusOr<bool> HasSamples(const std::vector<std::string>& patterns,
                                TokenFormat format) {
  const std::string* samples = nullptr;
  const std::string* other = nullptr;
  for (const std::string& pattern : patterns) {
    (IsJsonLines(pattern, format) ? samples : other) = &pattern;
  }
  if (samples == nullptr || other == nullptr) return samples != nullptr;
  return absl::InvalidArgumentError(
      absl::StrCat("'", *samples, "' is JSON lines, and '", *other,
                   "' is not; text and samples cannot be mixed: write each "
                   "line of the text as {\"text\": ...} in a .jsonl file"));
}

// Packs samples, and notes those that did not fit.
absl::StatusOr<std::unique_ptr<TokenSource>> Packed(
    const std::vector<Sample>& samples, const std::string& key,
    const std::string& path, const Config& config, RunData* data) {
  const int64_t length = config.data.sequence_length;
  PackingLoss loss;
  PackedRows rows = PackSamples(samples, length, &loss);
  if (rows.num_samples == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        key, ": ", path, ": no prompt is shorter than data.sequence_length ",
        length, " (", Counted(samples.size(), "sample"), "); raise that"));
  }
  if (loss.cut_samples > 0) {
    data->notes.push_back(absl::StrCat(
        key, ": ", loss.cut_samples, " of ", samples.size(),
        " samples are longer than data.sequence_length ", length,
        " and lose their last tokens, ", loss.cut_tokens, " in all"));
  }
  if (loss.left_out > 0) {
    data->notes.push_back(absl::StrCat(
        key, ": ", loss.left_out, " of ", samples.size(),
        " samples are left out: their prompts alone fill data.sequence_length ",
        length));
  }
  return TokenSource::FromRows(path, std::move(rows));
}

// The samples of `patterns`, which fit the model.
absl::StatusOr<std::vector<Sample>> ReadChecked(
    const std::vector<std::string>& patterns, const Config& config,
    const Tokenizer& tokenizer, int num_threads) {
  ZERO_ASSIGN_OR_RETURN(auto samples,
                        ReadSamples(patterns, tokenizer, num_threads));
  if (tokenizer.eot_id() < config.model.vocab_size) return samples;
  return absl::InvalidArgumentError(absl::StrCat(
      "model.vocab_size ", config.model.vocab_size, " has no room for token ",
      tokenizer.eot_id(),
      ", the end of text that a sample ends with; set it to at least ",
      tokenizer.eot_id() + 1));
}

// Opens the data of `patterns`; `held_out` (null: none) gets its last part.
absl::StatusOr<std::unique_ptr<TokenSource>> OpenPart(
    const std::string& key, const std::vector<std::string>& patterns,
    const Config& config, int num_threads, RunData* data,
    std::unique_ptr<TokenSource>* held_out) {
  const double fraction = config.data.validation_fraction;
  const auto last = [&](int64_t size) -> int64_t {
    if (held_out == nullptr) return 0;
    return std::llround(static_cast<double>(size) * fraction);
  };
  ZERO_ASSIGN_OR_RETURN(const bool has_samples,
                        HasSamples(patterns, config.data.format));
  if (!has_samples) {
    ZERO_ASSIGN_OR_RETURN(
        auto source,
        OpenChecked(patterns, config, data->tokenizer.get(), num_threads));
    const int64_t kept = source->size() - last(source->size());
    if (held_out == nullptr) return source;
    *held_out = source->View(kept, source->size() - kept);
    return source->View(0, kept);
  }
  ZERO_ASSIGN_OR_RETURN(
      std::vector<Sample> samples,
      ReadChecked(patterns, config, *data->tokenizer, num_threads));
  const auto size = static_cast<int64_t>(samples.size());
  const int64_t kept = size - last(size);
  if (held_out != nullptr && (kept == size || kept == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.validation_fraction ", fraction, " holds out ",
                     kept == 0 ? "all" : "none", " of ",
                     Counted(size, "sample"), "; change it, or give more"));
  }
  const std::string& path = patterns[0];
  if (held_out != nullptr) {
    const std::vector<Sample> tail(samples.begin() + kept, samples.end());
    ZERO_ASSIGN_OR_RETURN(*held_out, Packed(tail, "data.validation_fraction",
                                            path, config, data));
    samples.resize(kept);
  }
  return Packed(samples, key, path, config, data);
}

absl::Status NoDocuments(const TokenSource& train, int32_t document_token) {
  return absl::InvalidArgumentError(absl::StrCat(
      "data.reset_attention_mask: true, but none of the ", train.size(),
      " tokens of ", train.shards()[0].path,
      train.shards().size() > 1 ? " ..." : "", " is the end-of-text token ",
      document_token, ", so there is only one document; ",
      train.is_text()
          ? "give every document a file of its own, or make token files with "
            "zero tokenize --separator"
          : "name the token between documents (data.tokenizer, "
            "data.eos_token_id), or make the token files with one",
      ", or set data.reset_attention_mask to false"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenModelTokenizer(
    const std::string& spec, int64_t vocab_size) {
  ZERO_ASSIGN_OR_RETURN(auto tokenizer, OpenTokenizer(spec));
  // A byte vocabulary without the end of text (256) is possible.
  const bool only_bytes =
      tokenizer->name() == "bytes" && vocab_size == kByteEndOfText;
  if (tokenizer->vocab_size() > vocab_size && !only_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokenizer ", tokenizer->name(), " has ", tokenizer->vocab_size(),
        " ids, more than the model's vocabulary of ", vocab_size,
        "; name the tokenizer of this model, or for a new model set "
        "model.vocab_size to at least ",
        tokenizer->vocab_size()));
  }
  return tokenizer;
}

std::vector<int32_t> EncodePrompt(const Tokenizer& tokenizer,
                                  const std::string& prompt,
                                  int64_t vocab_size) {
  std::vector<int32_t> ids = tokenizer.EncodePrompt(prompt);
  if (!ids.empty()) return ids;
  return {tokenizer.eot_id() < vocab_size ? tokenizer.eot_id() : '\n'};
}

int DataThreads(const Device& device) {
  return device.kind() == DeviceKind::kCpu ? device.info().num_threads
                                           : omp_get_num_procs();
}

absl::StatusOr<RunData> OpenRunData(const Config& config, bool need_train,
                                    int num_threads) {
  RunData data;
  const DataConfig& from = config.data;
  if (from.tokenizer != "none") {
    ZERO_ASSIGN_OR_RETURN(
        data.tokenizer,
        OpenModelTokenizer(from.tokenizer, config.model.vocab_size));
  }
  if (need_train || from.validation.empty()) {
    ZERO_ASSIGN_OR_RETURN(
        data.train,
        OpenPart("data.train", from.train, config, num_threads, &data,
                 from.validation_fraction > 0 ? &data.validation : nullptr));
  }
  if (!from.validation.empty()) {
    ZERO_ASSIGN_OR_RETURN(data.validation,
                          OpenPart("data.validation", from.validation, config,
                                   num_threads, &data, nullptr));
  }
  if (!from.reset_attention_mask) return data;
  data.document_token = data.tokenizer != nullptr
                            ? data.tokenizer->eot_id()
                            : static_cast<int32_t>(from.eos_token_id);
  if (need_train && data.train->rows() == nullptr &&
      !data.train->Contains(data.document_token)) {
    return NoDocuments(*data.train, data.document_token);
  }
  return data;
}

int64_t SampleContext(const Config& config, const RunData& data) {
  if (data.tokenizer == nullptr || config.training.sample.tokens == 0) return 0;
  return std::min(config.data.sequence_length,
                  config.model.max_position_embeddings);
}

std::vector<int32_t> SamplePrompt(const Config& config, const RunData& data) {
  return EncodePrompt(*data.tokenizer, config.training.sample.prompt,
                      config.model.vocab_size);
}

}  // namespace zero
