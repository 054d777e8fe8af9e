// Attention by cuDNN's graphs: one graph per shape, direction and strides,
// built when its workspace is first asked for, and kept. Packed sequences have
// several graphs, for different numbers of sequences. Knows nothing of our own
// kernel (attention_tiles.h), which attention.cc uses if cuDNN does not take a
// call. cudnn_attention_off.cc is the twin that takes none.
//
// cuDNN takes bf16 and fp16 with as many queries as keys, heads of a multiple
// of 8 up to 256 wide, and operands whose rows lie on multiples of 16 bytes;
// backward also B * H * T of a multiple of 4. Either direction may be ours.
// Its sums are in fp32, but probabilities and their gradients pass through the
// tensor cores in 16 bits. The statistics are those of ops.h: natural
// logarithms, [B, H, T].
//
// To cuDNN packed sequences are ragged tensors: a graph has a fixed number of
// sequences, and missing ones have length 0. They need cuDNN 9.25 and rows
// without gaps; backward also needs any order of summation and heads of a
// multiple of 16.
#ifndef ZERO_KERNELS_CUDA_CUDNN_ATTENTION_H_
#define ZERO_KERNELS_CUDA_CUDNN_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/cuda/attention_call.h"

namespace zero::cuda {

// Threads: one at a time, with the device current.
class AttentionPlans {
 public:
  // deterministic: the backward pass sums in a fixed order, with a workspace
  // of O(T^2) on Hopper.
  explicit AttentionPlans(bool deterministic);
  ~AttentionPlans();

  // The workspace with which cuDNN runs the call, enough for any number of
  // packed sequences; nullopt if it does not take the call. Builds the graphs
  // on first use: each takes the host about a tenth of a second and loads the
  // engine's code.
  std::optional<size_t> WorkspaceBytes(const AttentionCall& call);

  // Launches the call, or returns false and does nothing if cuDNN does not take
  // it. Errors: DeviceError if a graph that was built does not run.
  bool Run(cudaStream_t stream, const AttentionCall& call, Workspace workspace);

  // As Device::notes(): why 16-bit attention of some shape, strides or address
  // runs on our own kernel. There is no note for fewer than 64 tokens or for
  // caches.
  std::vector<std::string> notes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The GPU and the library for which a graph is validated.
struct CudnnTarget {
  int sm = 90;  // compute capability: Hopper
  // cudnnGetVersion() of the library that would run the graph: it decides what
  // cuDNN is asked; 92500 is 9.25.
  size_t version = 92500;
};

// Builds and validates the graphs of a call for `target`, with the library of
// this machine, which needs no GPU; compiles no plan.
// Errors: InvalidArgument with the shape, our reason and the remedy if cuDNN is
//         not asked; Unimplemented with cuDNN's own reason if it refuses.
absl::Status ValidateCudnnAttention(const AttentionCall& call,
                                    bool deterministic,
                                    const CudnnTarget& target);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_CUDNN_ATTENTION_H_
