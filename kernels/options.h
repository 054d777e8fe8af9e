// Options of a GPU: a plain value, to configure one without using it.
#ifndef ZERO_KERNELS_OPTIONS_H_
#define ZERO_KERNELS_OPTIONS_H_

#include <cstdint>

namespace zero {

// Wider rows do not fit the registers of a norm's block of threads.
inline constexpr int kMaxGpuNormWidth = 16384;

// How a GPU computes. All options change results (loss_chunk_rows: the order in
// which the head's gradient is summed).
struct CudaOptions {
  // fp32 products on tensor cores with 10 bits of mantissa.
  bool allow_tf32 = false;
  // cuDNN's attention backward in a fixed order of summation; its workspace is
  // then O(T^2) on Hopper. Every other kernel is deterministic anyway.
  bool deterministic_attention = false;
  // Times the candidates of cuBLASLt once per shape instead of taking the
  // heuristic's first. The winner may differ from run to run, and so may the
  // last bits.
  bool time_algorithms = false;
  // Logits of 16-bit models in fp32 for the softmax, which computes in fp32
  // either way. False: in the model's dtype, half the memory and two thirds of
  // the bytes moved; a logit is then off by up to 2^-8 (bf16) or 2^-11 (fp16)
  // of itself, and infinite beyond 65504 in fp16.
  bool fp32_logits = false;
  // Rows of logits held at a time in LinearCrossEntropy.
  int64_t loss_chunk_rows = 8192;

  bool operator==(const CudaOptions&) const = default;
};

}  // namespace zero

#endif  // ZERO_KERNELS_OPTIONS_H_
