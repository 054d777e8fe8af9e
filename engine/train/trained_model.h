// Which weights a command on a trained model should use.
#ifndef ZERO_ENGINE_TRAIN_TRAINED_MODEL_H_
#define ZERO_ENGINE_TRAIN_TRAINED_MODEL_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "engine/config/load.h"

namespace zero {

// The end of the last run in a folder, by its summary.json.
struct LastRun {
  std::string why_no_final;  // why it did not write final/; empty: it did
  bool interrupted = false;
};
LastRun ReadLastRun(const std::string& out_dir);

// The folder of the weights that a run of `config` ended with.
struct TrainedModel {
  std::string dir;
  std::string note;  // a remark on the choice; may be empty
};

// out_dir/final, where out_dir/summary.json says that the last run there wrote
// it; before any run, the folder that training starts from.
// Errors: NotFound if there is neither; FailedPrecondition if final/ is from an
//         earlier run than the last one, which was killed, still runs or
//         failed: both say how to name a folder.
absl::StatusOr<TrainedModel> FindTrainedModel(const Config& config);

// A remark if the evaluated model is in final/ or final.failed/ of a run whose
// config had other data to evaluate; empty: the same, unknown, or set on the
// command line.
std::string OtherDataOfRun(const LoadedConfig& loaded);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRAINED_MODEL_H_
