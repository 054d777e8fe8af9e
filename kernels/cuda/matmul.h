// Matrix products of the GPU: cuBLASLt, one plan per shape.
//
// A plan is found by value: shape, strides, dtypes, epilogue and the promised
// alignment. A hit costs the host about a microsecond; a miss asks cuBLASLt's
// heuristic (0.1 ms). The promise is 16 bytes if every stride and pointer keeps
// it, else the size of an element. The engine's memory starts on 128 bytes
// (ZeroPlan::kAlignElems) and is cut by whole rows or heads, so a shape has the
// same plan, and the same bits, wherever its data lies.
//
// Sums are in fp32. Split-K is allowed only if it adds its parts in a fixed
// order. With CudaOptions::time_algorithms the fastest candidate is taken, so
// bits may differ from one run of the program to the next.
#ifndef ZERO_KERNELS_CUDA_MATMUL_H_
#define ZERO_KERNELS_CUDA_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "kernels/device.h"
#include "kernels/product.h"

namespace zero::cuda {

// The change to a sum before it is stored. GELU is the tanh approximation.
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
  // The matrix that is added: the residual, or c if there is none.
  ConstMatrix addend() const { return residual.data != nullptr ? residual : c; }
};

// Threads: one at a time, with the device current.
class MatmulPlans {
 public:
  // `ops` adds if cuBLASLt cannot (AccumulatesIntoF32); it must outlive this.
  MatmulPlans(Ops& ops, const CudaOptions& options);
  ~MatmulPlans();

  // Depends on shapes, strides and dtypes alone.
  size_t WorkspaceBytes(const Product& product) const;

  // Errors: DeviceError with cuBLASLt's status and the product's shape.
  // Synchronizes: once per shape with CudaOptions::time_algorithms.
  void Run(Stream& stream, const Product& product, Workspace workspace);

  // Runs the product if cuBLASLt has an algorithm for it as it is, and returns
  // whether it did: for some shapes there is none with an epilogue.
  // REQUIRES: c is not empty.
  bool TryRun(Stream& stream, const Product& product, Workspace workspace);

  // The same if it is also faster to compute a_sums with the product than by
  // `separately`, which launches a kernel for them: timed once per shape with
  // time_algorithms, else false, since the cost of an unmeasured epilogue is
  // not known.
  bool RunIfRowSumsPay(Stream& stream, const Product& product,
                       Workspace workspace,
                       absl::FunctionRef<void()> separately);

  // Whether cuBLASLt can add 16-bit products to fp32 memory, found out by one
  // small product when this object is made.
  bool AccumulatesIntoF32() const;

  // The number of plans, for tests.
  int64_t num_plans() const;
  int64_t num_runs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_MATMUL_H_
