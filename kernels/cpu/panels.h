// Matrix products in fp32 of operands that are packed into panels first, in
// memory of the caller: what one thread does to one tile of a product.
#ifndef ZERO_KERNELS_CPU_PANELS_H_
#define ZERO_KERNELS_CPU_PANELS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/product.h"

namespace zero::cpu {

// Scratch of PanelProduct.
// Units: bytes, a multiple of 64.
size_t PanelProductBytes(const Product& tile);

// Computes `tile` on the calling thread: 16-bit operands are converted exactly,
// each of the fewest equal pieces of at most 512 k is summed in order of k, and
// the pieces' sums are added in order. A 16-bit c is rounded once, to nearest
// even.
//
// The bits of an element depend on its row of a, its column of b, the addends
// and the dtypes, not on the tile or the CPU.
void PanelProduct(const Product& tile, void* scratch);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_PANELS_H_
