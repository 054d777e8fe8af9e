#include "engine/data/sentencepiece_model.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <cstdlib>
#include <mutex>

// Exported by the library, but declared in no installed header.
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}  // namespace sentencepiece::logging

namespace zero {
namespace {

constexpr int kFatalOnly = 3;
// U+2581, SentencePiece's visible space.
constexpr char kSpaceMark[] = "\xE2\x96\x81";

// What went wrong comes back as a status; its log would only repeat it.
void Silence() {
  static std::once_flag once;
  std::call_once(once,
                 [] { sentencepiece::logging::SetMinLogLevel(kFatalOnly); });
}

// "Internal: file.cc(12) [condition] words" -> "words".
std::string Words(const sentencepiece::util::Status& status) {
  const std::string message = status.ToString();
  const size_t bracket = message.rfind("] ");
  if (bracket != std::string::npos && bracket + 2 < message.size()) {
    return message.substr(bracket + 2);
  }
  return message;
}

class LineIterator : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const std::function<bool(std::string*)>& next_line)
      : next_line_(next_line) {
    Next();
  }
  bool done() const override { return done_; }
  void Next() override { done_ = !next_line_(&line_); }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::function<bool(std::string*)>& next_line_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

struct SentencePieceModel::Impl {
  sentencepiece::SentencePieceProcessor processor;
};

SentencePieceModel::SentencePieceModel() : impl_(std::make_unique<Impl>()) {}
SentencePieceModel::~SentencePieceModel() = default;

std::unique_ptr<SentencePieceModel> SentencePieceModel::Parse(
    const std::string& serialized, std::string* error) {
  Silence();
  std::unique_ptr<SentencePieceModel> model(new SentencePieceModel);
  auto& processor = model->impl_->processor;
  const auto status = processor.LoadFromSerializedProto(serialized);
  if (!status.ok() || !processor.status().ok()) {
    *error = Words(status.ok() ? processor.status() : status);
    return nullptr;
  }
  return model;
}

void SentencePieceModel::Encode(const char* text, size_t bytes,
                                std::vector<int>* ids) const {
  impl_->processor.Encode(std::string_view(text, bytes), ids).IgnoreError();
}

std::string SentencePieceModel::Decode(const std::vector<int>& ids) const {
  std::string text;
  impl_->processor.Decode(ids, &text).IgnoreError();
  return text;
}

int SentencePieceModel::size() const { return impl_->processor.GetPieceSize(); }

int SentencePieceModel::eos_id() const { return impl_->processor.eos_id(); }

std::string SentencePieceModel::PieceBytes(int id) const {
  const auto& processor = impl_->processor;
  if (processor.IsControl(id)) return "";
  if (processor.IsUnknown(id)) return processor.DecodeIds({id});
  const std::string& piece = processor.IdToPiece(id);
  if (processor.IsByte(id) && piece.size() == 6) {  // "<0x0A>"
    return std::string(
        1, static_cast<char>(std::strtol(piece.c_str() + 3, nullptr, 16)));
  }
  std::string bytes;
  size_t at = 0;
  for (;;) {
    const size_t mark = piece.find(kSpaceMark, at);
    bytes.append(piece, at, mark - at);
    if (mark == std::string::npos) return bytes;
    bytes += ' ';
    at = mark + sizeof(kSpaceMark) - 1;
  }
}

std::string TrainSentencePieceModel(
    const std::unordered_map<std::string, std::string>& arguments,
    const std::function<bool(std::string* line)>& next_line,
    std::string* error) {
  Silence();
  LineIterator lines(next_line);
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(arguments, &lines, &model);
  if (!status.ok()) {
    *error = Words(status);
    return "";
  }
  return model;
}

}  // namespace zero
