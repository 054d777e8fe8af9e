#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/op_checks.h"
#include "kernels/philox.h"

namespace zero::cuda {
namespace {

// Moves 2 * itemsize bytes per element, and computes ten rounds of Philox for
// four. Goal: 60 % of copy bandwidth in 16 bits, 90 % in fp32.
template <class T>
struct DropoutPass {
  const T* x;
  T* y;
  int64_t x_ld, y_ld;
  const int64_t* row_ids;
  uint64_t key;
  float probability, scale;

  template <bool kWhole>
  __device__ void Run(int64_t row, const Slice<kFlatElems>& slice) const {
    const auto in = Load<kWhole>(x + row * x_ld, slice);
    const uint64_t id = static_cast<uint64_t>(row_ids[row]);
    const uint64_t block = static_cast<uint64_t>(slice.base) / 4;
    Packed<T, kFlatElems> out;
#pragma unroll
    for (int b = 0; b < kFlatElems / 4; ++b) {
      const PhiloxBlock random = Philox(key, block + b, id);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const bool keep = UniformFromBits(random.x[w]) >= probability;
        const int k = 4 * b + w;
        out.x[k] = FromFloat<T>(keep ? ToFloat(in.x[k]) * scale : 0.0f);
      }
    }
    Store<kWhole>(y + row * y_ld, slice, out);
  }
};

}  // namespace

void CudaOps::Dropout(Stream& stream, const DropoutArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.x, args.y);
  const bool aligned = AreRowsAligned(args.x) && AreRowsAligned(args.y);
  const float scale = 1.0f / (1.0f - args.probability);
  ZERO_CUDA_WITH_FLOAT_TYPE(
      args.y.dtype, T,
      MapRows(HandleOf(stream), args.x.rows, args.x.cols, aligned,
              DropoutPass<T>{static_cast<const T*>(args.x.data),
                             static_cast<T*>(args.y.data), args.x.ld, args.y.ld,
                             args.row_ids, args.key, args.probability, scale}));
}

}  // namespace zero::cuda
