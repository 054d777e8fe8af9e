// The library side of `zero tokenize`: text files to llm.c token files
// (token_file.h has the layout), streaming, atomic, in shards.
#ifndef ZERO_ENGINE_DATA_TOKENIZE_H_
#define ZERO_ENGINE_DATA_TOKENIZE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/file.h"
#include "engine/data/tokenizer.h"

namespace zero {

struct TokenizeOptions {
  // Text files and globs; each file is a document, or several, see below.
  std::vector<std::string> inputs = {};

  // FILE.bin. With several shards: FILE_000000.bin, FILE_000001.bin ...
  std::string output = {};

  // The tokenizer, as OpenTokenizer takes it.
  std::string tokenizer = "bytes";

  // Cuts documents inside a file at each occurrence, which is not itself
  // encoded, e.g. "<|endoftext|>". Empty: one document per file.
  std::string document_separator = {};

  // The largest number of tokens in one shard; 0: one file.
  int64_t tokens_per_shard = 0;

  // The part of the text, in [0, 1), that goes to FILE_val.bin instead: its
  // end, from the first line break past the border.
  double validation_fraction = 0;

  // A tokenizer that changes the text (drops line breaks, say) is refused
  // unless this is set.
  bool allow_lossy = false;

  // Replaces the output of an earlier run, which is an error otherwise.
  bool force = false;

  int num_threads = 1;

  // Called occasionally with the bytes of text done so far and in total.
  std::function<void(int64_t, int64_t)> progress = {};
};

struct TokenizeStats {
  struct Output {
    std::string path;
    int64_t num_tokens = 0;
  };
  std::vector<Output> outputs;
  int64_t num_files = 0;
  int64_t num_documents = 0;
  int64_t text_bytes = 0;
  int64_t num_tokens = 0;  // end-of-text tokens included
  int64_t vocab_size = 0;
  int bytes_per_token = 0;  // 2 for a vocabulary up to 65536, else 4
};

// Every document is preceded by the end-of-text token, as in llm.c's files, so
// that a model also learns to begin one (Tokenizer::DocumentStart). Files keep
// the order of `inputs`; the tokens do not depend on the number of threads.
// Errors: InvalidArgument naming the field; FailedPrecondition if the output
//         exists; file errors with the path. No output file is left
//         half-written.
absl::StatusOr<TokenizeStats> TokenizeFiles(const TokenizeOptions& options);

// The tokens that TokenizeFiles would write, each file as a document.
absl::StatusOr<std::vector<int32_t>> TokenizeInMemory(
    const std::vector<std::string>& inputs, const Tokenizer& tokenizer,
    int num_threads);

// Writes one llm.c token file, atomically.
// Threads: one at a time.
class TokenFileWriter {
 public:
  // REQUIRES: bytes_per_token is 2 or 4.
  static absl::StatusOr<std::unique_ptr<TokenFileWriter>> Create(
      const std::string& path, int bytes_per_token);

  // REQUIRES: 0 <= ids < 2^(8 * bytes_per_token).
  absl::Status Append(const int32_t* ids, int64_t n);

  // Writes the header's count and publishes the file.
  // Errors: FailedPrecondition above 2^31 - 1 tokens (the header's int32).
  absl::Status Commit();

  int64_t num_tokens() const { return num_tokens_; }

 private:
  TokenFileWriter(std::unique_ptr<AtomicFile> file, int bytes_per_token)
      : file_(std::move(file)), bytes_per_token_(bytes_per_token) {}

  std::unique_ptr<AtomicFile> file_;
  int bytes_per_token_;
  int64_t num_tokens_ = 0;
  std::vector<uint16_t> narrow_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKENIZE_H_
