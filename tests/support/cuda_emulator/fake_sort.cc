// The sort of kernels/cuda/sort.h, without CUB: queued on the stream like a
// kernel. It fills all of its temporary memory, as CUB may, so that a workspace
// whose parts overlap gives a wrong result here too.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/sort.h"
#include "kernels/cuda/workspace.h"

namespace zero::cuda {
namespace {

struct SortCall {
  const int32_t* keys_in;
  const int32_t* values_in;
  int32_t* keys_out;
  int32_t* values_out;
  int64_t n;
  int key_bits;
  void* temp;
};

void Sort(const SortCall& call) {
  std::memset(call.temp, 0xff, SortPairsTempBytes(call.n));
  for (int64_t i = 0; i < call.n; ++i) {
    ZERO_CHECK_EQ(int64_t{call.keys_in[i]} >> call.key_bits, 0)
        << "SortPairs: key " << i << " has more than " << call.key_bits
        << " bits";
  }
  std::vector<int64_t> order(call.n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return call.keys_in[a] < call.keys_in[b];
  });
  for (int64_t i = 0; i < call.n; ++i) {
    call.keys_out[i] = call.keys_in[order[i]];
    call.values_out[i] = call.values_in[order[i]];
  }
}

}  // namespace

void SortPairs(cudaStream_t stream, const int32_t* keys_in,
               const int32_t* values_in, int32_t* keys_out, int32_t* values_out,
               int64_t n, int key_bits, void* temp) {
  ZERO_CHECK(n > 0 && n < (int64_t{1} << 31) && key_bits > 0) << n;
  auto call = std::make_unique<SortCall>(
      SortCall{keys_in, values_in, keys_out, values_out, n, key_bits, temp});
  ZERO_CUDA_CHECK(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        Sort(*std::unique_ptr<SortCall>(static_cast<SortCall*>(data)));
      },
      call.get()));
  call.release();
}

}  // namespace zero::cuda
