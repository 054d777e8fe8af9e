// The device's own ceiling: how fast it multiplies large matrices.
#ifndef ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
#define ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_

#include <cstdint>
#include <string>

#include "kernels/device.h"
#include "kernels/dtype.h"

namespace zero {

struct ProductRate {
  double flops = 0;      // per second; 0: no memory to measure
  int64_t size = 0;      // n of the n x n x n product
  bool earlier = false;  // measured in an earlier run
};

// The device's ceiling, which utilization is a share of.
struct PeakRate {
  ProductRate product;  // the best measured so far
  double flops = 0;     // per second: the vendor's figure, else product.flops
};

// The best of many products y = x w^T in `dtype`, on the threads that the
// device computes with: of 512 and 1024 rows, and of more while those end too
// soon to tell, but on a slow device of 512 alone; takes a few tenths of a
// second. Other work on the machine makes the rate too low: measure while it is
// quiet, and keep the best of several measurements.
ProductRate MeasureProductRate(Device& device, DType dtype);

// The better of `measured` and of the best that `file` has of such a device
// (its name, instruction set and threads), which gets it: so that a busy moment
// does not change what runs are compared with. A file that cannot be read or
// written has nothing.
ProductRate BestProductRate(const std::string& file, const DeviceInfo& device,
                            DType dtype, const ProductRate& measured);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
