// Models in Hugging Face's folder layout: config.json + model.safetensors.
//
// Our parameters are packed (q/k/v in one) and [out, in]; a model's
// PortableTensors say how each is cut and turned. Sharded, resumable
// checkpoints are another format; this one carries parameters only.
#ifndef ZERO_ENGINE_CHECKPOINT_PORTABLE_H_
#define ZERO_ENGINE_CHECKPOINT_PORTABLE_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/nn/module.h"
#include "kernels/dtype.h"

namespace zero {

// Gives fp32 values [begin, begin + count) of a parameter, in its own layout.
using ReadParameterFn = std::function<absl::Status(
    const Parameter&, int64_t begin, int64_t count, float* out)>;

// Reads values [begin, end) in pieces of at most kPieceElems, in order: a
// whole embedding as fp32 may be more memory than is left beside a model.
inline constexpr int64_t kPieceElems = int64_t{1} << 20;
absl::Status ReadInPieces(
    const ReadParameterFn& read, const Parameter& parameter, int64_t begin,
    int64_t end,
    const std::function<absl::Status(int64_t at, absl::Span<const float>)>&
        take);

// Takes all parameters, one after the other.
using LoadParametersFn = std::function<void(
    const std::function<void(const Parameter&, float* out)>& values)>;

// Writes DIR/config.json (`config_json`) and DIR/model.safetensors in `dtype`.
// The folder appears all at once and takes the place of an earlier one
// (base/atomic_folder.h); what else was in it, such as a tokenizer, goes along.
// Returns a note on everything that could not go along: the earlier folder is
// then DIR.previous.
// Memory: a piece, and one whole matrix where the file has it turned.
// Errors: as FileError; an earlier DIR is then as it was.
absl::StatusOr<std::vector<std::string>> SavePortable(
    const std::string& dir, const Model& model, const std::string& config_json,
    DType dtype, const ReadParameterFn& read);

// Makes the calls of `read` that SavePortable makes, in its order: where
// reading is a collective, the ranks that write nothing take part so.
absl::Status ReadAsSavePortable(const Model& model,
                                const ReadParameterFn& read);

// Reads DIR's weights into the model through `load`.
// Errors: NotFound; InvalidArgument listing tensors that are missing,
//         unexpected or of another shape, before anything is loaded.
absl::Status LoadPortable(const std::string& dir, const Model& model,
                          const LoadParametersFn& load);

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_PORTABLE_H_
