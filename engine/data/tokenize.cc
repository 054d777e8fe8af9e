#include "engine/data/tokenize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "engine/base/status.h"
#include "engine/data/token_file.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Text encoded at once; cut behind a line break so that the ids do not depend
// on the cut.
constexpr size_t kPieceBytes = size_t{1} << 20;
// A line longer than this is cut within.
constexpr size_t kLongestLine = size_t{64} << 20;

// Moves `at` (< text.size()) forward to the next cut behind a line break, or,
// where there is none for long, to the start of a character.
size_t NextCut(absl::string_view text, size_t at) {
  const size_t line_end = text.find('\n', at);
  if (line_end != absl::string_view::npos && line_end - at < kLongestLine) {
    return line_end + 1;
  }
  if (text.size() - at < kLongestLine) return text.size();
  at += kLongestLine;
  while (at < text.size() && (text[at] & 0xC0) == 0x80) ++at;
  return at;
}

// The token files of one part (training or validation), shard after shard.
class ShardedWriter {
 public:
  ShardedWriter(std::string prefix, int64_t tokens_per_shard,
                int bytes_per_token,
                std::vector<TokenizeStats::Output>* outputs)
      : prefix_(std::move(prefix)),
        tokens_per_shard_(tokens_per_shard),
        bytes_per_token_(bytes_per_token),
        outputs_(outputs) {}

  absl::Status Append(absl::Span<const int32_t> ids) {
    while (!ids.empty()) {
      if (writer_ == nullptr) ZERO_RETURN_IF_ERROR(Open());
      int64_t n = static_cast<int64_t>(ids.size());
      if (tokens_per_shard_ > 0) {
        n = std::min(n, tokens_per_shard_ - writer_->num_tokens());
      }
      ZERO_RETURN_IF_ERROR(writer_->Append(ids.data(), n));
      if (writer_->num_tokens() == tokens_per_shard_) {
        ZERO_RETURN_IF_ERROR(Close());
      }
      ids.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

  absl::Status Close() {
    if (writer_ == nullptr) return absl::OkStatus();
    ZERO_RETURN_IF_ERROR(writer_->Commit());
    outputs_->push_back({path_, writer_->num_tokens()});
    writer_.reset();
    return absl::OkStatus();
  }

 private:
  absl::Status Open() {
    path_ = tokens_per_shard_ == 0
                ? absl::StrCat(prefix_, ".bin")
                : absl::StrFormat("%s_%06d.bin", prefix_, num_shards_++);
    ZERO_ASSIGN_OR_RETURN(writer_,
                          TokenFileWriter::Create(path_, bytes_per_token_));
    return absl::OkStatus();
  }

  std::string prefix_;
  int64_t tokens_per_shard_;
  int bytes_per_token_;
  std::vector<TokenizeStats::Output>* outputs_;
  std::unique_ptr<TokenFileWriter> writer_;
  std::string path_;
  int64_t num_shards_ = 0;
};

// Documents in, tokens out, with the border to the validation part.
class DocumentEncoder {
 public:
  DocumentEncoder(const Tokenizer* tokenizer, int64_t border_byte,
                  ShardedWriter* train, ShardedWriter* validation,
                  TokenizeStats* stats)
      : tokenizer_(tokenizer),
        border_(border_byte),
        train_(train),
        validation_(validation),
        stats_(stats) {}

  // `position` is where the document starts in all the text.
  absl::Status Add(absl::string_view document, int64_t position) {
    ++stats_->num_documents;
    stats_->text_bytes += static_cast<int64_t>(document.size());
    const int64_t to_border = std::max<int64_t>(border_ - position, 0);
    size_t cut = document.size();
    if (to_border < static_cast<int64_t>(document.size())) {
      // A document that starts behind the border is not cut.
      cut = to_border == 0 ? 0
                           : NextCut(document, static_cast<size_t>(to_border));
    }
    ZERO_RETURN_IF_ERROR(EncodePart(document.substr(0, cut), train_));
    return EncodePart(document.substr(cut), validation_);
  }

 private:
  absl::Status EncodePart(absl::string_view text, ShardedWriter* out) {
    if (text.empty()) return absl::OkStatus();
    ids_.assign(1, tokenizer_->eot_id());
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.size() - begin <= kPieceBytes
                             ? text.size()
                             : NextCut(text, begin + kPieceBytes);
      tokenizer_->Encode(text.substr(begin, end - begin), begin > 0, &ids_);
      ZERO_RETURN_IF_ERROR(out->Append(ids_));
      stats_->num_tokens += static_cast<int64_t>(ids_.size());
      ids_.clear();
      begin = end;
    }
    return absl::OkStatus();
  }

  const Tokenizer* tokenizer_;
  int64_t border_;
  ShardedWriter* train_;
  ShardedWriter* validation_;
  TokenizeStats* stats_;
  std::vector<int32_t> ids_;
};

absl::Status CheckOptions(const TokenizeOptions& options) {
  if (!absl::EndsWith(options.output, ".bin") ||
      options.output.size() == strlen(".bin")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "output '", options.output, "' must be a name that ends in .bin"));
  }
  if (options.tokens_per_shard < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens per shard ", options.tokens_per_shard,
                     " is negative; 0 means one file"));
  }
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    return absl::InvalidArgumentError(absl::StrCat("validation fraction ",
                                                   options.validation_fraction,
                                                   " is not in [0, 1)"));
  }
  return absl::OkStatus();
}

