// Attention by cuDNN's graphs: one graph per shape, direction and strides,
// built when its workspace is first asked for and kept; of packed sequences
// some, for few of them to many. Knows nothing of our own kernel
// (attention_tiles.h), to which attention.cc turns where cuDNN does not take a
// call. cudnn_attention_off.cc is the twin that takes none.
//
// cuDNN takes bf16 and fp16 with as many queries as keys, heads of a multiple
// of 8 up to 256 wide, and operands whose rows lie on multiples of 16 bytes;
// backward also B * H * T of a multiple of 4. Either direction may be ours.
// Its sums are in fp32, but probabilities and their gradients pass through the
// tensor cores in 16 bits. The statistics are those of ops.h: natural
// logarithms, [B, H, T].
//
// Packed sequences are ragged tensors to it: a graph has a fixed number of
// sequences, of which those that are not there have length 0. They need cuDNN
// 9.25, rows without gaps between them and, backward, any order of summation
// and heads of a multiple of 16.
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

  // The workspace with which cuDNN runs the call, for packed sequences whatever
  // their number; nullopt where it does not take it. Builds the graphs on first
  // use, each of which takes the host about a tenth of a second and loads the
  // engine's code.
  std::optional<size_t> WorkspaceBytes(const AttentionCall& call);

  // Launches the call, or returns false and does nothing where cuDNN does not
  // take it. Errors: DeviceError when a graph that was built does not run.
  bool Run(cudaStream_t stream, const AttentionCall& call, Workspace workspace);

  // As Device::notes(): why 16-bit attention of some shape, strides or address
  // runs on our own kernel. Of fewer than 64 tokens and of caches it says
  // nothing.
  std::vector<std::string> notes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// What a graph is validated for.
struct CudnnTarget {
  int sm = 90;  // compute capability: Hopper
  // cudnnGetVersion() of the library that shall run the graph, by which we
  // choose what it is asked; 92500 is 9.25.
  size_t version = 92500;
};

// Builds and validates the graphs of a call as for that GPU and that library,
// where there need not be a GPU, by the library that is here; compiles no plan.
// Errors: InvalidArgument with the shape, our reason and the remedy where
// cuDNN is not asked; Unimplemented with cuDNN's own reason where it refuses.
absl::Status ValidateCudnnAttention(const AttentionCall& call,
                                    bool deterministic,
                                    const CudnnTarget& target);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_CUDNN_ATTENTION_H_
