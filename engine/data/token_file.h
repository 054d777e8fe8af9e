// Token files: many shards, mapped read only, as one stream of tokens.
//
// Formats (all little-endian):
//   llm.c     256 int32 header {magic, version 1, token count, 0 ...}, then the
//             tokens; magic 20240520: uint16, magic 20240801: uint32, whose
//             version is 7 in llm.c's Llama-3 files and 1 elsewhere.
//   raw nanoGPT's .bin: only uint16 tokens.
//   jsonl     not read here: samples.h makes PackedRows of it.
//   text      UTF-8 read as bytes: token = byte value. Vocabulary 257: 256 is
//             the end-of-text token, which separates files.
// Detection: the magic decides; else the extension .bin means raw; anything
// else is text unless it is recognizably binary, which is refused.
#ifndef ZERO_ENGINE_DATA_TOKEN_FILE_H_
#define ZERO_ENGINE_DATA_TOKEN_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/file.h"
#include "engine/data/token_format.h"

namespace zero {

// Layout of llm.c's files, shared by reader and writer (tokenize.h).
inline constexpr int32_t kTokenMagicU16 = 20240520;
inline constexpr int32_t kTokenMagicU32 = 20240801;
inline constexpr int kTokenHeaderInts = 256;
inline constexpr int kTokenHeaderBytes = kTokenHeaderInts * 4;

// The vocabulary of text whose tokens are bytes.
inline constexpr int32_t kByteEndOfText = 256;
inline constexpr int64_t kByteVocabSize = 257;

// A target that is not counted in the loss.
inline constexpr int32_t kIgnoredTarget = -1;

// Samples packed into rows (samples.h). Each row has T tokens of several
// sequences, which do not see each other.
struct PackedRows {
  int64_t length = 0;              // T
  std::vector<int32_t> tokens;     // [rows * T]; 0 where a row is not full
  std::vector<int32_t> targets;    // [rows * T] or kIgnoredTarget
  std::vector<int32_t> positions;  // [rows * T]; 0 starts a sequence
  int64_t num_samples = 0;
  int64_t num_tokens = 0;   // of samples
  int64_t num_targets = 0;  // that count

  int64_t num_rows() const {
    return static_cast<int64_t>(tokens.size()) / length;
  }
};

struct TextFiles {
  std::vector<MappedFile> files;
  int64_t total_bytes = 0;
};
// Maps every file of `patterns` for reading.
// Errors: InvalidArgument when one is empty or recognizably not text: a NUL
//         byte near its start, the signature of a compressed or binary format,
//         or JSON lines, which are named.
absl::StatusOr<TextFiles> OpenTextFiles(
    const std::vector<std::string>& patterns);

// All tokens of all shards as one logical array.
// Threads: const methods may be called from many threads.
class TokenSource {
 public:
  struct Shard {
    std::string path;
    TokenFormat format = TokenFormat::kAuto;  // never kAuto once open
    int bytes_per_token = 0;                  // 1, 2 or 4
    int64_t begin = 0;                        // position in the stream
    int64_t num_tokens = 0;                   // without a separator after it
    const uint8_t* tokens = nullptr;
  };

  // Opens every file of `patterns`.
  // Errors: InvalidArgument or DataLoss naming the file: empty, truncated (the
  //         header's count against the size), odd number of bytes, wrong magic
  //         or version, binary where text was expected, a folder, unreadable;
  //         text mixed with token files.
  static absl::StatusOr<std::unique_ptr<TokenSource>> Open(
      const std::vector<std::string>& patterns,
      TokenFormat format = TokenFormat::kAuto);

  // Tokens in memory, named `path`. REQUIRES: not empty, none negative.
  static std::unique_ptr<TokenSource> FromTokens(const std::string& path,
                                                 std::vector<int32_t> tokens);

  // REQUIRES: not empty.
  static std::unique_ptr<TokenSource> FromRows(const std::string& path,
                                               PackedRows rows);
  // The packed rows; null if the tokens are one stream, each predicting the
  // next.
  const PackedRows* rows() const { return rows_.get(); }

  // Number of tokens, separators between text files included.
  int64_t size() const { return size_; }

  // Copies tokens [begin, begin + n) to `out`. Ids are as in the file, so a
  // uint32 id above 2^31 is negative: call ValidateTokens first.
  // REQUIRES: 0 <= begin, begin + n <= size().
  void Read(int64_t begin, int64_t n, int32_t* out) const;

  // Tokens [begin, begin + n) as a separate source, sharing the maps. shards()
  // stays the whole's. REQUIRES: the range is inside; no rows.
  std::unique_ptr<TokenSource> View(int64_t begin, int64_t n) const;

  // Whether `id` occurs; reads up to its first occurrence.
  bool Contains(int32_t id) const;

  // True when tokens are bytes (text); kByteVocabSize is then the vocabulary.
  bool is_text() const { return is_text_; }

  const std::vector<Shard>& shards() const { return shards_; }

  // Scans everything once (at memory speed with `num_threads` threads) for a
  // token id >= vocab_size.
  // Errors: InvalidArgument naming the id, its file and its offset in it.
  absl::Status ValidateTokens(int64_t vocab_size, int num_threads) const;

 private:
  TokenSource() = default;

  TokenSource(const TokenSource&) = default;

  std::vector<MappedFile> files_;                       // views share the maps
  std::shared_ptr<const std::vector<int32_t>> tokens_;  // of FromTokens
  std::shared_ptr<const PackedRows> rows_;              // of FromRows
  std::vector<Shard> shards_;
  int64_t view_begin_ = 0;  // position 0 in the whole stream
  int64_t size_ = 0;
  bool is_text_ = false;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKEN_FILE_H_
