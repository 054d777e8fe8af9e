// The device's own ceiling: how fast it multiplies large matrices.
#ifndef ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
#define ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_

#include <cstdint>

#include "kernels/device.h"
#include "kernels/dtype.h"

namespace zero {

struct ProductRate {
  double flops = 0;  // per second; 0: no memory to measure
  int64_t size = 0;  // n of the n x n x n product
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

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
