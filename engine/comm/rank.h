// One rank of a run: its device and its ends of the communicators. Passed
// down, never global, so that ranks can be threads of one process.
#ifndef ZERO_ENGINE_COMM_RANK_H_
#define ZERO_ENGINE_COMM_RANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/comm/channel.h"
#include "engine/comm/null.h"
#include "engine/comm/shaped.h"
#include "kernels/device.h"

namespace zero {

// How a rank shares memory.
struct MemoryShare {
  // Ranks that share the device's memory, including this one; 0: all.
  int sharers = 0;
  // Ranks that share the host's memory; 0: all.
  int host_sharers = 0;
  // Ranks that share a process's context on the device; 0: as `sharers`.
  int context_sharers = 0;
  // Bytes of each memory that this rank may take; 0: its share of the total.
  int64_t device_budget = 0;
  int64_t host_budget = 0;
};

struct Rank {
  Device* device = nullptr;
  // Between the ranks of a group, which shards the states: consecutive ranks.
  // Parameters and gradients move independently, each on its own stream.
  std::unique_ptr<Communicator> gather;
  std::unique_ptr<Communicator> reduce;
  // Between groups: the ranks with the same index in their group. Carries
  // gradients, on the stream of `reduce`.
  std::unique_ptr<Communicator> across;
  // Between all ranks: the few numbers they agree on, on the compute stream.
  std::unique_ptr<Communicator> scalar;

  // A description of the ranks for people, without their number: "threads of
  // this process on 2 GPUs".
  std::string kind = "threads of this process";

  // The host name of every rank. Empty: all are on this host.
  std::vector<std::string> hosts = {};

  MemoryShare memory = {};
  // The link that copies between the device and its host are slowed down to;
  // none: full speed.
  absl::optional<Link> host_link = absl::nullopt;

  // Host-side barrier and vote, without a collective: returns true if every
  // rank passed true. Ranks whose collectives spin on a GPU meet here once they
  // have allocated their memory. Allocating or mapping memory waits for all
  // work of a GPU and holds process-wide locks; that work may be a collective
  // that waits for a launch of another rank, which needs the same locks.
  // Order:  all ranks, in the same sequence.
  // Errors: DeadlineExceeded with the missing ranks; why the run failed.
  // Null: not needed.
  std::function<absl::StatusOr<bool>(const std::string& name, bool yes)> agree =
      nullptr;

  // The ranks that others waited for in vain (LocalGroup::missing). Null: no
  // rank can be missing.
  std::function<std::vector<int>()> missing = nullptr;

  // Bytes that this rank's process has sent to others. Null: there are no
  // others.
  std::function<int64_t()> sent_bytes = nullptr;

  // Whether states on the host take the device's memory: on a CPU they do,
  // unless device and host have their own budgets.
  bool one_memory() const {
    return device->kind() == DeviceKind::kCpu && memory.host_budget == 0;
  }

  int rank() const { return scalar->rank(); }
  int world() const { return scalar->world(); }
  int shards() const { return gather->world(); }  // ranks of a group

  std::unique_ptr<Communicator>& end(Channel channel) {
    std::unique_ptr<Communicator>* const ends[] = {&gather, &reduce, &across,
                                                   &scalar};
    return *ends[static_cast<size_t>(channel)];
  }

  // The first error of the four communicators.
  absl::Status status() const {
    for (const auto* end : {&gather, &reduce, &across, &scalar}) {
      if (absl::Status status = (*end)->status(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
};

// Rank `rank` of `world`, in groups of `shards` (0: one group). Its collectives
// move nothing: it is the only rank, or on the meta device one of any world.
inline Rank MakeSoloRank(Device& device, int rank = 0, int world = 1,
                         int shards = 0,
                         BulkAlgorithm algorithm = BulkAlgorithm::kDirect) {
  if (shards == 0) shards = world;
  const auto end = [algorithm](int place, int size) {
    return std::make_unique<NullCommunicator>(place, size, algorithm);
  };
  return {&device, end(rank % shards, shards), end(rank % shards, shards),
          end(rank / shards, world / shards), end(rank, world)};
}

// A copy of `rank` for a rehearsal on the meta device: connected in the same
// way, but its collectives move nothing.
inline Rank MakeRehearsalRank(Device& meta, const Rank& rank) {
  return MakeSoloRank(meta, rank.rank(), rank.world(), rank.shards(),
                      rank.gather->algorithm());
}

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RANK_H_
