// The CPU's kernels: oneDNN for matrix products, Highway (run-time dispatch)
// and OpenMP for the rest. Every op is in the file of its name; see
// kernels/ops.h for what each computes.
//
// Invariant: the bits of a result depend on the arguments and on
// `num_threads`, never on which thread ran what.
#ifndef ZERO_KERNELS_CPU_CPU_OPS_H_
#define ZERO_KERNELS_CPU_CPU_OPS_H_

#include <memory>

#include "kernels/ops.h"

namespace zero::cpu {

class MatmulCache;  // oneDNN engine, stream and primitives (matmul.h)

// How products of 16-bit operands are computed. kNative: by oneDNN's 16-bit
// primitives, where it has them. kConvert: in fp32, panel by panel, rounded on
// the way out. kAuto: native where that is faster (HasFastBf16).
enum class LowPrecision { kAuto, kNative, kConvert };

class CpuOps final : public Ops {
 public:
  explicit CpuOps(int num_threads,
                  LowPrecision low_precision = LowPrecision::kAuto);
  ~CpuOps() override;

  int num_threads() const { return num_threads_; }

  ZERO_OVERRIDE_ALL_OPS

 private:
  int num_threads_;
  std::unique_ptr<MatmulCache> matmul_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_CPU_OPS_H_
