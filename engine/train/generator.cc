#include "engine/train/generator.h"

#include <algorithm>
#include <numeric>

#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Runs `tokens` after the cached ones; logits of the last.
absl::Status Append(Executor& executor, absl::Span<const int32_t> tokens,
                    KvCache* cache, std::vector<float>* logits) {
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(),
            static_cast<int32_t>(cache->length));
  return executor.LastLogits({.batch = 1,
                              .length = static_cast<int64_t>(tokens.size()),
                              .tokens = tokens.data(),
                              .positions = positions.data()},
                             cache, logits->data());
}

}  // namespace

int64_t VisibleTokens(int64_t length, int64_t context_length) {
  return length <= context_length ? length
                                  : std::max<int64_t>(context_length / 2, 1);
}

absl::Status Generate(Executor& executor, const std::vector<int32_t>& prompt,
                      const GenerateOptions& options, const TokenFn& token) {
  ZERO_CHECK(!prompt.empty());
  ZERO_CHECK_GE(options.context_length, 1);
  const int64_t context = options.context_length;
  std::vector<int32_t> text = prompt;
  std::vector<float> logits(executor.logits_size());
  KvCache cache = executor.MakeKvCache(options.context_length);
  int64_t done = 0;
  for (int64_t i = 0; i < options.max_tokens; ++i) {
    const int64_t length = text.size();
    if (cache.length + length - done > context) {
      cache.length = 0;
      done = length - VisibleTokens(length, context);
    }
    ZERO_RETURN_IF_ERROR(Append(
        executor, absl::MakeConstSpan(text).subspan(done), &cache, &logits));
    done = length;
    const int32_t next =
        SampleToken(logits, options.vocab_size, options.sampling, i);
    if (next == options.stop_token) break;
    ZERO_ASSIGN_OR_RETURN(const bool go_on, token(next));
    if (!go_on) break;
    text.push_back(next);
  }
  return absl::OkStatus();
}

}  // namespace zero
