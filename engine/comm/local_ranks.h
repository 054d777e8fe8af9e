// Ranks of one process: a thread, a device and communicators for each.
#ifndef ZERO_ENGINE_COMM_LOCAL_RANKS_H_
#define ZERO_ENGINE_COMM_LOCAL_RANKS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/comm/local.h"
#include "engine/comm/rank.h"
#include "engine/comm/store.h"

namespace zero {

// Makes the device of one rank, on that rank's thread (the CPU's binds itself
// to it).
using MakeDeviceFn =
    std::function<absl::StatusOr<std::unique_ptr<Device>>(int rank)>;

// The work of one rank of a run.
using RankBody = std::function<absl::Status(const Rank& rank)>;

struct LocalRanksOptions {
  LocalOptions local;
  int shards = 0;  // ranks of a group; divides world; 0: one group
  // Rank r is on device r % num_devices.
  int num_devices = 1;
  // How many of `world` ranks share the device of `rank`, including it.
  int SharersOf(int rank, int world) const {
    const int place = rank % num_devices;
    return (world - place + num_devices - 1) / num_devices;
  }
  // Wraps a rank's end of a channel ("gather", "reduce", "across", "scalar";
  // see Rank), in a slow link or a trace. Null: no wrapper.
  std::function<std::unique_ptr<Communicator>(
      int rank, const std::string& channel, std::unique_ptr<Communicator> end)>
      wrap;
  absl::optional<Link> host_link = absl::nullopt;  // of each Rank
  // Budgets, as in MemoryShare.
  int64_t device_budget = 0, host_budget = 0;
  // How processes wait while they start; threads of one process start together.
  Patience patience;
  // Lines that must match on all processes of a run: each compares its own with
  // rank 0's before it begins.
  std::vector<std::string> must_match;
  // Called if a rank hangs: it did not return within local.timeout after
  // another rank's error, or another rank waited for it in vain. A thread
  // cannot be ended from outside, so this function should end the process.
  // Null: wait for the rank.
  std::function<void(const absl::Status& error)> on_hang;
};

// Connects the ranks of this process with each other, and with other processes'
// ranks: shared memory, or NCCL.
// Threads: used by all ranks at once.
class Transport {
 public:
  explicit Transport(int world) : world_(world) {}
  virtual ~Transport() = default;

  int world() const { return world_; }

  // Fills the Rank of an open device: its ends and the other fields.
  virtual absl::Status Connect(int index, Rank* rank) = 0;
  // Fails the run on behalf of a rank without ends.
  virtual void Abort(int index, const absl::Status& status) = 0;
  // OK, or why the run failed.
  virtual absl::Status status() = 0;
  // The same, polled several times a second while ranks run. `starting`: some
  // ranks are not connected yet.
  virtual absl::Status Watch(bool /*starting*/) { return status(); }
  // The missing ranks; see Rank.
  virtual std::vector<int> missing() = 0;

 private:
  const int world_;
};

// Runs `body` once for each of `ranks`, all of this process, each on its own
// thread, and waits for all of them. The first error or exception of any rank
// makes all communicators fail, so that no rank waits for one that is gone.
// Errors: that of the lowest failed rank; it names the rank that failed first.
absl::Status RunRanksOf(Transport& transport, const std::vector<int>& ranks,
                        const LocalRanksOptions& options,
                        const MakeDeviceFn& make_device, const RankBody& body);

// Runs all `world` ranks in this process, over shared memory.
absl::Status RunLocalRanks(int world, const LocalRanksOptions& options,
                           const MakeDeviceFn& make_device,
                           const RankBody& body);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LOCAL_RANKS_H_
