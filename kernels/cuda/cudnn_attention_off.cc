// Built without the headers of cuDNN's frontend: takes no call.
#include "kernels/cuda/cudnn_attention.h"

namespace zero::cuda {

struct AttentionPlans::State {};

AttentionPlans::AttentionPlans(bool) {}
AttentionPlans::~AttentionPlans() = default;

std::optional<size_t> AttentionPlans::WorkspaceBytes(const AttentionCall&) {
  return std::nullopt;
}
bool AttentionPlans::Run(cudaStream_t, const AttentionCall&, Workspace) {
  return false;
}

std::vector<std::string> AttentionPlans::notes() const {
  return {
      "attention runs on our own kernel, which uses no tensor cores: this "
      "binary was built without the headers of cuDNN's frontend, which "
      "tools/install_packages fetches"};
}

}  // namespace zero::cuda
