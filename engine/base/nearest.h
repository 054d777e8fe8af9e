// Names that a mistyped one may have meant.
#ifndef ZERO_ENGINE_BASE_NEAREST_H_
#define ZERO_ENGINE_BASE_NEAREST_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zero {

// Letters to insert, delete or replace to make b of a (Levenshtein).
int EditDistance(absl::string_view a, absl::string_view b);

// At most `limit` of `candidates`, nearest to `word` by edit distance first;
// those that share nothing with it are left out. For "did you mean".
std::vector<std::string> NearestNames(
    absl::string_view word, const std::vector<std::string>& candidates,
    int limit);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_NEAREST_H_
