// Which tokens a micro-batch holds: pure functions of (seed, epoch, index).
//
// The stream is cut once into fixed windows of sequence_length targets: sample
// s reads tokens [s*T, s*T + T], so neighbours share one token, every token is
// a target at most once per epoch, and the rest (< T targets) is never used.
// Windows do not move between epochs; their order does. An epoch's order is a
// pseudo-random permutation computed per index (a Feistel network with cycle
// walking), so it needs no memory and any step can be reached directly:
// resuming in the middle of an epoch is the same call with another step.
//
// Invariant: the samples of step b are positions [b*G, (b+1)*G) of the epoch's
// order, G = samples per global batch, whatever the world size; position
//   j = (micro_step * world + rank) * micro_batch_size + row.
// So N ranks x 1 micro-batch see the same rows as 1 rank x N micro-batches.
#ifndef ZERO_ENGINE_DATA_SAMPLER_H_
#define ZERO_ENGINE_DATA_SAMPLER_H_

#include <cstdint>

namespace zero {

// A pseudo-random permutation of [0, n) for (seed, epoch).
// Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.
class Permutation {
 public:
  // REQUIRES: n >= 1.
  Permutation(int64_t n, uint64_t seed, int64_t epoch);

  // REQUIRES: 0 <= index < n. About 4 * 8 multiplications.
  int64_t operator()(int64_t index) const;

  int64_t size() const { return n_; }

 private:
  uint64_t Encrypt(uint64_t x) const;

  int64_t n_;
  int half_bits_;
  uint64_t half_mask_;
  uint64_t round_keys_[8];
};

// Sizes that decide which rank reads which rows. global batch =
// micro_batch_size * micro_steps * world.
struct BatchShape {
  int64_t sequence_length = 0;   // T
  int64_t micro_batch_size = 0;  // rows per rank and micro-step
  int64_t micro_steps = 1;       // gradient accumulation steps
  int64_t world = 1;             // data-parallel ranks

  int64_t GlobalBatch() const { return micro_batch_size * micro_steps * world; }
  int64_t TokensPerStep() const { return GlobalBatch() * sequence_length; }
};

// The training order of `num_tokens` tokens.
class Sampler {
 public:
  // REQUIRES: positive sizes. num_tokens may be too small for one batch;
  // steps_per_epoch() is then 0 and Window must not be called.
  Sampler(int64_t num_tokens, const BatchShape& shape, uint64_t seed);

  // Whole windows in the stream.
  int64_t num_samples() const { return num_samples_; }
  int64_t steps_per_epoch() const { return steps_per_epoch_; }

  // Samples of each epoch that no step reads: the last partial global batch,
  // different ones in each epoch.
  int64_t dropped_per_epoch() const {
    return num_samples_ - steps_per_epoch_ * shape_.GlobalBatch();
  }

  // Steps count from 0 over the whole run.

  // Sequence of `row` of (micro_step, rank) in the whole run's consumption:
  // step * G + j. Unique over the run and the same for any world size; the key
  // of dropout.
  int64_t SampleId(int64_t step, int64_t micro_step, int64_t rank,
                   int64_t row) const;

  // The window a sample id reads: its first token is at Window * T.
  int64_t Window(int64_t sample_id) const;

  const BatchShape& shape() const { return shape_; }

 private:
  BatchShape shape_;
  uint64_t seed_;
  int64_t num_samples_;
  int64_t steps_per_epoch_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SAMPLER_H_
