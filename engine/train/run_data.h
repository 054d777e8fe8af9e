// The data of a run: opened, checked against the model's vocabulary, split.
#ifndef ZERO_ENGINE_TRAIN_RUN_DATA_H_
#define ZERO_ENGINE_TRAIN_RUN_DATA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "engine/data/loader.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "kernels/device.h"

namespace zero {

struct RunData {
  std::unique_ptr<Tokenizer> tokenizer;     // null for tokenizer "none"
  std::unique_ptr<TokenSource> train;       // null when not asked for
  std::unique_ptr<TokenSource> validation;  // null: none
  // The token at which loaders cut, for data.reset_attention_mask.
  int32_t document_token = kNoDocumentToken;
  std::vector<std::string> notes;  // on samples cut or left out
};

// Host threads that read data: on the CPU the device's, else one per core (not
// per SM, and not OMP_NUM_THREADS, which launchers set to 1).
int DataThreads(const Device& device);

// Opens the files of `config.data`. With data.validation_fraction, validation
// is the last part of train (the last lines of JSON lines), and train ends
// before it. Text is tokenized in memory, each file as a document; JSON lines
// are packed into rows of data.sequence_length (engine/data/samples.h).
// Errors: those of TokenSource and ReadSamples; no sample fits; a token id
//         outside the vocabulary, with file and offset; more text than is
//         reasonable to tokenize at each start; documents to be kept apart
//         without a separator.
absl::StatusOr<RunData> OpenRunData(const Config& config, bool need_train,
                                    int num_threads);

// The tokenizer `spec`, for a model of `vocab_size` ids.
// Errors: InvalidArgument if it has more ids than the model, except that bytes
//         may lack an end of text.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenModelTokenizer(
    const std::string& spec, int64_t vocab_size);

// The tokens that a text starts from: those of `prompt`; if it is empty, the
// end of text, or a line break if the model has no such token. Never empty.
std::vector<int32_t> EncodePrompt(const Tokenizer& tokenizer,
                                  const std::string& prompt,
                                  int64_t vocab_size);

// The tokens of context that training.sample uses (0: no samples), and the
// tokens that samples start from.
int64_t SampleContext(const Config& config, const RunData& data);
std::vector<int32_t> SamplePrompt(const Config& config, const RunData& data);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_DATA_H_
