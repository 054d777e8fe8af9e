// The twin that is linked where NCCL is not built: it says so.
#include "engine/comm/nccl/nccl.h"

namespace zero {
namespace {

absl::Status NotBuilt() {
  return absl::UnimplementedError(
      "NCCL is not built into this program: tools/configure found no CUDA "
      "toolkit, or no nccl.h and libnccl.so.2 beside it; install them and "
      "build again, or set communication.backend to \"local\"");
}

}  // namespace

absl::StatusOr<std::string> NcclVersion() { return NotBuilt(); }

absl::Status CheckRanksOfGpus(int, int) { return NotBuilt(); }

absl::StatusOr<std::function<absl::Duration()>> ConnectNccl(
    std::shared_ptr<Store>, const NcclOptions&, Rank*) {
  return NotBuilt();
}

}  // namespace zero
