// Formats of training data (described in token_file.h), with their names in a
// config.
#ifndef ZERO_ENGINE_DATA_TOKEN_FORMAT_H_
#define ZERO_ENGINE_DATA_TOKEN_FORMAT_H_

#include <cstddef>
#include <string>

namespace zero {

enum class TokenFormat { kAuto, kText, kLlmc, kRawU16, kJsonLines };
inline constexpr const char* kTokenFormatNames[] = {"auto", "text", "llmc",
                                                    "raw_uint16", "jsonl"};

inline const char* TokenFormatName(TokenFormat format) {
  return kTokenFormatNames[static_cast<size_t>(format)];
}

// Whether a file (or a glob) in such a format has samples: JSON lines.
inline bool IsJsonLines(const std::string& path, TokenFormat format) {
  return format == TokenFormat::kJsonLines ||
         (format == TokenFormat::kAuto && path.ends_with(".jsonl"));
}

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKEN_FORMAT_H_
