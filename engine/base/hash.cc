#include "engine/base/hash.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/check.h"

namespace zero {
namespace {

std::string Hex(absl::uint128 hash) {
  return absl::StrFormat("%016x%016x", absl::Uint128High64(hash),
                         absl::Uint128Low64(hash));
}

}  // namespace

std::string HashOf(absl::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return Hex(absl::MakeUint128(hash.high64, hash.low64));
}

RunningHash::RunningHash() : state_(XXH3_createState()) {
  ZERO_CHECK(state_ != nullptr) << "out of memory";
  XXH3_128bits_reset(state_.get());
}

RunningHash::~RunningHash() = default;

void RunningHash::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

void RunningHash::Add(absl::string_view bytes) {
  XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
}

std::string RunningHash::Take() {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
  XXH3_128bits_reset(state_.get());
  return Hex(absl::MakeUint128(hash.high64, hash.low64));
}

void BlockHash::Add(int64_t block, absl::Span<const float> values) {
  for (; !values.empty(); ++block) {
    const absl::Span<const float> own =
        values.first(std::min<size_t>(values.size(), kBlockElems));
    const XXH128_hash_t hash = XXH3_128bits_withSeed(
        own.data(), own.size() * sizeof(float), static_cast<uint64_t>(block));
    sum_ += absl::MakeUint128(hash.high64, hash.low64);
    values.remove_prefix(own.size());
  }
}

BlockHash::Parts BlockHash::parts() const {
  Parts parts;
  for (int i = 0; i < kNumParts; ++i) {
    parts[i] = static_cast<double>(static_cast<uint32_t>(sum_ >> (32 * i)));
  }
  return parts;
}

std::string BlockHash::HexDigest(const Parts& parts) {
  absl::uint128 sum = 0;
  for (int i = 0; i < kNumParts; ++i) {
    sum += absl::uint128(static_cast<uint64_t>(parts[i])) << (32 * i);
  }
  return Hex(sum);
}

}  // namespace zero
