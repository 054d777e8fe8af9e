#include "engine/data/tokenize.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/data/token_file.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Bytes of text that one thread encodes at a time.
constexpr size_t kPieceBytes = size_t{1} << 18;
// Pieces queued per thread: enough that no thread idles, all held in memory.
constexpr size_t kPiecesPerThread = 8;
// How far to search for a cut that is unlikely to divide a token.
constexpr size_t kGoodCutBytes = size_t{1} << 16;
// Longer lines are cut.
constexpr size_t kLongestLine = size_t{64} << 20;

// Moves `at` (< text.size()) forward to the next cut after a line break, or, if
// there is none nearby, to the start of a character. White space after the line
// break is often one token with it.
size_t NextCut(absl::string_view text, size_t at) {
  const size_t line_end = text.find('\n', at);
  if (line_end != absl::string_view::npos && line_end - at < kLongestLine) {
    size_t good = line_end;
    while (good < text.size() && good - line_end < kGoodCutBytes) {
      if (good + 1 < text.size() && !absl::ascii_isspace(text[good + 1])) {
        return good + 1;
      }
      good = std::min(text.find('\n', good + 1), text.size());
    }
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

using TokenSink = std::function<absl::Status(absl::Span<const int32_t>)>;

// Documents in, tokens out, in the same order: pieces of them are encoded by
// many threads, each piece as if a document could be cut there. If that turns
// out wrong, the text is encoded again in a larger piece.
class ParallelEncoder {
 public:
  ParallelEncoder(const Tokenizer& tokenizer, int num_threads,
                  std::function<void(int64_t)> progress)
      : tokenizer_(tokenizer),
        start_(tokenizer.DocumentStart()),
        num_threads_(num_threads),
        progress_(std::move(progress)) {}

  // `document` and `sink` are used until Finish returns.
  absl::Status Add(absl::string_view document, const TokenSink* sink) {
    for (size_t begin = 0; begin < document.size();) {
      const size_t end = document.size() - begin <= kPieceBytes
                             ? document.size()
                             : NextCut(document, begin + kPieceBytes);
      pieces_.push_back({document, begin, end, sink});
      waiting_ += end - begin;
      begin = end;
      const size_t enough = num_threads_ * kPiecesPerThread;
      if (waiting_ >= enough * kPieceBytes) ZERO_RETURN_IF_ERROR(Finish());
    }
    return absl::OkStatus();
  }

  // Encodes and writes the pieces that are still queued.
  absl::Status Finish() {
    ZERO_RETURN_IF_ERROR(EncodePieces());
    for (Piece& piece : pieces_) ZERO_RETURN_IF_ERROR(Write(&piece));
    pieces_.clear();
    encoded_ += static_cast<int64_t>(waiting_);
    waiting_ = 0;
    if (progress_ != nullptr) progress_(encoded_);
    return absl::OkStatus();
  }

 private:
  struct Piece {
    absl::string_view document;
    size_t begin, end;
    const TokenSink* sink;
    std::vector<int32_t> ids = {};
    bool whole = false;  // no token crosses `end`
  };

  void Encode(Piece* piece) const {
    piece->ids.clear();
    piece->whole = tokenizer_.EncodePart(
        piece->document.substr(piece->begin), piece->end - piece->begin,
        /*continues=*/piece->begin > 0, &piece->ids);
  }

  absl::Status EncodePieces() {
    std::atomic<size_t> next{0};
    const auto encode = [&]() -> absl::Status {
      for (size_t i; (i = next.fetch_add(1)) < pieces_.size();) {
        Encode(&pieces_[i]);
      }
      return absl::OkStatus();
    };
    const size_t num_threads =
        std::min(num_threads_, std::max<size_t>(pieces_.size(), 1));
    std::vector<absl::Status> results(num_threads);
    std::vector<std::thread> helpers;
    for (size_t i = 1; i < num_threads; ++i) {
      helpers.emplace_back([&, i] { results[i] = CatchExceptions(encode); });
    }
    results[0] = CatchExceptions(encode);
    for (std::thread& helper : helpers) helper.join();
    for (const absl::Status& result : results) ZERO_RETURN_IF_ERROR(result);
    return absl::OkStatus();
  }

  // Writes a piece if no token crosses its beginning or its end.
  absl::Status Write(Piece* piece) {
    if (piece->begin == 0) {
      ZERO_RETURN_IF_ERROR((*piece->sink)(start_));
      written_ = tried_ = 0;
    }
    if (piece->begin != written_ || !piece->whole) {
      piece->begin = written_;
      const size_t size = piece->end - piece->begin;
      piece->whole = false;
      // Twice as much each time, so all tries cost about as much as one.
      if (size >= 2 * tried_ || piece->end == piece->document.size()) {
        Encode(piece);
        tried_ = size;
      }
    }
    if (!piece->whole) return absl::OkStatus();
    written_ = piece->end;
    tried_ = 0;
    return (*piece->sink)(piece->ids);
  }

  const Tokenizer& tokenizer_;
  const std::vector<int32_t> start_;
  const size_t num_threads_;
  const std::function<void(int64_t)> progress_;
  std::vector<Piece> pieces_;
  size_t waiting_ = 0;  // bytes of them
  int64_t encoded_ = 0;
  // Bytes of the current document that are written.
  size_t written_ = 0;
  size_t tried_ = 0;  // bytes after `written_` that ended within a token
};

// Calls `document` for each document of `text` with its offset.
absl::Status ForEachDocument(
    const TextFiles& text, const std::string& separator,
    const std::function<absl::Status(absl::string_view, int64_t)>& document) {
  int64_t position = 0;
  for (const MappedFile& file : text.files) {
    absl::string_view rest(reinterpret_cast<const char*>(file.data()),
                           static_cast<size_t>(file.size()));
    while (!rest.empty()) {
      const size_t end =
          separator.empty() ? absl::string_view::npos : rest.find(separator);
      if (end != 0) {
        ZERO_RETURN_IF_ERROR(document(rest.substr(0, end), position));
      }
      const size_t taken =
          end == absl::string_view::npos ? rest.size() : end + separator.size();
      position += static_cast<int64_t>(taken);
      rest.remove_prefix(taken);
    }
  }
  return absl::OkStatus();
}

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

// Files of an earlier run that this one replaces, or that a glob would read
// with the new shards.
absl::StatusOr<std::vector<std::string>> EarlierOutputs(
    const TokenizeOptions& options, const std::string& prefix) {
  std::vector<std::string> earlier;
  if (options.tokens_per_shard == 0) {
    for (const char* end : {".bin", "_val.bin"}) {
      const bool written = end[0] == '.' || options.validation_fraction > 0;
      if (written && PathExists(prefix + end)) earlier.push_back(prefix + end);
    }
    return earlier;
  }
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
    earlier.push_back(absl::StrCat(folder, "/", name));
  }
  return earlier;
}

absl::Status CheckMayReplace(const std::vector<std::string>& earlier,
                             bool force) {
  if (force || earlier.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "'", earlier[0], "' exists",
      earlier.size() > 1 ? absl::StrCat(" (and ", earlier.size() - 1, " more)")
                         : "",
      "; choose another output, or replace it with --force"));
}

