#include "engine/train/run_start.h"

namespace zero {

absl::StatusOr<const RunData*> RunStart::Data(const Config& config,
                                              int num_threads) {
  std::call_once(data_once_, [&] {
    data_ = OpenRunData(config, /*need_train=*/true, num_threads);
  });
  if (!data_.ok()) return data_.status();
  return &*data_;
}

ProductRate RunStart::Product(const ModelTools& tools, Device& device,
                              DType dtype) {
  std::call_once(product_once_,
                 [&] { product_ = tools.product_rate(device, dtype, {}); });
  return product_;
}

}  // namespace zero
