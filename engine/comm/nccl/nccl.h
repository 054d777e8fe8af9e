// NCCL between GPUs: of one process or of many, on one machine or several.
//
// Every rank has four communicators, as Rank has ends: NCCL's collectives of
// one communicator run in the order of their calls, so gathers, reductions and
// scalars need one each to run beside each other. Calls never block: what NCCL
// does in the background is polled, and a thread per rank watches for errors
// of NCCL, for collectives that outlast the timeout and for what other ranks
// say in the store. Whatever goes wrong first, on any rank, is written to the
// store, aborts all communicators of all ranks and is the status of all of
// them from then on. Nothing ever waits forever.
//
// Sums: data of 16 bits travels once to its owner, who adds it up in fp32 in
// rank order, so the bits are those of `local`. Sums of fp32 are NCCL's, in its
// own order, the same in every run on the same machines.
// All ranks issue all their collectives in one order, from one thread each:
// NCCL wants that of communicators that share a GPU.
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

// Where ranks meet in the store before NCCL connects them (MissingInStore).
inline constexpr char kNcclStartUp[] = "start-up of NCCL";

struct NcclOptions {
  int rank = 0;
  int world = 1;
  int shards = 0;  // ranks of a group; divides world; 0: one group
  // How long a collective may last on the GPU, waiting for other ranks
  // included; and how long start-up waits for them.
  absl::Duration timeout = absl::Minutes(5);
};

// "NCCL 2.28.9", of the library that was loaded. Errors: Unimplemented, with
// the remedy, where this program was built without it.
absl::StatusOr<std::string> NcclVersion();

// Whether `ranks` ranks of one machine can share its `gpus` GPUs.
// Errors: those of NcclVersion; FailedPrecondition where a GPU would have two
//         ranks, which NCCL allows from 2.30 on and when asked to.
absl::Status CheckRanksOfGpus(int ranks, int gpus);

// Connects `rank`, whose device is a GPU, and fills in its ends and what it
// knows of other ranks; to its kind it adds "on 2 GPUs". All ranks call it.
// They find each other in `store`, which lives as long as any end. The device
// must outlive the ends.
// Returns a function: for how long the thread that watches has been in one call
// of CUDA or NCCL. Where that does not return, nothing else notices a timeout.
// It can be called when the ends are gone.
// Errors: DeadlineExceeded with the ranks that did not come; Unavailable with
//         what NCCL says; FailedPrecondition where two ranks have one GPU.
absl::StatusOr<std::function<absl::Duration()>> ConnectNccl(
    std::shared_ptr<Store> store, const NcclOptions& options, Rank* rank);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_NCCL_H_
