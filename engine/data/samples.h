// Samples from files of JSON lines: {"prompt", "completion"}, of which only the
// completion is learned, or {"text"}, learned entirely. Other keys of a line
// are ignored.
//
// A sample is the prompt's tokens as in `zero generate`
// (Tokenizer::EncodePrompt: with the begin of text if the model has one, and
// control tokens where their names occur), the completion's, in which no text
// is a control token, and the end of text, which is learned too. Both are
// encoded separately, so the border is between tokens.
//
// Samples are packed into rows of T tokens, several to a row, each with
// positions from 0 and invisible to the others. Only completions' targets
// count, and the mean loss is over all counted targets of a step.
#ifndef ZERO_ENGINE_DATA_SAMPLES_H_
#define ZERO_ENGINE_DATA_SAMPLES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"

namespace zero {

struct Sample {
  std::vector<int32_t> ids;  // the last one is only a target
  int64_t num_prompt = 0;    // ids that are not targets
};

// Reads and encodes every line of the files (and globs), in order, with
// `num_threads` threads; blank lines are skipped.
// Errors: InvalidArgument naming the first wrong line as FILE:LINE; a file
//         without a sample; those of files.
absl::StatusOr<std::vector<Sample>> ReadSamples(
    const std::vector<std::string>& patterns, const Tokenizer& tokenizer,
    int num_threads);

// Samples that did not fit into rows.
struct PackingLoss {
  int64_t cut_samples = 0, cut_tokens = 0;  // lost their last tokens
  int64_t left_out = 0;  // samples whose prompt alone fills a row
};

// Packs samples into rows of `length` tokens: each, in order, into the fullest
// row with enough room, else into a new one. Longer samples are cut.
// Order: a function of only the samples and `length`.
PackedRows PackSamples(const std::vector<Sample>& samples, int64_t length,
                       PackingLoss* loss);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SAMPLES_H_