// Refuses an output that would replace its own text.
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

// Whether text survives the tokenizer, tested on what is often lost.
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
      "\"; allow it with --allow-lossy, or use a tokenizer that does not "
      "(zero tokenize --train-sentencepiece trains one)"));
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
                     " tokens do not fit the header's int32; write shards of, "
                     "say, 100000000 tokens"));
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
  const std::string prefix(absl::StripSuffix(options.output, ".bin"));
  for (const char* part : {".bin", "_val.bin"}) {
    ZERO_RETURN_IF_ERROR(CheckIsNoInput(options.inputs, prefix + part));
  }
  ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(prefix)));
  ZERO_ASSIGN_OR_RETURN(const auto earlier, EarlierOutputs(options, prefix));
  ZERO_RETURN_IF_ERROR(CheckMayReplace(earlier, options.force));
  ZERO_ASSIGN_OR_RETURN(const auto tokenizer, OpenTokenizer(options.tokenizer));
  if (!options.allow_lossy) ZERO_RETURN_IF_ERROR(CheckLossless(*tokenizer));
  ZERO_ASSIGN_OR_RETURN(const TextFiles text, OpenTextFiles(options.inputs));

  TokenizeStats stats;
  stats.num_files = static_cast<int64_t>(text.files.size());
  stats.vocab_size = tokenizer->vocab_size();
  stats.bytes_per_token = stats.vocab_size <= 65536 ? 2 : 4;
  ShardedWriter train(prefix, options.tokens_per_shard, stats.bytes_per_token,
                      &stats.outputs);
  ShardedWriter validation(prefix + "_val", options.tokens_per_shard,
                           stats.bytes_per_token, &stats.outputs);
  const auto sink_to = [&stats](ShardedWriter* writer) -> TokenSink {
    return [&stats, writer](absl::Span<const int32_t> ids) {
      stats.num_tokens += static_cast<int64_t>(ids.size());
      return writer->Append(ids);
    };
  };
  const TokenSink to_train = sink_to(&train);
  const TokenSink to_validation = sink_to(&validation);
  const int64_t border =
      options.validation_fraction == 0
          ? std::numeric_limits<int64_t>::max()
          : std::llround(static_cast<double>(text.total_bytes) *
                         (1 - options.validation_fraction));
  ParallelEncoder encoder(*tokenizer, options.num_threads,
                          [&](int64_t encoded) {
                            if (options.progress)
                              options.progress(encoded, text.total_bytes);
                          });
  ZERO_RETURN_IF_ERROR(ForEachDocument(
      text, options.document_separator,
      [&](absl::string_view document, int64_t position) -> absl::Status {
        ++stats.num_documents;
        stats.text_bytes += static_cast<int64_t>(document.size());
        const int64_t to_border = std::max<int64_t>(border - position, 0);
        size_t cut = document.size();
        if (to_border < static_cast<int64_t>(document.size())) {
          // A document that starts after the border is not cut.
          cut = to_border == 0
                    ? 0
                    : NextCut(document, static_cast<size_t>(to_border));
        }
        ZERO_RETURN_IF_ERROR(encoder.Add(document.substr(0, cut), &to_train));
        return encoder.Add(document.substr(cut), &to_validation);
      }));
  ZERO_RETURN_IF_ERROR(encoder.Finish());
  ZERO_RETURN_IF_ERROR(train.Close());
  ZERO_RETURN_IF_ERROR(validation.Close());
  for (const std::string& path : earlier) {
    const bool replaced = absl::c_any_of(
        stats.outputs, [&](const auto& output) { return output.path == path; });
    if (!replaced) ZERO_RETURN_IF_ERROR(RemoveFile(path));
  }
  return stats;
}

absl::StatusOr<std::vector<int32_t>> TokenizeInMemory(
    const std::vector<std::string>& inputs, const Tokenizer& tokenizer,
    int num_threads) {
  ZERO_ASSIGN_OR_RETURN(const TextFiles text, OpenTextFiles(inputs));
  std::vector<int32_t> tokens;
  const TokenSink sink = [&](absl::Span<const int32_t> ids) {
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    return absl::OkStatus();
  };
  ParallelEncoder encoder(tokenizer, num_threads, nullptr);
  ZERO_RETURN_IF_ERROR(
      ForEachDocument(text, /*separator=*/"",
                      [&](absl::string_view document, int64_t /*position*/) {
                        return encoder.Add(document, &sink);
                      }));
  ZERO_RETURN_IF_ERROR(encoder.Finish());
  return tokens;
}

}  // namespace zero
