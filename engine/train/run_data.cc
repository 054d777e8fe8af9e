#include "engine/train/run_data.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/data/tokenize.h"

namespace zero {
namespace {

// More text than this is worth token files, which every start reads at once.
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
      " ids, but the token file(s) ", absl::StrJoin(patterns, ", "),
      " hold larger ones, of another tokenizer: name that one, or set "
      "data.tokenizer to \"none\""));
}

absl::Status NoDocuments(const TokenSource& train, int32_t document_token) {
  return absl::InvalidArgumentError(absl::StrCat(
      "data.reset_attention_mask: true, but none of the ", train.size(),
      " tokens of ", train.shards()[0].path,
      train.shards().size() > 1 ? " ..." : "", " is the end-of-text token ",
      document_token, ", so that there is one document only; ",
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
  // A byte vocabulary without the end of text (256) is a model of its own.
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
        OpenChecked(from.train, config, data.tokenizer.get(), num_threads));
  }
  if (!from.validation.empty()) {
    ZERO_ASSIGN_OR_RETURN(data.validation,
                          OpenChecked(from.validation, config,
                                      data.tokenizer.get(), num_threads));
  } else if (from.validation_fraction > 0) {
    const int64_t held_out = std::llround(
        static_cast<double>(data.train->size()) * from.validation_fraction);
    const int64_t kept = data.train->size() - held_out;
    data.validation = data.train->View(kept, held_out);
    data.train = data.train->View(0, kept);
  }
  if (!from.reset_attention_mask) return data;
  data.document_token = data.tokenizer != nullptr
                            ? data.tokenizer->eot_id()
                            : static_cast<int32_t>(from.eos_token_id);
  if (need_train && !data.train->Contains(data.document_token)) {
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
