// A checkpoint manifest's record of a run: its progress, its config, and a
// fingerprint of its data.
#ifndef ZERO_ENGINE_TRAIN_RUN_MANIFEST_H_
#define ZERO_ENGINE_TRAIN_RUN_MANIFEST_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/train/run_data.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"
#include "nlohmann/json_fwd.hpp"

namespace zero {

class TokenSource;

// The folder of a run's checkpoints.
inline std::string CheckpointsFolder(const Config& config) {
  return config.training.out_dir + "/checkpoints";
}

// `run` and `save` are ids (NewId).
// Threads: any, while the run trains.
CheckpointManifest DescribeRun(const Session& session, const RunData& data,
                               const RunRecord& record, const std::string& run,
                               const std::string& save);

// The RunRecord of such a manifest.
// Errors: DataLoss.
absl::StatusOr<RunRecord> ReadRecord(const CheckpointManifest& manifest);

// The fingerprint of training data: its size and a sample of it, as in the
// manifest's progress["data"].
nlohmann::ordered_json DescribeData(const TokenSource& tokens);

// 52 random bits, which a double carries from rank to rank; such a number as an
// id.
double RandomNumber();
std::string Id(double number);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_MANIFEST_H_
