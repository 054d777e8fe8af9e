// Settings of the fake cuBLASLt (fake_cublaslt.cc) for tests.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_CUBLASLT_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_CUBLASLT_H_

#include <cublasLt.h>

namespace zero::emulator {

// Features that a real cuBLASLt might lack on some GPU or in some version.
struct CublasLt {
  bool accumulates_into_f32 = true;  // 16-bit products, beta = 1
  bool has_gelu = true;
  bool has_gelu_gradient = true;
  bool has_bias_gradient = true;
  bool has_unaligned = true;  // 16-bit operands that are not on 16 bytes
  // Its status for an unsupported epilogue.
  cublasStatus_t missing = CUBLAS_STATUS_NOT_SUPPORTED;
  bool runs_first = true;  // the first algorithm that its heuristic offers
};

// Holds for plans made later.
void SetCublasLt(const CublasLt& what);

}  // namespace zero::emulator

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_CUBLASLT_H_
