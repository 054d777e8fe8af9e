// Which SIMD targets the CPU kernels are compiled for. Include this before any
// Highway header, in every source and test that uses Highway.
//
// AVX2 and above have fused multiply-add; SSSE3 and SSE4 have not, and
// Highway's MulAdd rounds twice there, so that they would give other bits.
// Machines without AVX2 run the scalar target (EMU128), whose multiply-adds
// are std::fma (simd-inl.h): slow, and the same bits.
#ifndef ZERO_KERNELS_CPU_TARGETS_H_
#define ZERO_KERNELS_CPU_TARGETS_H_

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)

#endif  // ZERO_KERNELS_CPU_TARGETS_H_
