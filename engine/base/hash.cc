#include "engine/base/hash.h"

#include <xxhash.h>

#include "absl/strings/escaping.h"
#include "kernels/check.h"

namespace zero {

struct Hasher::State {
  State() : xxh(XXH3_createState()) {}
  ~State() { XXH3_freeState(xxh); }
  XXH3_state_t* xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {
  ZERO_CHECK(state_->xxh != nullptr) << "out of memory";
  XXH3_128bits_reset(state_->xxh);
}

Hasher::~Hasher() = default;

void Hasher::Update(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(state_->xxh, data, bytes);
}

std::string Hasher::HexDigest() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_->xxh));
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(canonical.digest),
                        sizeof(canonical.digest)));
}

}  // namespace zero