// Shards of an earlier run would be read together with the new ones.
absl::Status CheckNoOldShards(const std::string& prefix) {
  const std::string folder = FolderOf(prefix);
  const std::string stem = prefix.substr(prefix.rfind('/') + 1) + "_";
  ZERO_ASSIGN_OR_RETURN(const auto names, ListFolder(folder));
  for (const std::string& name : names) {
    absl::string_view number = name;
    if (!absl::ConsumePrefix(&number, stem)) continue;
    absl::ConsumePrefix(&number, "val_");
    if (!absl::ConsumeSuffix(&number, ".bin") || number.empty() ||
        !absl::c_all_of(number, absl::ascii_isdigit)) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("'", folder, "/", name,
                     "' exists from an earlier run, and a glob would read "
                     "both; remove it or choose another output"));
  }
  return absl::OkStatus();
}

// The output would take the place of its own text.
absl::Status CheckIsNoInput(const std::vector<std::string>& inputs,
                            const std::string& output) {
  ZERO_ASSIGN_OR_RETURN(const auto paths, ExpandPaths(inputs));
  for (const std::string& path : paths) {
    std::error_code missing;
    if (std::filesystem::equivalent(path, output, missing)) {
      return absl::InvalidArgumentError(
          absl::StrCat("output '", output, "' is also an input, '", path,
                       "'; choose another name"));
    }
  }
  return absl::OkStatus();
}

