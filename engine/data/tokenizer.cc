#include "engine/data/tokenizer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/base/utf8.h"
#include "engine/data/sentencepiece_tokenizer.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer_json.h"

namespace zero {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return kByteVocabSize; }
  int32_t eot_id() const override { return kByteEndOfText; }
  std::string name() const override { return "bytes"; }

  bool EncodePart(absl::string_view text, size_t size, bool /*continues*/,
                  std::vector<int32_t>* ids) const override {
    ids->reserve(ids->size() + size);
    for (const char c : text.substr(0, size)) {
      ids->push_back(static_cast<uint8_t>(c));
    }
    return true;
  }

  std::string TokenBytes(int32_t id) const override {
    if (id == kByteEndOfText) return "";
    if (id < 0 || id > 255) return kReplacementCharacter;
    return std::string(1, static_cast<char>(id));
  }
};

}  // namespace

std::unique_ptr<Tokenizer> MakeByteTokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += TokenBytes(id);
  return text;
}

std::string FindTokenizer(const std::string& dir) {
  for (const char* name : {"/tokenizer.json", "/tokenizer.model"}) {
    if (PathExists(dir + name)) return dir + name;
  }
  return "";
}

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(
    const std::string& spec) {
  if (spec == "bytes") return MakeByteTokenizer();
  absl::string_view path = spec;
  if (absl::ConsumePrefix(&path, "sentencepiece:") ||
      absl::EndsWith(path, ".model")) {
    return OpenSentencePiece(std::string(path));
  }
  if (absl::EndsWith(path, ".json")) return OpenTokenizerJson(spec);
  if (IsFolder(spec)) {
    const std::string file = FindTokenizer(spec);
    if (!file.empty()) return OpenTokenizer(file);
    return absl::NotFoundError(absl::StrCat(
        "'", spec, "' has neither a tokenizer.json nor a tokenizer.model"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "tokenizer '", spec,
      "' is not known; expected bytes, the path of a "
      "tokenizer.json or of a SentencePiece .model, or a folder with one"));
}

std::string TakeValidUtf8(std::string* bytes) {
  std::string valid;
  absl::string_view rest = *bytes;
  while (!rest.empty()) {
    const int length = Utf8Length(rest);
    if (length == 0) break;
    const size_t taken = static_cast<size_t>(length > 0 ? length : -length);
    absl::StrAppend(&valid,
                    length > 0 ? rest.substr(0, taken) : kReplacementCharacter);
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
  const std::string text = pending_.empty() ? "" : kReplacementCharacter;
  pending_.clear();
  return text;
}

}  // namespace zero
