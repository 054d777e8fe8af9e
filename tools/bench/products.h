// Matrix products through plain oneDNN, without any code of ours: the limit for
// our own products, and for a whole step.
#ifndef ZERO_TOOLS_BENCH_PRODUCTS_H_
#define ZERO_TOOLS_BENCH_PRODUCTS_H_

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kernels/device.h"
#include "kernels/dtype.h"

namespace zero::bench {

// c[m,n] = a[m,k] b[k,n], row-major; a transposed operand is stored [k,m] or
// [n,k].
struct ProductShape {
  int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;
  bool b_transposed = false;
  DType dtype = DType::kF32;      // of a and b
  DType out_dtype = DType::kF32;  // of c

  double flops() const { return 2.0 * m * n * k; }
  auto operator<=>(const ProductShape&) const = default;
};

// The products of a linear layer y[m, out] = x[m, in] w[out, in]^T: y, the
// gradient of x, and that of w in fp32. If products of `dtype` are not faster
// than fp32 ones, 16-bit products run as fp32 ones, and so does their limit.
ProductShape ForwardShape(int64_t m, int64_t out, int64_t in, DType dtype);
ProductShape DxShape(int64_t m, int64_t out, int64_t in, DType dtype);
ProductShape DwShape(int64_t m, int64_t out, int64_t in, DType dtype);

// A product by the faster of two oneDNN kernels: its first choice and the
// packing one. The first run decides.
class PlainProduct {
 public:
  explicit PlainProduct(const ProductShape& shape);
  ~PlainProduct();
  PlainProduct(PlainProduct&&) noexcept;

  int64_t a_bytes() const;
  int64_t b_bytes() const;
  int64_t c_bytes() const;
  void Run(const void* a, const void* b, void* c);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Only the products of a training step, in order. Second operands and results
// advance through a GiB each, more than any cache, like weights, saved
// activations and gradients in the step.
class StepProducts {
 public:
  StepProducts(Device& device, std::vector<ProductShape> sequence);

  // Returns the seconds it took. The first pass only finds the kernels.
  double Pass();

 private:
  const std::vector<ProductShape> sequence_;
  std::map<ProductShape, PlainProduct> products_;
  Buffer first_, second_, result_;
};

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_PRODUCTS_H_
