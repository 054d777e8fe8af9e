// "Did you mean": the known names that a mistyped one is closest to.
#ifndef ZERO_ENGINE_BASE_NEAREST_H_
#define ZERO_ENGINE_BASE_NEAREST_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zero {

// The number of letters to insert, delete or replace to turn `a` into `b`
// (Levenshtein).
int EditDistance(absl::string_view a, absl::string_view b);

// Up to `limit` of `candidates`, the nearest to `word` by edit distance first.
// Case is ignored, "-" equals "_", and at most half of the letters may be
// wrong. If exactly one candidate begins with `word` (four letters or more), it
// is the only result.
std::vector<std::string> NearestNames(absl::string_view word,
                                      absl::Span<const std::string> candidates,
                                      int limit);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_NEAREST_H_
