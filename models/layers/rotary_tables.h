// Cosines and sines of rotary position embeddings, with Llama 3's scaling.
// Source: Su et al. 2021; Llama 3.1's frequency scaling as in transformers'
// rope type "llama3".
#ifndef ZERO_MODELS_LAYERS_ROTARY_TABLES_H_
#define ZERO_MODELS_LAYERS_ROTARY_TABLES_H_

#include <cstdint>
#include <vector>

#include "engine/config/model_config.h"

namespace zero {

// Inverse frequencies [head_dim / 2], in radians per position.
std::vector<double> RotaryFrequencies(int64_t head_dim, double theta,
                                      const RopeScaling& scaling);

// cos and sin [num_positions, head_dim / 2], computed in float64.
void FillRotaryTables(const std::vector<double>& frequencies,
                      int64_t num_positions, float* cos, float* sin);

}  // namespace zero

#endif  // ZERO_MODELS_LAYERS_ROTARY_TABLES_H_
