// Which of oneDNN's kernels a product gets; for files that see oneDNN itself.
#ifndef ZERO_KERNELS_CPU_ONEDNN_H_
#define ZERO_KERNELS_CPU_ONEDNN_H_

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "dnnl.hpp"

namespace zero::cpu {

inline bool IsKind(const dnnl::matmul::primitive_desc& desc,
                   absl::string_view kind) {
  return absl::StartsWith(desc.impl_info_str(), kind);
}

// oneDNN's packing GEMM, if `packing` and there is one, else its first choice.
// Packing wins, in GFLOP/s per core, for fp32 (of which matmul.cc leaves oneDNN
// a few rows): 129-170 against 67-150 of the blocked kernels (brgemm) that
// oneDNN offers first on AVX-512, the least where rows lie a multiple of 4 KiB
// apart (Xeon, oneDNN 2.6); and for the gradients of bf16: 390-430 against
// 320-400 (Zen 5). It loses if both operands of a bf16 product are contiguous
// along k: 360-400 against 410-420.
// `desc` and `attr` are read again for the second choice, so they are named
// objects of the caller, never temporaries.
inline dnnl::matmul::primitive_desc ChooseMatmul(
    const dnnl::matmul::desc& desc, const dnnl::primitive_attr& attr,
    const dnnl::engine& engine, bool packing) {
  const dnnl::matmul::primitive_desc first(desc, attr, engine);
  if (!packing) return first;
  dnnl::matmul::primitive_desc gemm = first;
  while (!IsKind(gemm, "gemm") && gemm.next_impl()) {
  }
  return IsKind(gemm, "gemm:jit") ? gemm : first;
}

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_ONEDNN_H_
