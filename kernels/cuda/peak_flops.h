// The peak rates of GPUs, from their vendor's tables.
#ifndef ZERO_KERNELS_CUDA_PEAK_FLOPS_H_
#define ZERO_KERNELS_CUDA_PEAK_FLOPS_H_

#include "absl/strings/string_view.h"

namespace zero::cuda {

// Dense bf16 FLOP/s (never the sparse figure) of a GPU by the name the driver
// gives it ("NVIDIA H200"); 0 where the name is not in the table.
// Source: the data sheets and whitepapers of the GPUs.
double PeakFlopsBf16(absl::string_view name);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_PEAK_FLOPS_H_
