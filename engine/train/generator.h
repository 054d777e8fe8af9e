// Text from a model: prompt tokens in, sampled tokens out.
#ifndef ZERO_ENGINE_TRAIN_GENERATOR_H_
#define ZERO_ENGINE_TRAIN_GENERATOR_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/train/sampling.h"
#include "engine/zero/executor.h"

namespace zero {

struct GenerateOptions {
  SamplingOptions sampling;
  int64_t max_tokens = 200;
  int64_t context_length = 0;  // positions the model (and its memory) has
  int64_t vocab_size = 0;      // ids of the tokenizer
  int32_t stop_token = -1;     // ends the text; not reported
};

// How many of a text's last tokens the model sees: all of them, or half a
// context if they do not fit.
int64_t VisibleTokens(int64_t length, int64_t context_length);

// Receives the next token; returns false to stop.
using TokenFn = std::function<absl::StatusOr<bool>(int32_t)>;

// Calls `token` with each sampled id until max_tokens, stop_token, or `token`
// returns false. Ranks that make the same call sample the same ids. Keys and
// values are cached; a text longer than the context continues with its last
// half as the new context (VisibleTokens). REQUIRES: prompt not empty; the
// executor's memory was reserved for context_length tokens
// (Workload::generate_tokens).
absl::Status Generate(Executor& executor, const std::vector<int32_t>& prompt,
                      const GenerateOptions& options, const TokenFn& token);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_GENERATOR_H_
