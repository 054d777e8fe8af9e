// A collective as calls of NCCL, and the sums behind them.
#ifndef ZERO_ENGINE_COMM_NCCL_TRANSFERS_H_
#define ZERO_ENGINE_COMM_NCCL_TRANSFERS_H_

#include <nccl.h>

#include <cstdint>

#include "engine/comm/communicator.h"

namespace zero {

// Communicators never block: ncclInProgress means that a call, perhaps one
// of a group, continues in the background. That is no error.
inline bool IsNcclError(ncclResult_t result) {
  return result != ncclSuccess && result != ncclInProgress;
}

// One rank's place in a communicator, on a stream.
struct NcclPlace {
  int rank;
  int world;
  ncclComm_t comm;
  cudaStream_t stream;
  void* scratch;            // one byte of the device, for a barrier
  int64_t* received_bytes;  // grows by what calls bring from other ranks
};

// Makes the NCCL calls of a collective. REQUIRES: inside an NCCL group.
// Returns ncclSuccess or the first error.
ncclResult_t EnqueueTransfers(const NcclPlace& place,
                              const Collective& collective);

// Enqueues the sums that the device computes itself, after the transfers.
void EnqueueSums(const NcclPlace& place, Stream& stream,
                 const Collective& collective);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_TRANSFERS_H_
