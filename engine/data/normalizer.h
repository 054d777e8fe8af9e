// Unicode's normal forms (UAX #15), by utf8proc.
#ifndef ZERO_ENGINE_DATA_NORMALIZER_H_
#define ZERO_ENGINE_DATA_NORMALIZER_H_

#include <string>

#include "absl/strings/string_view.h"

namespace zero {

enum class NormalForm { kC, kD, kKC, kKD };
inline constexpr const char* kNormalFormNames[] = {"NFC", "NFD", "NFKC",
                                                   "NFKD"};

// `text` in that form: `text` itself if it is known to be normalized, else the
// contents of `buffer`. A line break composes with nothing, so lines are
// normalized separately.
// REQUIRES: `text` is valid UTF-8.
absl::string_view Normalize(NormalForm form, absl::string_view text,
                            std::string* buffer);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_NORMALIZER_H_
