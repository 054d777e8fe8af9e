#include "engine/data/sentencepiece_tokenizer.h"

#include <algorithm>
#include <cstdlib>
#include <unordered_map>
#include <utility>

// The library gives std::string_view a name in a namespace absl of its own,
// which cannot meet Abseil's in one source file.
#define absl sentencepiece_absl
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>
#undef absl

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/base/utf8.h"
#include "engine/data/token_file.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

// Exported by the library, but declared in no installed header.
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}  // namespace sentencepiece::logging

namespace zero {
namespace {

using sentencepiece::SentencePieceProcessor;

constexpr char kSpaceMark[] = "\xE2\x96\x81";  // U+2581, the visible space
constexpr size_t kLongestTrainingLine = 4000;  // SentencePiece skips > 4192

// Errors are returned as a status; the library's log would repeat them.
void SilenceLibrary() { sentencepiece::logging::SetMinLogLevel(/*fatal=*/3); }

// "Internal: file.cc(12) [condition] words" -> "words".
std::string Words(const sentencepiece::util::Status& status) {
  const std::string message = status.ToString();
  const size_t bracket = message.rfind("] ");
  const bool says_more =
      bracket != std::string::npos && bracket + 2 < message.size();
  return says_more ? message.substr(bracket + 2) : message;
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string path,
                         std::unique_ptr<SentencePieceProcessor> model)
      : path_(std::move(path)), model_(std::move(model)) {
    line_break_ = model_->EncodeAsIds("\n");
    std::string bytes;
    for (const int id : model_->EncodeAsIds("a")) bytes += TokenBytes(id);
    adds_space_ = absl::StartsWith(bytes, " ");
  }

  int64_t vocab_size() const override { return model_->GetPieceSize(); }
  std::map<std::string, std::string> Files() const override {
    return {{"tokenizer.model", model_->serialized_model_proto()}};
  }
  int32_t eot_id() const override { return model_->eos_id(); }
  std::string name() const override {
    return absl::StrCat("sentencepiece:", path_);
  }

  bool EncodePart(absl::string_view text, size_t size, bool continues,
                  std::vector<int32_t>* ids) const override {
    text = text.substr(0, size);
    if (text.empty()) return true;
    if (!continues || !adds_space_) {
      const std::vector<int> pieces =
          model_->EncodeAsIds({text.data(), text.size()});
      ids->insert(ids->end(), pieces.begin(), pieces.end());
      return true;
    }
    // The space goes before the line break, which is then cut off again.
    const std::vector<int> pieces =
        model_->EncodeAsIds(absl::StrCat("\n", text));
    const bool is_marked =
        pieces.size() >= line_break_.size() &&
        std::equal(line_break_.begin(), line_break_.end(), pieces.begin());
    const size_t skip = is_marked ? line_break_.size() : 0;
    ids->insert(ids->end(), pieces.begin() + static_cast<std::ptrdiff_t>(skip),
                pieces.end());
    return true;
  }

  std::string TokenBytes(int32_t id) const override {
    if (id < 0 || id >= model_->GetPieceSize()) return kReplacementCharacter;
    if (model_->IsControl(id)) return "";
    if (model_->IsUnknown(id)) return model_->DecodeIds({id});
    const std::string& piece = model_->IdToPiece(id);
    if (model_->IsByte(id) && piece.size() == 6) {  // "<0x0A>"
      return std::string(
          1, static_cast<char>(std::strtol(piece.c_str() + 3, nullptr, 16)));
    }
    return absl::StrReplaceAll(piece, {{kSpaceMark, " "}});
  }

  std::string Decode(absl::Span<const int32_t> ids) const override {
    // Ids outside the vocabulary cut the text, since the library refuses them.
    std::string text;
    std::vector<int> known;
    for (const int32_t id : ids) {
      if (0 <= id && id < model_->GetPieceSize()) {
        known.push_back(id);
        continue;
      }
      absl::StrAppend(&text, model_->DecodeIds(known), kReplacementCharacter);
      known.clear();
    }
    absl::StrAppend(&text, model_->DecodeIds(known));
    return text;
  }

 private:
  std::string path_;
  std::unique_ptr<SentencePieceProcessor> model_;
  std::vector<int> line_break_;  // ids of "\n" at the start of a text
  bool adds_space_ = false;      // a text begins with a space of the model's
};

// The lines of text files, cut to what the trainer takes; every `keep`-th.
class LineReader : public sentencepiece::SentenceIterator {
 public:
  LineReader(const std::vector<MappedFile>& files, int64_t keep)
      : files_(files), keep_(keep) {
    Next();
  }

  bool done() const override { return file_ == files_.size(); }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    while (!done()) {
      const absl::string_view text(
          reinterpret_cast<const char*>(files_[file_].data()),
          static_cast<size_t>(files_[file_].size()));
      if (at_ >= text.size()) {
        ++file_;
        at_ = 0;
        continue;
      }
      line_ = std::string(TakeLine(text));
      const bool usable = !line_.empty() && !absl::StrContains(line_, '\0');
      if (usable && count_++ % keep_ == 0) return;
    }
  }

 private:
  absl::string_view TakeLine(absl::string_view text) {
    const size_t end = std::min(text.find('\n', at_), text.size());
    size_t stop = std::min(end, at_ + kLongestTrainingLine);
    // A cut within a character moves back over UTF-8's continuation bytes.
    while (stop < end && stop > at_ + 1 && (text[stop] & 0xC0) == 0x80) --stop;
    const absl::string_view line = text.substr(at_, stop - at_);
    at_ = stop == end ? end + 1 : stop;
    return line;
  }

  const std::vector<MappedFile>& files_;
  int64_t keep_;
  size_t file_ = 0;
  size_t at_ = 0;
  int64_t count_ = 0;
  std::string line_;
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

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenSentencePiece(
    const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(const std::string serialized, ReadFile(path));
  SilenceLibrary();
  auto model = std::make_unique<SentencePieceProcessor>();
  auto status = model->LoadFromSerializedProto(serialized);
  if (status.ok()) status = model->status();
  if (serialized.empty() || !status.ok() || model->GetPieceSize() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is not a SentencePiece model",
                     status.ok() ? "" : absl::StrCat(" (", Words(status), ")"),
                     "; expected a .model from spm_train or zero tokenize "
                     "--train-sentencepiece"));
  }
  if (model->eos_id() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path,
                     "' has no end-of-sentence token, which separates "
                     "documents; train it with an eos_id"));
  }
  return std::unique_ptr<Tokenizer>(
      std::make_unique<SentencePieceTokenizer>(path, std::move(model)));
}

absl::Status TrainSentencePiece(const SentencePieceTraining& options) {
  ZERO_RETURN_IF_ERROR(CheckTraining(options));
  ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(options.model_prefix)));
  ZERO_ASSIGN_OR_RETURN(const TextFiles text, OpenTextFiles(options.inputs));
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
  SilenceLibrary();
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(arguments, &lines, &model);
  if (!status.ok()) {
    const size_t num_files = text.files.size();
    return absl::InvalidArgumentError(absl::StrCat(
        "training SentencePiece on ", text.total_bytes, " bytes (", num_files,
        num_files == 1 ? " file" : " files", "), vocabulary ",
        options.vocab_size, ": ", Words(status)));
  }
  return WriteFileAtomically(options.model_prefix + ".model", model);
}

}  // namespace zero
