// Formats of training data (token_file.h describes them), by which a config
// names them, too.
#ifndef ZERO_ENGINE_DATA_TOKEN_FORMAT_H_
#define ZERO_ENGINE_DATA_TOKEN_FORMAT_H_

#include <cstddef>

namespace zero {

enum class TokenFormat { kAuto, kText, kLlmc, kRawU16 };
inline constexpr const char* kTokenFormatNames[] = {"auto", "text", "llmc",
                                                    "raw_uint16"};

inline const char* TokenFormatName(TokenFormat format) {
  return kTokenFormatNames[static_cast<size_t>(format)];
}

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKEN_FORMAT_H_
