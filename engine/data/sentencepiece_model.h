// A wall around SentencePiece: its headers define a namespace absl of their
// own, which cannot meet Abseil's in one source file. Nothing here includes
// Abseil; tokenizer.cc is the only user.
#ifndef ZERO_ENGINE_DATA_SENTENCEPIECE_MODEL_H_
#define ZERO_ENGINE_DATA_SENTENCEPIECE_MODEL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace zero {

// Threads: const methods may be called from many threads.
class SentencePieceModel {
 public:
  ~SentencePieceModel();

  // Null and *error in words when `serialized` is no model.
  static std::unique_ptr<SentencePieceModel> Parse(
      const std::string& serialized, std::string* error);

  void Encode(const char* text, size_t bytes, std::vector<int>* ids) const;
  std::string Decode(const std::vector<int>& ids) const;

  int size() const;
  int eos_id() const;  // -1: none

  // The bytes of a piece in the middle of a text. REQUIRES: 0 <= id < size().
  std::string PieceBytes(int id) const;

 private:
  struct Impl;
  SentencePieceModel();
  std::unique_ptr<Impl> impl_;
};

// Trains on the lines that `next_line` gives until it returns false; the
// arguments are spm_train's. Returns the serialized model, or an empty string
// and *error.
std::string TrainSentencePieceModel(
    const std::unordered_map<std::string, std::string>& arguments,
    const std::function<bool(std::string* line)>& next_line,
    std::string* error);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SENTENCEPIECE_MODEL_H_
