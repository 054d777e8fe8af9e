// Matrix products of the GPU: cuBLASLt, one plan per shape.
//
// A plan is found by value: shape, strides, dtypes, epilogue and the alignment
// promised; a hit costs the host about a microsecond, a miss asks cuBLASLt's
// heuristic (0.1 ms). What is promised is 16 bytes where every stride and
// pointer keeps it, else the size of an element. Memory of the engine starts on
// 128 bytes (ZeroPlan::kAlignElems) and is cut by whole rows or heads, so the
// plan of a shape, and with it the bits, are the same wherever the data lies.
//
// Sums are in fp32. Of split-K only the kind that adds its parts in a fixed
// order is allowed. With CudaOptions::time_algorithms the fastest candidate is
// taken, so that bits may differ from one run of the program to the next.
#ifndef ZERO_KERNELS_CUDA_MATMUL_H_
#define ZERO_KERNELS_CUDA_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/device.h"
#include "kernels/product.h"

namespace zero::cuda {

// What happens to a sum before it is stored. GELU is the tanh approximation.
enum class Epilogue {
  kNone,
  kGelu,          // gelu(sum); the sum goes to gelu_input when that is not null
  kGeluGradient,  // sum * gelu'(gelu_input)
};

// c[m,n] = epilogue(a[m,k] b[k,n] + addend[m,n] + bias[n]), k > 0.
struct Product : zero::Product {
  Epilogue epilogue = Epilogue::kNone;  // kGeluGradient: without a bias
  Matrix gelu_input = {};               // [m, n]
  Vector a_sums = {};  // [m] = sums of a over k; data null: not wanted

  bool has_addend() const { return accumulate || residual.data != nullptr; }
  // c where there is no other.
  ConstMatrix addend() const { return residual.data != nullptr ? residual : c; }
};

// Threads: one at a time, with the device current.
class MatmulPlans {
 public:
  // `ops` adds where cuBLASLt does not (AccumulatesIntoF32), and outlives this.
  MatmulPlans(Ops& ops, const CudaOptions& options);
  ~MatmulPlans();

  // A function of shapes, strides and dtypes alone.
  size_t WorkspaceBytes(const Product& product) const;

  // Whether Run takes the product as it is. Without an epilogue it always
  // does; for some shapes cuBLASLt has no algorithm with one.
  bool Supports(const Product& product);

  // Errors: DeviceError with cuBLASLt's status and the product's shape.
  // Synchronizes: once per shape with CudaOptions::time_algorithms.
  void Run(Stream& stream, const Product& product, Workspace workspace);

  // With time_algorithms, once per shape: whether a_sums come cheaper with the
  // product than by `separately`, which launches their kernel. Without, false:
  // what an unmeasured epilogue costs the product is not known.
  bool RowSumsPay(Stream& stream, const Product& product, Workspace workspace,
                  const std::function<void()>& separately);

  // Whether cuBLASLt adds 16-bit products to what fp32 memory holds; found out
  // by one small product when this is made.
  bool AccumulatesIntoF32() const;

  // For tests.
  int64_t num_plans() const;
  int64_t num_runs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_MATMUL_H_
