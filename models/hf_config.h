// Hugging Face's config.json, read and written.
//
// Read: old and new spellings (torch_dtype / dtype, rope_scaling /
// rope_parameters). Unsupported settings (another activation, rotary scaling
// other than llama3, a sliding window, biases that the family here lacks) are
// refused. Dropout is a training setting: ours decides. AutoModelForCausalLM
// builds the same model, in the spelling that transformers 4 and 5 both read.
#ifndef ZERO_MODELS_HF_CONFIG_H_
#define ZERO_MODELS_HF_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/config/model_config.h"
#include "kernels/dtype.h"

namespace zero {

// Reads `dir`/config.json.
// Errors: NotFound for the file; InvalidArgument or Unimplemented as
//         "FILE:LINE:COLUMN: key: what was found, what is wanted".
absl::StatusOr<ModelConfig> ReadHfConfig(const std::string& dir);

// The same for text in memory; `file` is its name in errors.
absl::StatusOr<ModelConfig> ParseHfConfig(absl::string_view text,
                                          const std::string& file);

// The text of a config.json. `dtype` is the weights' dtype. `begin_of_text` and
// `end_of_text` are the tokens around a text; if negative, the pretrained
// model's are written.
std::string WriteHfConfig(const ModelConfig& config, DType dtype,
                          int64_t begin_of_text, int64_t end_of_text);

}  // namespace zero

#endif  // ZERO_MODELS_HF_CONFIG_H_
