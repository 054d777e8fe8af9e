// Matrix products through plain oneDNN, without any code of ours between: the
// limit that our own products, and a whole step, are compared with.
#ifndef ZERO_TOOLS_BENCH_PRODUCTS_H_
#define ZERO_TOOLS_BENCH_PRODUCTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/config/model_config.h"
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
};

// The products of a linear layer y[m, out] = x[m, in] w[out, in]^T: y, the
// gradient of x, and that of w in fp32.
ProductShape ForwardShape(int64_t m, int64_t out, int64_t in, DType dtype);
ProductShape DxShape(int64_t m, int64_t out, int64_t in, DType dtype);
ProductShape DwShape(int64_t m, int64_t out, int64_t in, DType dtype);

// Whether products of `dtype` are faster than fp32 ones here. Where they are
// not, 16-bit products run as fp32 ones, and so does their limit.
bool HasNativeProducts(DType dtype);

// A product by the faster of two of oneDNN's kernels: the one that oneDNN
// offers first and the one that our own products take. The first run finds out.
class PlainProduct {
 public:
  // REQUIRES: HasNativeProducts(shape.dtype).
  explicit PlainProduct(const ProductShape& shape);
  ~PlainProduct();
  PlainProduct(PlainProduct&&) noexcept;

  const ProductShape& shape() const { return shape_; }
  int64_t a_bytes() const;
  int64_t b_bytes() const;
  int64_t c_bytes() const;
  void Run(const void* a, const void* b, void* c);

 private:
  struct Impl;
  ProductShape shape_;
  std::unique_ptr<Impl> impl_;
};

// One weight matrix of a model, in the order of the forward pass.
struct ModelProduct {
  std::string name;   // "qkv", "out", "fc", "proj", "head"
  int64_t count = 1;  // layers
  int64_t out = 0, in = 0;
};
// `vocab_rows`: of the table, as the model stores it.
std::vector<ModelProduct> ModelProducts(const ModelConfig& config,
                                        int64_t vocab_rows);

// Everything that a training step of `tokens` tokens multiplies by or into
// weights, alone: forward, data and weight gradients of every layer. Every
// layer has weights and their gradients of its own, up to 2 GiB of them, which
// no cache holds; layers of larger models take turns.
class StepProducts {
 public:
  struct Timed {
    std::string name;  // "fc forward", "fc dx", "fc dw"
    int64_t count = 0;
    double flops = 0;             // of one
    std::vector<double> seconds;  // of all `count` together, per pass
  };

  StepProducts(Device& device, const ModelConfig& config, int64_t vocab_rows,
               int64_t tokens, DType dtype);

  // Runs them in the order of a step and returns the seconds it took. The
  // first pass warms up and is not recorded.
  double Pass();

  const std::vector<Timed>& timed() const { return timed_; }
  DType dtype() const { return dtype_; }  // fp32 where `dtype` is not native

 private:
  struct Weight;
  DType dtype_;
  bool warm_ = false;
  std::vector<std::shared_ptr<Weight>> weights_;
  std::vector<Timed> timed_;
  std::vector<Buffer> memory_;
};

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_PRODUCTS_H_
