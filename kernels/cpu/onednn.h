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

// oneDNN's first choice, but for fp32 its packing GEMM where there is one:
// that reaches 129-170 GFLOP/s per core against 67-150 of the blocked kernels
// (brgemm) that it offers first on AVX-512, the least where rows lie a multiple
// of 4 KiB apart (Xeon, oneDNN 2.6).
// `desc` and `attr` are read again for the second choice, so they are named
// objects of the caller, never temporaries.
inline dnnl::matmul::primitive_desc ChooseMatmul(
    const dnnl::matmul::desc& desc, const dnnl::primitive_attr& attr,
    const dnnl::engine& engine, bool fp32) {
  const dnnl::matmul::primitive_desc first(desc, attr, engine);
  if (!fp32) return first;
  dnnl::matmul::primitive_desc packing = first;
  while (!IsKind(packing, "gemm") && packing.next_impl()) {
  }
  return IsKind(packing, "gemm:jit") ? packing : first;
}

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_ONEDNN_H_
