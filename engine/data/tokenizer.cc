#include "engine/data/tokenizer.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/base/math.h"
#include "engine/base/status.h"
#include "engine/base/utf8.h"
#include "engine/data/sentencepiece_model.h"
#include "engine/data/token_file.h"
#include "kernels/check.h"

namespace zero {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";  // U+FFFD
constexpr size_t kLongestTrainingLine = 4000;    // SentencePiece skips > 4192

class ByteTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return kByteVocabSize; }
  int32_t eot_id() const override { return kByteEndOfText; }
  std::string name() const override { return "bytes"; }

  void Encode(absl::string_view text, bool /*continues*/,
              std::vector<int32_t>* ids) const override {
    ids->reserve(ids->size() + text.size());
    for (const char c : text) ids->push_back(static_cast<uint8_t>(c));
  }

  std::string TokenBytes(int32_t id) const override {
    if (id == kByteEndOfText) return "";
    if (id < 0 || id > 255) return kReplacement;
    return std::string(1, static_cast<char>(id));
  }

  std::string Decode(absl::Span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) text += TokenBytes(id);
    return text;
  }
};

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string path,
                         std::unique_ptr<SentencePieceModel> model)
      : path_(std::move(path)), model_(std::move(model)) {
    model_->Encode("\n", 1, &line_break_);
    std::vector<int> ids;
    model_->Encode("a", 1, &ids);
    std::string bytes;
    for (const int id : ids) bytes += model_->PieceBytes(id);
    adds_space_ = absl::StartsWith(bytes, " ");
  }

  int64_t vocab_size() const override { return model_->size(); }
  int32_t eot_id() const override { return model_->eos_id(); }
  std::string name() const override {
    return absl::StrCat("sentencepiece:", path_);
  }

  using Tokenizer::Encode;
  void Encode(absl::string_view text, bool continues,
              std::vector<int32_t>* ids) const override {
    if (text.empty()) return;
    std::vector<int> pieces;
    if (!continues || !adds_space_) {
      model_->Encode(text.data(), text.size(), &pieces);
      ids->insert(ids->end(), pieces.begin(), pieces.end());
      return;
    }
    // The space goes before the line break, which is then cut off again.
    const std::string marked = absl::StrCat("\n", text);
    model_->Encode(marked.data(), marked.size(), &pieces);
    const bool is_marked =
        pieces.size() >= line_break_.size() &&
        std::equal(line_break_.begin(), line_break_.end(), pieces.begin());
    const size_t skip = is_marked ? line_break_.size() : 0;
    ids->insert(ids->end(), pieces.begin() + static_cast<std::ptrdiff_t>(skip),
                pieces.end());
  }

  std::string TokenBytes(int32_t id) const override {
    if (id < 0 || id >= model_->size()) return kReplacement;
    return model_->PieceBytes(id);
  }

  std::string Decode(absl::Span<const int32_t> ids) const override {
    // Ids outside the vocabulary cut the text, since the library refuses them.
    std::string text;
    std::vector<int> known;
    for (const int32_t id : ids) {
      if (0 <= id && id < model_->size()) {
        known.push_back(id);
        continue;
      }
      absl::StrAppend(&text, model_->Decode(known), kReplacement);
      known.clear();
    }
    absl::StrAppend(&text, model_->Decode(known));
    return text;
  }

 private:
  std::string path_;
  std::unique_ptr<SentencePieceModel> model_;
  std::vector<int> line_break_;  // ids of "\n" at the start of a text
  bool adds_space_ = false;      // a text begins with a space of the model's
};

// The lines of text files, cut to what the trainer takes; every `keep`-th.
class LineReader {
 public:
  LineReader(std::vector<MappedFile> files, int64_t keep)
      : files_(std::move(files)), keep_(keep) {}

  bool Next(std::string* line) {
    for (;;) {
      if (file_ == files_.size()) return false;
      const absl::string_view text(
          reinterpret_cast<const char*>(files_[file_].data()),
          static_cast<size_t>(files_[file_].size()));
      if (at_ >= text.size()) {
        ++file_;
        at_ = 0;
        continue;
      }
      const absl::string_view piece = TakeLine(text);
      const bool usable = !piece.empty() && !absl::StrContains(piece, '\0');
      if (!usable || count_++ % keep_ != 0) continue;
      line->assign(piece.data(), piece.size());
      return true;
    }
  }

 private:
  absl::string_view TakeLine(absl::string_view text) {
    const size_t end = std::min(text.find('\n', at_), text.size());
    size_t stop = std::min(end, at_ + kLongestTrainingLine);
    // Not within a character: back over UTF-8's continuation bytes.
    while (stop < end && stop > at_ + 1 && (text[stop] & 0xC0) == 0x80) --stop;
    const absl::string_view line = text.substr(at_, stop - at_);
    at_ = stop == end ? end + 1 : stop;
    return line;
  }

