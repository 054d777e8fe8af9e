// Unicode's normal forms (UAX #15), by utf8proc.
#ifndef ZERO_ENGINE_DATA_NORMALIZER_H_
#define ZERO_ENGINE_DATA_NORMALIZER_H_

#include <string>

#include "absl/strings/string_view.h"

namespace zero {

enum class NormalForm { kC, kD, kKC, kKD };
inline constexpr const char* kNormalFormNames[] = {"NFC", "NFD", "NFKC",
                                                   "NFKD"};

// `text` in that form: itself where nothing changes, else what is then in
// `buffer`. Text that ends in an ASCII control character, such as a line
// break, has the form it has in front of any other text: normalizing the lines
// of a text normalizes the text.
// REQUIRES: `text` is valid UTF-8.
absl::string_view Normalize(NormalForm form, absl::string_view text,
                            std::string* buffer);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_NORMALIZER_H_