// Whether text survives the tokenizer, tried on what is often lost.
absl::Status CheckLossless(const Tokenizer& tokenizer) {
  const std::string text =
      "Two  spaces,\n\ttabs\n\nand \xEF\xAC\x81ne lines.\n";
  const std::string back = tokenizer.Decode(tokenizer.Encode(text));
  if (back == text) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tokenizer ", tokenizer.name(), " changes the text: \"",
      absl::StrReplaceAll(text, {{"\n", "\\n"}, {"\t", "\\t"}}),
      "\" comes back as \"",
      absl::StrReplaceAll(back, {{"\n", "\\n"}, {"\t", "\\t"}}),
      "\"; train one with normalization_rule_name=identity and byte_fallback "
      "(zero tokenize --train-sentencepiece does), or allow it with "
      "--allow-lossy"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenFileWriter>> TokenFileWriter::Create(
    const std::string& path, int bytes_per_token) {
  ZERO_CHECK(bytes_per_token == 2 || bytes_per_token == 4) << bytes_per_token;
  ZERO_ASSIGN_OR_RETURN(auto file, AtomicFile::Create(path));
  const std::array<int32_t, kTokenHeaderInts> no_header_yet = {};
  ZERO_RETURN_IF_ERROR(file->Append(no_header_yet.data(), kTokenHeaderBytes));
  return std::unique_ptr<TokenFileWriter>(
      new TokenFileWriter(std::move(file), bytes_per_token));
}

absl::Status TokenFileWriter::Append(const int32_t* ids, int64_t n) {
  num_tokens_ += n;
  if (bytes_per_token_ == 4) {
    for (int64_t i = 0; i < n; ++i) ZERO_CHECK_GE(ids[i], 0);
    return file_->Append(ids, static_cast<size_t>(n) * 4);
  }
  narrow_.resize(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    ZERO_CHECK(0 <= ids[i] && ids[i] <= 65535) << "token id " << ids[i];
    narrow_[static_cast<size_t>(i)] = static_cast<uint16_t>(ids[i]);
  }
  return file_->Append(narrow_.data(), narrow_.size() * 2);
}

absl::Status TokenFileWriter::Commit() {
  if (num_tokens_ > std::numeric_limits<int32_t>::max()) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", file_->path(), "': ", num_tokens_,
                     " tokens do not fit the header's int32; write shards of "
                     "100000000 tokens, say"));
  }
  std::array<int32_t, kTokenHeaderInts> header = {};
  header[0] = bytes_per_token_ == 2 ? kTokenMagicU16 : kTokenMagicU32;
  header[1] = bytes_per_token_ == 2 ? 1 : 7;  // as llm.c's readers expect
  header[2] = static_cast<int32_t>(num_tokens_);
  ZERO_RETURN_IF_ERROR(file_->WriteAt(0, header.data(), kTokenHeaderBytes));
  return file_->Commit();
}

absl::StatusOr<TokenizeStats> TokenizeFiles(const TokenizeOptions& options) {
  ZERO_RETURN_IF_ERROR(CheckOptions(options));
  ZERO_ASSIGN_OR_RETURN(const auto tokenizer, OpenTokenizer(options.tokenizer));
  if (!options.allow_lossy) ZERO_RETURN_IF_ERROR(CheckLossless(*tokenizer));
  ZERO_ASSIGN_OR_RETURN(const TextFiles text, OpenTextFiles(options.inputs));

  const std::string prefix(absl::StripSuffix(options.output, ".bin"));
  for (const char* part : {".bin", "_val.bin"}) {
    ZERO_RETURN_IF_ERROR(CheckIsNoInput(options.inputs, prefix + part));
  }
  ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(prefix)));
  if (options.tokens_per_shard > 0) {
    ZERO_RETURN_IF_ERROR(CheckNoOldShards(prefix));
  }
  TokenizeStats stats;
  stats.num_files = static_cast<int64_t>(text.files.size());
  stats.vocab_size = tokenizer->vocab_size();
  stats.bytes_per_token = stats.vocab_size <= 65536 ? 2 : 4;
  ShardedWriter train(prefix, options.tokens_per_shard, stats.bytes_per_token,
                      &stats.outputs);
  ShardedWriter validation(prefix + "_val", options.tokens_per_shard,
                           stats.bytes_per_token, &stats.outputs);
  const int64_t border =
      options.validation_fraction == 0
          ? std::numeric_limits<int64_t>::max()
          : std::llround(static_cast<double>(text.total_bytes) *
                         (1 - options.validation_fraction));
  DocumentEncoder encoder(tokenizer.get(), border, &train, &validation, &stats);

  int64_t position = 0;
  for (const MappedFile& file : text.files) {
    absl::string_view rest(reinterpret_cast<const char*>(file.data()),
                           static_cast<size_t>(file.size()));
    while (!rest.empty()) {
      const size_t end = options.document_separator.empty()
                             ? absl::string_view::npos
                             : rest.find(options.document_separator);
      const absl::string_view document = rest.substr(0, end);
      if (!document.empty()) {
        ZERO_RETURN_IF_ERROR(encoder.Add(document, position));
      }
      const size_t taken = end == absl::string_view::npos
                               ? rest.size()
                               : end + options.document_separator.size();
      position += static_cast<int64_t>(taken);
      rest.remove_prefix(taken);
    }
  }
  ZERO_RETURN_IF_ERROR(train.Close());
  ZERO_RETURN_IF_ERROR(validation.Close());
  return stats;
}

}  // namespace zero
