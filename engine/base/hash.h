// XXH3-128 as 32 lower-case hex digits: the hash of bytes, and that of a
// model's parameters when ranks hold parts of them (`parameters_hash`). Not for
// secrets.
// Source: xxHash 0.8, canonical (big-endian) form, as `xxh128sum` prints it.
#ifndef ZERO_ENGINE_BASE_HASH_H_
#define ZERO_ENGINE_BASE_HASH_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/numeric/int128.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

struct XXH3_state_s;  // xxhash.h

namespace zero {

std::string HashOf(absl::string_view bytes);

// The hash of bytes added in pieces.
class RunningHash {
 public:
  RunningHash();
  ~RunningHash();
  RunningHash(RunningHash&&) = default;
  RunningHash& operator=(RunningHash&&) = default;

  void Add(absl::string_view bytes);
  // HashOf the bytes added since the last call.
  std::string Take();

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

// The sum of the hashes of numbered blocks: neither the order of the additions
// nor the rank that makes them matters. `parameters_hash` numbers the blocks of
// all parameters consecutively, in the order of the parameters' names; each
// parameter begins a new block. The same in Python, where `parameters` is
// {name: fp32 values as little-endian bytes} and `xxhash` is the package:
//
//   total = block = 0
//   for name in sorted(parameters):
//       for at in range(0, len(parameters[name]), 256):
//           total += xxhash.xxh3_128_intdigest(
//               parameters[name][at:at + 256], seed=block)
//           block += 1
//   print("%032x" % (total % 2**128))
//
// Names and layouts are those of Model::AllParameters (engine/nn/module.h);
// Model::PortableTensors gives their names in a model.safetensors, and which
// are packed or transposed there.
class BlockHash {
 public:
  static constexpr int64_t kBlockElems = 64;
  // The sum is kept as float64 parts of 32 bits each, lowest first. The parts
  // of up to 2^21 ranks add up without rounding.
  static constexpr int kNumParts = 4;
  using Parts = std::array<double, kNumParts>;

  // Adds the blocks of `values`, the first of which has the number `block`;
  // the last one may be shorter.
  void Add(int64_t block, absl::Span<const float> values);
  Parts parts() const;
  // The hash, from all ranks' parts added up.
  static std::string HexDigest(const Parts& parts);

 private:
  absl::uint128 sum_ = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_HASH_H_
