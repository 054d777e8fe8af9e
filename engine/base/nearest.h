// Names that a mistyped one may have meant.
#ifndef ZERO_ENGINE_BASE_NEAREST_H_
#define ZERO_ENGINE_BASE_NEAREST_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zero {

// Letters to insert, delete or replace to turn a into b (Levenshtein).
int EditDistance(absl::string_view a, absl::string_view b);

// At most `limit` of `candidates`, nearest to `word` by edit distance first,
// for "did you mean": no case, "-" is "_", at most half of the letters wrong.
// If exactly one begins with `word` (four letters or more), only that one.
std::vector<std::string> NearestNames(absl::string_view word,
                                      absl::Span<const std::string> candidates,
                                      int limit);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_NEAREST_H_
