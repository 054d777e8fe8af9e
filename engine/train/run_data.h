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
  std::unique_ptr<TokenSource> validation;  // null: there is none
  // Of the loaders: what data.reset_attention_mask cuts at.
  int32_t document_token = kNoDocumentToken;
  std::vector<std::string> notes;  // on samples that were cut or left out
};

// Threads of the host that read data: on the CPU the device's own, else a core
// each (not the GPU's SMs, and not OMP_NUM_THREADS, which launchers set to 1).
int DataThreads(const Device& device);

// Opens the files of `config.data`. With data.validation_fraction, validation
// is the last part of train (of JSON lines the last lines), and train ends
// before it. Text is tokenized, in memory, each file a document; JSON lines
// are packed into rows of data.sequence_length (engine/data/samples.h).
// Errors: those of TokenSource and ReadSamples; samples of which none fits; a
//         token id outside the vocabulary, with file
//         and offset; more text than is reasonable to tokenize at each start;
//         documents that attention should tell apart where nothing stands
//         between them.
absl::StatusOr<RunData> OpenRunData(const Config& config, bool need_train,
                                    int num_threads);

// The tokenizer `spec`, for a model of `vocab_size` ids.
// Errors: InvalidArgument when it has more ids than the model, except that
//         bytes may do without an end of text.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenModelTokenizer(
    const std::string& spec, int64_t vocab_size);

// The tokens that a text starts from: those of `prompt`; for an empty one the
// end of text, or a line break where the model has no such token. Never empty.
std::vector<int32_t> EncodePrompt(const Tokenizer& tokenizer,
                                  const std::string& prompt,
                                  int64_t vocab_size);

// Of training.sample: tokens of context that samples use (0: there are no
// samples), and the tokens that they start from.
int64_t SampleContext(const Config& config, const RunData& data);
std::vector<int32_t> SamplePrompt(const Config& config, const RunData& data);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_DATA_H_
