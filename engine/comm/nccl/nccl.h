// NCCL between GPUs: of one process or of many, on one machine or several.
//
// Every rank has four communicators, one for each of Rank's ends. NCCL runs the
// collectives of one communicator in the order of their calls, so gathers,
// reductions and scalars need one each to overlap. Calls never block: what NCCL
// does in the background is polled. A thread per rank watches for errors of
// NCCL, for collectives that outlast the timeout and for what other ranks write
// to the store. The first failure, on any rank, is written to the store, aborts
// all communicators of all ranks and is their status from then on. Nothing
// waits forever.
//
// Sums: data of 16 bits travels once to its owner, who adds it up in fp32 in
// rank order, so the bits are those of `local`. Sums of fp32 are NCCL's, in its
// own order, which is the same in every run on the same machines. Each rank
// issues all its collectives from one thread, and all ranks issue them in the
// same order: NCCL requires that of communicators that share a GPU.
#ifndef ZERO_ENGINE_COMM_NCCL_NCCL_H_
#define ZERO_ENGINE_COMM_NCCL_NCCL_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/rank.h"
#include "engine/comm/store.h"

namespace zero {

// The barrier in the store where ranks meet before NCCL connects them
// (MissingInStore).
inline constexpr char kNcclStartUp[] = "start-up of NCCL";

struct NcclOptions {
  int rank = 0;
  int world = 1;
  int shards = 0;  // ranks of a group; divides world; 0: one group
  // How long a collective may last on the GPU, including waits for other ranks,
  // and how long start-up waits for them.
  absl::Duration timeout = absl::Minutes(5);
};

// "NCCL 2.28.9", the version of the loaded library. Errors: Unimplemented, with
// the remedy, if this program was built without NCCL.
absl::StatusOr<std::string> NcclVersion();

// Whether `ranks` ranks of one machine can share its `gpus` GPUs.
// Errors: those of NcclVersion; FailedPrecondition if a GPU would have two
//         ranks, which NCCL allows only from 2.30 on, and only on request.
absl::Status CheckRanksOfGpus(int ranks, int gpus);

// Connects `rank`, whose device is a GPU: fills in its ends and what it knows
// of other ranks, and adds "on 2 GPUs" to its kind. All ranks call it. They
// find each other in `store`, which must outlive the ends, as must the device.
// Returns a function that says for how long the watching thread has been in one
// call of CUDA or NCCL: while such a call does not return, nothing else notices
// a timeout. The function may be called after the ends are gone.
// Errors: DeadlineExceeded with the ranks that did not come; Unavailable with
//         what NCCL says; FailedPrecondition if two ranks have one GPU.
absl::StatusOr<std::function<absl::Duration()>> ConnectNccl(
    std::shared_ptr<Store> store, const NcclOptions& options, Rank* rank);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_NCCL_H_
