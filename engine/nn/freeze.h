// Freezing parameters by name: no gradient, no optimizer state, nothing to
// reduce (Parameter::frozen).
#ifndef ZERO_ENGINE_NN_FREEZE_H_
#define ZERO_ENGINE_NN_FREEZE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/nn/module.h"

namespace zero {

// Freezes every parameter of `model` whose name matches one of `patterns`.
// A pattern is a shell glob over whole names: * (dots too), ?, [abc]. Names are
// those of checkpoints ("block.0.attn.qkv.weight") and Hugging Face's
// ("model.layers.0.self_attn.q_proj.weight"). Tensors stored and updated as one
// (q, k and v) freeze together: patterns may name them one by one, but must
// match all of them. A tied head is frozen with the embedding.
// Errors: InvalidArgument naming a pattern that matches nothing, with names
//         that exist; one that matches a part of a parameter; patterns that
//         leave nothing to train.
absl::Status FreezeParameters(const std::vector<std::string>& patterns,
                              Model& model);

// Elements of frozen parameters.
int64_t NumFrozen(const Model& model);

// The first unit with a trained parameter, its own or borrowed, where backward
// ends; units().size(): none.
size_t FirstTrainedUnit(const Model& model);

}  // namespace zero

#endif  // ZERO_ENGINE_NN_FREEZE_H_
