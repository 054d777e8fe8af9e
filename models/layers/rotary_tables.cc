#include "models/layers/rotary_tables.h"

#include <cmath>

namespace zero {
namespace {

// Long wavelengths are stretched by `factor`, short ones kept, and those in
// between interpolated by how many turns fit into the original context.
double ScaleFrequency(double frequency, const RopeScaling& scaling) {
  const double turns =
      scaling.original_max_position_embeddings * frequency / (2.0 * M_PI);
  if (turns < scaling.low_freq_factor) return frequency / scaling.factor;
  if (turns > scaling.high_freq_factor) return frequency;
  const double smooth = (turns - scaling.low_freq_factor) /
                        (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace

std::vector<double> RotaryFrequencies(int64_t head_dim, double theta,
                                      const RopeScaling& scaling) {
  std::vector<double> frequencies(head_dim / 2);
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / head_dim);
    frequencies[i] =
        scaling.enabled ? ScaleFrequency(frequency, scaling) : frequency;
  }
  return frequencies;
}

void FillRotaryTables(const std::vector<double>& frequencies,
                      int64_t num_positions, float* cos, float* sin) {
  const int64_t half = frequencies.size();
  for (int64_t p = 0; p < num_positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      cos[p * half + i] = static_cast<float>(std::cos(p * frequencies[i]));
      sin[p * half + i] = static_cast<float>(std::sin(p * frequencies[i]));
    }
  }
}

}  // namespace zero
