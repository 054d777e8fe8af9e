// Samples from files of JSON lines: {"prompt", "completion"}, of which the
// completion alone is learned, or {"text"}, all of it. Other keys of a line are
// not looked at.
//
// A sample is the prompt's tokens as `zero generate` would see them
// (Tokenizer::EncodePrompt: with the begin of text where the model has one, and
// control tokens where their names stand in it), those of the completion, in
// which no text is a control token, and the end of text, which is learned too.
// Both are encoded on their own, so that the border is one between tokens.
//
// Samples are packed into rows of T tokens, several to a row, each with
// positions from 0 and seen by none of the others. The targets that count are
// those of completions, and the mean loss is over all that count in a step.
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
  int64_t num_prompt = 0;    // ids that are no target
};

// Reads and encodes every line of the files (and globs), in their order, with
// `num_threads` threads; blank lines are skipped.
// Errors: InvalidArgument naming the first wrong line as FILE:LINE; a file
//         without a sample; those of files.
absl::StatusOr<std::vector<Sample>> ReadSamples(
    const std::vector<std::string>& patterns, const Tokenizer& tokenizer,
    int num_threads);

// What did not fit into rows.
struct PackingLoss {
  int64_t cut_samples = 0, cut_tokens = 0;  // their last tokens are gone
  int64_t left_out = 0;  // samples whose prompt fills a row alone
};

// Puts samples into rows of `length` tokens: each, in order, into the row with
// the least room that is enough, else into a new one. What is longer is cut.
// Order: a function of the samples and of `length` alone.
PackedRows PackSamples(const std::vector<Sample>& samples, int64_t length,
                       PackingLoss* loss);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SAMPLES_H_
