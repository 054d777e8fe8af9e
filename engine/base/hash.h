// XXH3-128 of a stream of bytes, as 32 hex digits: `parameters_hash` and the
// fingerprints of files. Not for secrets.
// Source: xxHash 0.8, canonical (big-endian) form, as `xxh128sum` prints it.
#ifndef ZERO_ENGINE_BASE_HASH_H_
#define ZERO_ENGINE_BASE_HASH_H_

#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace zero {

// The digest depends on the bytes alone, not on how Update cut them.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void Update(const void* data, size_t bytes);
  void Update(absl::string_view text) { Update(text.data(), text.size()); }

  // 32 lower-case hex digits of everything so far; more may follow.
  std::string HexDigest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_HASH_H_
