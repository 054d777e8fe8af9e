// Characters of UTF-8.
#ifndef ZERO_ENGINE_BASE_UTF8_H_
#define ZERO_ENGINE_BASE_UTF8_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace zero {

// Length of the well-formed character at the front of `s`; 0 when it may still
// become one; minus the length of the maximal ill-formed part otherwise.
// REQUIRES: `s` is not empty.
// Source: the Unicode standard 15, table 3-7.
inline int Utf8Length(absl::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return -1;
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  uint8_t low = 0x80, high = 0xBF;  // of the second byte
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == s.size()) return 0;
    const uint8_t next = byte(static_cast<size_t>(i));
    if (next < low || next > high) return -i;
    low = 0x80, high = 0xBF;
  }
  return length;
}

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_UTF8_H_
