// The data of a run: opened, checked against the model's vocabulary, split.
#ifndef ZERO_ENGINE_TRAIN_RUN_DATA_H_
#define ZERO_ENGINE_TRAIN_RUN_DATA_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"

namespace zero {

struct RunData {
  std::unique_ptr<Tokenizer> tokenizer;     // null for tokenizer "none"
  std::unique_ptr<TokenSource> train;       // null when not asked for
  std::unique_ptr<TokenSource> validation;  // null: there is none
};

// Opens the files of `config.data`. With data.validation_fraction, validation
// is the last part of train, and train ends before it.
// Errors: those of TokenSource; a token id outside the vocabulary, with file
//         and offset; text where a SentencePiece model is configured.
absl::StatusOr<RunData> OpenRunData(const Config& config, bool need_train,
                                    int num_threads);

// The tokenizer `spec`, for a model of `vocab_size` ids.
// Errors: InvalidArgument when it has more ids than the model.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenModelTokenizer(
    const std::string& spec, int64_t vocab_size);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_DATA_H_
