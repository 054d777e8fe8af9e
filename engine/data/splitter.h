// The pre-tokenizers of a tokenizer.json: they cut a text into the words that
// byte-pair encoding works on.
#ifndef ZERO_ENGINE_DATA_SPLITTER_H_
#define ZERO_ENGINE_DATA_SPLITTER_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "engine/data/regex.h"

namespace zero {

// What happens to the matches of a pattern.
enum class SplitBehavior {
  kRemoved,             // they are dropped
  kIsolated,            // each is a word
  kMergedWithPrevious,  // each ends the word before it
  kMergedWithNext,      // each begins the word after it
  kContiguous,          // adjacent ones form one word
};
inline constexpr const char* kSplitBehaviorNames[] = {
    "Removed", "Isolated", "MergedWithPrevious", "MergedWithNext",
    "Contiguous"};

// One pre-tokenizer; the next one cuts its words further.
struct SplitStage {
  // Prepends a space to every word that lacks one.
  bool add_prefix_space = false;
  absl::optional<Regex> regex = {};  // none: no cuts
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // swaps matches and the text between them
};

// Threads: const methods may be called from many threads.
class Splitter {
 public:
  using WordFn = absl::FunctionRef<void(absl::string_view)>;

  explicit Splitter(std::vector<SplitStage> stages)
      : stages_(std::move(stages)) {}

  // Calls `word` with the words of the first `size` bytes of `text`; patterns
  // see the rest as well. Returns false if a word crosses `size`; some words
  // may then be missing. `continues`: text came before, so no space is
  // prepended.
  // REQUIRES: both parts of `text` are valid UTF-8.
  bool Split(absl::string_view text, size_t size, bool continues,
             RegexScratch* scratch, WordFn word) const;

 private:
  bool SplitFrom(size_t stage, absl::string_view text, size_t size,
                 bool continues, RegexScratch* scratch, WordFn word) const;

  std::vector<SplitStage> stages_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SPLITTER_H_
