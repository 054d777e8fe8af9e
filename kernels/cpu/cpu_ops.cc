#include "kernels/cpu/cpu_ops.h"

#include <utility>

#include "kernels/cpu/matmul.h"

namespace zero::cpu {

CpuOps::CpuOps(int num_threads, LowPrecision low_precision, NumaNodes nodes)
    : num_threads_(num_threads),
      nodes_(std::move(nodes)),
      matmul_(std::make_unique<MatmulCache>(num_threads, low_precision)) {}

CpuOps::~CpuOps() = default;

bool CpuOps::HasNativeBf16() const { return matmul_->IsNative(DType::kBF16); }

}  // namespace zero::cpu