  std::vector<MappedFile> files_;
  int64_t keep_;
  size_t file_ = 0;
  size_t at_ = 0;
  int64_t count_ = 0;
};

absl::Status CheckTraining(const SentencePieceTraining& options) {
  if (options.model_type != "bpe" && options.model_type != "unigram") {
    return absl::InvalidArgumentError(
        absl::StrCat("SentencePiece model type '", options.model_type,
                     "' is not one of bpe, unigram"));
  }
  // 256 bytes, unknown, end of text, and something to learn.
  if (options.vocab_size < 300 || options.vocab_size > 1000000) {
    return absl::InvalidArgumentError(
        absl::StrCat("SentencePiece vocabulary size ", options.vocab_size,
                     " is not in [300, 1000000] (258 tokens are the bytes, "
                     "unknown and end of text)"));
  }
  if (options.model_prefix.empty()) {
    return absl::InvalidArgumentError(
        "SentencePiece model prefix is empty; it names the .model to write");
  }
  ZERO_CHECK_GE(options.max_input_bytes, 1);
  ZERO_CHECK_GE(options.num_threads, 1);
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Tokenizer> MakeByteTokenizer() {
  return std::make_unique<ByteTokenizer>();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenSentencePiece(
    const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(const std::string serialized, ReadFile(path));
  std::string error;
  auto model = SentencePieceModel::Parse(serialized, &error);
  if (serialized.empty() || model == nullptr || model->size() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is not a SentencePiece model",
                     error.empty() ? "" : absl::StrCat(" (", error, ")"),
                     "; expected a .model from spm_train or zero tokenize "
                     "--train-sentencepiece"));
  }
  if (model->eos_id() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path,
                     "' has no end-of-sentence token, which stands between "
                     "documents; train it with an eos_id"));
  }
  return std::unique_ptr<Tokenizer>(
      std::make_unique<SentencePieceTokenizer>(path, std::move(model)));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(
    const std::string& spec) {
  if (spec == "bytes") return MakeByteTokenizer();
  absl::string_view path = spec;
  if (absl::ConsumePrefix(&path, "sentencepiece:") ||
      absl::EndsWith(path, ".model")) {
    return OpenSentencePiece(std::string(path));
  }
  if (absl::EndsWith(path, ".json")) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokenizer '", spec,
                     "': Hugging Face tokenizers are not read by zero "
                     "yet; make token files with tools/tokenize.py"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tokenizer '", spec,
                   "' is not known; expected bytes or the path of a "
                   "SentencePiece .model"));
}

absl::Status TrainSentencePiece(const SentencePieceTraining& options) {
  ZERO_RETURN_IF_ERROR(CheckTraining(options));
  ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(options.model_prefix)));
  ZERO_ASSIGN_OR_RETURN(const TextFiles text, OpenTextFiles(options.inputs));
  const size_t num_files = text.files.size();
  LineReader lines(text.files,
                   CeilDiv(text.total_bytes, options.max_input_bytes));
  const std::unordered_map<std::string, std::string> arguments = {
      {"model_type", options.model_type},
      {"vocab_size", absl::StrCat(options.vocab_size)},
      {"num_threads", absl::StrCat(options.num_threads)},
      // Nothing is lost: no normalization, unknown characters as bytes.
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"split_digits", "true"},
      {"unk_id", "0"},
      {"eos_id", "1"},
      {"eos_piece", "<|endoftext|>"},
      {"bos_id", "-1"},
      {"pad_id", "-1"},
  };
  std::string error;
  const std::string model = TrainSentencePieceModel(
      arguments, [&](std::string* line) { return lines.Next(line); }, &error);
  if (model.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("training SentencePiece on ", text.total_bytes, " bytes (",
                     num_files, num_files == 1 ? " file" : " files",
                     "), vocabulary ", options.vocab_size, ": ", error));
  }
  return WriteFileAtomically(options.model_prefix + ".model", model);
}

std::string TakeValidUtf8(std::string* bytes) {
  std::string valid;
  absl::string_view rest = *bytes;
  while (!rest.empty()) {
    const int length = Utf8Length(rest);
    if (length == 0) break;
    const size_t taken = static_cast<size_t>(length > 0 ? length : -length);
    absl::StrAppend(&valid, length > 0 ? rest.substr(0, taken) : kReplacement);
    rest.remove_prefix(taken);
  }
  bytes->erase(0, bytes->size() - rest.size());
  return valid;
}

std::string StreamDecoder::Push(int32_t id) {
  pending_ += tokenizer_->TokenBytes(id);
  return TakeValidUtf8(&pending_);
}

std::string StreamDecoder::Finish() {
  const std::string text = pending_.empty() ? "" : kReplacement;
  pending_.clear();
  return text;
}

}  // namespace zero
