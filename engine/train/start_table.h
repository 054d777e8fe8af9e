// The settings of a run, printed before its first step.
#ifndef ZERO_ENGINE_TRAIN_START_TABLE_H_
#define ZERO_ENGINE_TRAIN_START_TABLE_H_

#include <cstdint>

#include "engine/config/load.h"
#include "engine/data/sampler.h"
#include "engine/train/console.h"
#include "engine/train/report.h"
#include "engine/train/run_data.h"
#include "optim/lr_scaling.h"

namespace zero {

// Prints the table, and the notes on the config and the device.
// `num_eval_targets`: 0 if nothing is evaluated; `resumed_step`: 0 if the run
// begins.
void PrintStart(const LoadedConfig& loaded, const RunReport& report,
                const RunData& data, const Sampler& sampler,
                int64_t num_eval_targets, int64_t resumed_step,
                const LrScaling& scaling, Console* console);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_START_TABLE_H_
