#include "engine/data/sampler.h"

#include <bit>

#include "kernels/check.h"
#include "kernels/philox.h"

namespace zero {
namespace {

// Separates this use of the seed from initialization and dropout.
constexpr uint64_t kOrderSalt = 0x6F72646572ull;  // "order"

}  // namespace

Permutation::Permutation(int64_t n, uint64_t seed, int64_t epoch) : n_(n) {
  ZERO_CHECK_GE(n, 1);
  const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
  half_mask_ = (uint64_t{1} << half_bits_) - 1;
  const uint64_t key =
      MixKey(MixKey(seed, kOrderSalt), static_cast<uint64_t>(epoch));
  uint64_t round = 0;
  for (uint64_t& round_key : round_keys_) round_key = MixKey(key, round++);
}

uint64_t Permutation::Encrypt(uint64_t x) const {
  uint64_t left = x >> half_bits_;
  uint64_t right = x & half_mask_;
  for (const uint64_t round_key : round_keys_) {
    const uint64_t next = left ^ (MixKey(round_key, right) & half_mask_);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

int64_t Permutation::operator()(int64_t index) const {
  ZERO_CHECK_GE(index, 0);
  ZERO_CHECK_LT(index, n_);
  // The network permutes [0, 4^half_bits), less than 4 n for n > 1; walking
  // its cycle until it comes back below n permutes [0, n).
  uint64_t x = static_cast<uint64_t>(index);
  do {
    x = Encrypt(x);
  } while (x >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(x);
}

Sampler::Sampler(int64_t num_tokens, const BatchShape& shape, uint64_t seed)
    : shape_(shape), seed_(seed) {
  ZERO_CHECK_GE(num_tokens, 0);
  ZERO_CHECK_GE(shape.sequence_length, 1);
  ZERO_CHECK_GE(shape.micro_batch_size, 1);
  ZERO_CHECK_GE(shape.micro_steps, 1);
  ZERO_CHECK_GE(shape.world, 1);
  num_samples_ = num_tokens < 1 ? 0 : (num_tokens - 1) / shape.sequence_length;
  steps_per_epoch_ = num_samples_ / shape.GlobalBatch();
}

int64_t Sampler::SampleId(int64_t step, int64_t micro_step, int64_t rank,
                          int64_t row) const {
  ZERO_CHECK_GE(step, 0);
  ZERO_CHECK(0 <= micro_step && micro_step < shape_.micro_steps) << micro_step;
  ZERO_CHECK(0 <= rank && rank < shape_.world) << rank;
  ZERO_CHECK(0 <= row && row < shape_.micro_batch_size) << row;
  return step * shape_.GlobalBatch() +
         (micro_step * shape_.world + rank) * shape_.micro_batch_size + row;
}

int64_t Sampler::Window(int64_t sample_id) const {
  ZERO_CHECK_GE(sample_id, 0);
  ZERO_CHECK_GE(steps_per_epoch_, 1);
  const int64_t samples_per_epoch = steps_per_epoch_ * shape_.GlobalBatch();
  const Permutation order(num_samples_, seed_, sample_id / samples_per_epoch);
  return order(sample_id % samples_per_epoch);
}

}  // namespace zero
