// The CPU's kernels: panels and oneDNN for matrix products, Highway (run-time
// dispatch) and OpenMP for the rest. Every op is in the file of its name;
// kernels/ops.h says what each computes.
//
// Invariant: the bits of a result depend on the arguments and on
// `num_threads`, never on which thread ran what.
#ifndef ZERO_KERNELS_CPU_CPU_OPS_H_
#define ZERO_KERNELS_CPU_CPU_OPS_H_

#include <memory>

#include "kernels/cpu/numa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

// The SIMD targets that the kernels are compiled for; must precede any Highway
// header. AVX2 and above have fused multiply-add; SSSE3 and SSE4 lack it, and
// Highway's MulAdd rounds twice there, which would give other bits. Machines
// without AVX2 run the scalar target (EMU128), whose multiply-adds are std::fma
// (simd-inl.h): slow, but with the same bits.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)

namespace zero::cpu {

class MatmulCache;  // matmul.h

// How products of 16-bit operands are computed. kNative: by oneDNN's 16-bit
// primitives, if it has them. kConvert: in fp32, panel by panel, rounded on the
// way out. kAuto: native if that is faster (HasFastBf16).
enum class LowPrecision { kAuto, kNative, kConvert };

class CpuOps final : public Ops {
 public:
  // With `nodes`, the threads that fill memory and update states in it are each
  // kept on a node: for a host, whose states are large and long-lived.
  explicit CpuOps(int num_threads,
                  LowPrecision low_precision = LowPrecision::kAuto,
                  NumaNodes nodes = {});
  ~CpuOps() override;

  int num_threads() const { return num_threads_; }

  // Whether products of bf16 use oneDNN's own primitives.
  bool HasNativeBf16() const;

  ZERO_OVERRIDE_ALL_OPS

 private:
  Team team() const { return {num_threads_, &nodes_}; }

  int num_threads_;
  NumaNodes nodes_;
  std::unique_ptr<MatmulCache> matmul_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_CPU_OPS_H_
