// How 16-bit parameters are rounded from their fp32 masters: bf16 to nearest,
// so that parameter and master share their upper bits; or either type
// stochastically.
#ifndef ZERO_KERNELS_ROUNDING_H_
#define ZERO_KERNELS_ROUNDING_H_

#include <cstdint>
#include <cstring>

#include "kernels/philox.h"

namespace zero {

ZERO_HOST_DEVICE inline uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// ---- A master as its bf16 parameter and 16 bits more ------------------------

// The parameter is the master rounded to nearest, ties away from zero, and the
// rest is its lower half. As a signed number that half is the rounding error,
// so master = (param << 16) + rest, to the bit: for subnormals, signed zeros,
// infinity, and a master so large that its parameter is infinity. A NaN stays a
// NaN and keeps only its sign. Ties to even would give an even parameter 65537
// masters, one more than 16 bits distinguish.
struct MasterHalves {
  uint16_t param;
  uint16_t rest;
};
ZERO_HOST_DEVICE inline MasterHalves SplitMaster(float master) {
  const uint32_t bits = BitsOfFloat(master);
  // Adding to a NaN could carry into the sign and leave a zero.
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {
      static_cast<uint16_t>((nan ? bits | 0x400000u : bits + 0x8000u) >> 16),
      static_cast<uint16_t>(bits)};
}
ZERO_HOST_DEVICE inline float JoinMaster(uint16_t param, uint16_t rest) {
  const uint32_t bits = (static_cast<uint32_t>(param) << 16) +
                        static_cast<uint32_t>(static_cast<int16_t>(rest));
  float master;
  memcpy(&master, &bits, sizeof(master));
  return master;
}

// ---- Stochastic rounding ----------------------------------------------------

// Stochastic rounding goes away from zero with the probability of the part cut
// off, so that the mean over many roundings is the value itself, and steps far
// below a unit in the last place are not lost. The random word of an element is
// a pure function of (key, element), so the bits do not depend on threads,
// ranks, cuts or devices.

// The Philox block that holds the random words of elements 4 * block to
// 4 * block + 3 under `key`, of (seed, step).
ZERO_HOST_DEVICE inline PhiloxBlock RoundingWords(uint64_t key,
                                                  uint64_t block) {
  return Philox(key, block, 0);
}

// The word of one element.
ZERO_HOST_DEVICE inline uint32_t RoundingWord(uint64_t key, uint64_t element) {
  const PhiloxBlock words = RoundingWords(key, element / 4);
  const uint64_t w = element % 4;
  const uint32_t low = w == 0 ? words.x[0] : words.x[1];
  const uint32_t high = w == 2 ? words.x[2] : words.x[3];
  return w < 2 ? low : high;
}

// The bits of `value` as bf16. Adding 16 random bits below the cut carries with
// the probability of the bits there. Infinity stays, NaN is quiet, and values
// above the largest bf16 may become infinity.
ZERO_HOST_DEVICE inline uint16_t StochasticBF16(float value, uint32_t word) {
  const uint32_t bits = BitsOfFloat(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(
      (nan ? bits | 0x400000u : bits + (word & 0xffffu)) >> 16);
}

// The bits of `value` as fp16. Its subnormals, below 2^-14, are counted in
// steps of 2^-24 with 21 binary places; lower bits are cut off.
ZERO_HOST_DEVICE inline uint16_t StochasticF16(float value, uint32_t word) {
  const uint32_t bits = BitsOfFloat(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14
    result = (magnitude + (word & 0x1fffu) - 0x38000000u) >> 13;
  } else {
    const float steps = (value < 0 ? -value : value) * 0x1p45f;
    result = (static_cast<uint32_t>(steps) + (word & 0x1fffffu)) >> 21;
  }
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | result);
}

}  // namespace zero

#endif  // ZERO_KERNELS_ROUNDING_H_
