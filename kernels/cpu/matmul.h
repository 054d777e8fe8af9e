// Matrix products of the CPU: packed panels in fp32 (panels.h), and oneDNN
// primitives, made once per shape.
//
// A product is cut into tiles of c; one thread computes a tile, all of k, in
// its own part of the workspace: neither way allocates memory for fp32. A
// product is found by shape, strides, dtypes and options; a hit costs about two
// microseconds, a miss of oneDNN's 0.3 ms for each size of tile.
//
// 16-bit operands go to oneDNN's 16-bit primitives if that is faster
// (HasFastBf16), and a few rows of fp32 to its fp32 ones, which read the
// operands in place. Everything else is computed in panels: 16-bit operands are
// converted as they are packed, and a tile is rounded to nearest even on the
// way out.
//
// The bits of c depend on shapes, strides, dtypes and options. Only oneDNN's
// kernels also depend on the sizes of the tiles, and so on the number of
// threads; nothing depends on which thread computes what.
#ifndef ZERO_KERNELS_CPU_MATMUL_H_
#define ZERO_KERNELS_CPU_MATMUL_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/product.h"

namespace zero::cpu {

// Whether the CPU multiplies bf16 faster than fp32. Measured per core (oneDNN
// 2.6): a Zen 4 reaches 230 GFLOP/s in bf16 against 115 in fp32, an Intel Xeon
// with AVX-512-BF16 but without AMX 80 against 160, so there bf16 is converted.
bool HasFastBf16();

class MatmulCache {
 public:
  // The most workspace that one thread of a product, or of attention, takes.
  static constexpr size_t kThreadBytes = size_t{4} << 20;

  MatmulCache(int num_threads, LowPrecision low_precision);
  ~MatmulCache();

  // A function of only shapes, strides and dtypes.
  size_t WorkspaceBytes(const Product& product);

  // Threads: the calling thread and its OpenMP team of num_threads.
  void Run(const Product& product, Workspace workspace);

  // Whether products of `dtype` use oneDNN's own primitives (if it has one for
  // the shape other than its slow reference).
  bool IsNative(DType dtype) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_MATMUL_H_
