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

// The best of many products y = x w^T in `dtype`, on the threads that the
// device computes with. Small products that end too soon to tell grow to
// larger ones; takes a few tenths of a second. Other work on the machine makes
// the rate too low, so measure while it is quiet.
ProductRate MeasureProductRate(Device& device, DType dtype);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
