// The device's own ceiling: how fast it multiplies large matrices right now.
#ifndef ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
#define ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_

#include "kernels/device.h"
#include "kernels/dtype.h"

namespace zero {

// FLOP/s of a 1024 x 1024 x 1024 product in `dtype`, the best of a few; takes
// some 50 ms. 0 where there is no memory for it.
double MeasureProductFlops(Device& device, DType dtype);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_PRODUCT_RATE_H_
