// Shared by the ranks of a process before a run: the data, and the measured
// device.
#ifndef ZERO_ENGINE_TRAIN_RUN_START_H_
#define ZERO_ENGINE_TRAIN_RUN_START_H_

#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "engine/train/product_rate.h"
#include "engine/train/run_data.h"
#include "engine/train/session.h"
#include "kernels/device.h"

namespace zero {

// The first rank that asks does the work, with its threads, and the others
// wait: no file is checked twice, and no rank computes while the machine is
// measured.
// Threads: used by all ranks at once. All ask for the same.
class RunStart {
 public:
  // `link`: the simulated link between ranks, in ParseLink's form; empty: none.
  explicit RunStart(std::string link = "") : link_(std::move(link)) {}

  const std::string& link() const { return link_; }

  // The data of a training run. Errors: as OpenRunData, the same for all.
  absl::StatusOr<const RunData*> Data(const Config& config, int num_threads);

  // tools.product_rate on the device of the first.
  ProductRate Product(const ModelTools& tools, Device& device, DType dtype);

 private:
  const std::string link_;
  std::once_flag data_once_, product_once_;
  absl::StatusOr<RunData> data_ = RunData();
  ProductRate product_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_START_H_
