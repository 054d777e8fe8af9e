// The device's ceiling: how fast it multiplies large matrices.
#ifndef ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
#define ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/dtype.h"

namespace zero {

struct ProductRate {
  double flops = 0;      // per second; 0: no memory to measure in
  int64_t size = 0;      // n of the n x n x n product
  bool earlier = false;  // measured in an earlier run
};

// The device's ceiling, the 100 % of utilization.
struct PeakRate {
  ProductRate product;  // the best measured so far
  double flops = 0;     // per second: the vendor's figure, else product.flops
};

// The best rate of many products y = x w^T in `dtype`, on the device's threads.
// They have 512 and 1024 rows, more if those are too short to time, and only
// 512 on a slow device. Takes a few tenths of a second. Other work on the
// machine lowers the rate: measure while it is idle, and keep the best of
// several measurements.
// `memory`: where on the device the matrices go, and overwrite what is there;
// sizes that do not fit are left out, so the rate may be below the ceiling.
// nullptr: takes memory of its own.
ProductRate MeasureProductRate(Device& device, DType dtype,
                               absl::Span<char> memory);

// The better of `measured` and the best rate in `file` for such a device (its
// name, instruction set and threads). Saves it there: a busy moment must not
// lower the reference. A file that cannot be read or written counts as empty.
ProductRate BestProductRate(const std::string& file, const DeviceInfo& device,
                            DType dtype, const ProductRate& measured);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
