// The ranks of one process as threads that share memory: the host's, or that of
// GPUs with peer access (several ranks may share a GPU). On the CPU a Network
// can add ranks of other processes.
//
// Ranks exchange addresses, never copies: a rank publishes its collective,
// waits until all have arrived, reads what it needs straight from the others'
// memory into its own, and continues when no rank reads its memory any more.
// Waiting is on a condition variable, never spinning, since a waiting rank's
// core computes for another. Sums run in rank order 0 .. world-1, or around a
// ring, so the bits do not depend on arrival order.
//
// Every rank works on its own stream: a worker stream, so that collectives
// overlap with compute, or the calling thread's. All ranks' streams must make
// progress independently; ranks that share a stream would wait for themselves
// until the timeout.
//
// If there are other processes, the ranks of this one meet as usual. The lowest
// of them, the leader, then exchanges one message with each other process per
// round (rounds.h), and every rank does its share of a round as if all memory
// were in this process.
//
// On a GPU a collective is issued inside Run: the calling threads meet there to
// issue it, and each makes its stream wait for the others' streams (by events)
// before it reads their memory and before it continues. No thread waits for a
// GPU.
#ifndef ZERO_ENGINE_COMM_LOCAL_H_
#define ZERO_ENGINE_COMM_LOCAL_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"
#include "engine/comm/network.h"
#include "engine/comm/progress.h"

namespace zero {

class PeerMemory;
class Rounds;

// The ranks of other processes.
struct OtherProcesses {
  std::shared_ptr<Network> network;
  // Asks these processes where they are in their collectives. Null: unknown.
  std::function<RanksProgress()> ask;
  // Why the run failed, if the network knows: an error here may only be the
  // consequence of another process's end. Null: unknown.
  std::function<absl::Status(const absl::Status& own)> find_cause;
};

struct LocalOptions {
  // How long a rank waits for the others in one collective. It must exceed the
  // longest computation that another rank waits for.
  absl::Duration timeout = absl::Minutes(5);
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  // Read by kHierarchical on the CPU: this many consecutive ranks are one host.
  // It divides the world. 0: all ranks are one host.
  int ranks_per_host = 0;
  // Without a network all ranks are threads of this process. With one, the
  // ranks are on the CPU and the algorithm is not kRing.
  OtherProcesses others;
};

// Threads: used by all ranks at once.
class LocalGroup : public std::enable_shared_from_this<LocalGroup> {
 public:
  static std::shared_ptr<LocalGroup> Make(int world, LocalOptions options = {});

  // The end of `rank`, a rank of this process, on `channel` ("gather",
  // "reduce", "scalar") among `members`, or all ranks if that is empty. The
  // communicator's rank is the index in `members`; messages name the rank of
  // the run. Each channel is its own sequence of collectives, but all share one
  // failure: a failed group fails every channel. A rank connects once to a
  // channel. Destroying an end leaves the channel: the others fail at once if
  // they need more collectives from it than it issued. Errors, by status() of
  // any communicator of the group:
  //   FailedPrecondition  ranks are in different collectives, or on GPUs
  //                       that cannot read each other's memory
  //   Unavailable         a rank has left
  //   Internal            a rank's device failed in a collective; it throws
  //   of the network      see Network::Exchange
  //   else                what Abort was given
  std::unique_ptr<Communicator> Connect(int rank, const std::string& channel,
                                        std::vector<int> members = {});

  int world() const { return world_; }

  // Makes the group fail; the first call counts.
  void Abort(int rank, const absl::Status& status);
  // The same with an error of another process, whose text stays as it is.
  void Fail(const absl::Status& status);
  // Bytes of data that this process has begun to send to others.
  int64_t sent_bytes() const;
  // Where this process's ranks are in their collectives.
  RanksProgress progress() const;
  // OK, or why it failed.
  absl::Status status() const;
  // The ranks that others waited for in vain, ascending; empty unless the group
  // failed that way. A rank that was itself waiting in another channel is not
  // missing: the ranks that it waited for are.
  std::vector<int> missing() const;

  ~LocalGroup();

 private:
  friend class LocalCommunicator;
  struct Call;
  struct Marks;
  struct End;
  struct Channel;
  using Lock = std::unique_lock<std::mutex>;

  LocalGroup(int world, LocalOptions options);

  // Numbers a collective and returns it. `place` is a rank's index among the
  // members of a channel. `marks`: of an asynchronous device.
  std::shared_ptr<const Call> Issue(Channel& channel, int place, Stream& stream,
                                    Collective collective,
                                    std::shared_ptr<Marks> marks);
  // The work of one collective, on the stream's thread. Open waits until all
  // ranks have arrived and returns false if the group has failed. Meet waits in
  // the middle of a share, Close until all shares are done. `share` is how long
  // this rank's share took, including waits.
  void Perform(Channel& channel, int place,
               const std::shared_ptr<const Call>& call);
  bool Open(Channel& channel, int place,
            const std::shared_ptr<const Call>& call);
  bool Meet(Channel& channel, int place);  // false: a rank broke off
  void Close(Channel& channel, int place, int64_t read_bytes,
             std::chrono::nanoseconds share);
  // The rank's device failed inside: other ranks must not wait for it there.
  void Break(Channel& channel, int place, const std::string& reason);

  void Leave(Channel& channel, int place);

  // A rank's share of a collective with ranks of other processes.
  class Crossing;
  int64_t Cross(Channel& channel, int place, Stream& stream);
  // This rank's part of the sums that its process sends in a round.
  void SumForOthers(Channel& channel, int place, PeerMemory& peers,
                    Stream& stream, const Rounds& rounds, int round);
  // Waits for messages; false: the group has failed.
  bool AwaitNetwork(Channel& channel, int place, Network::Exchange& exchange);
  // Another process is in a different collective. Returns false.
  bool FailAcross(Channel& channel, int place);
  void BreakOff(Channel& channel);
  const char* name() const {
    return others_.network == nullptr ? "local" : "mpi";
  }

  // REQUIRES: the lock is held.
  // Waits until `condition` holds; if that takes too long, the group fails and
  // the wait continues.
  template <class Condition>
  void Await(Lock& lock, Channel& channel, int place,
             const Condition& condition);
  void Latch(const absl::Status& status);  // the first counts
  void FailIfGone(const Channel& channel);
  RanksProgress Told() const;
  // Releases the lock while it asks other processes.
  void FailLate(Lock& lock, const Channel& channel, int place);
  absl::Status Unreachable(const Channel& channel) const;

  const int world_;
  const absl::Duration timeout_;
  const BulkAlgorithm algorithm_;
  const int ranks_per_host_;
  const OtherProcesses others_;

  mutable std::mutex mutex_;  // guards everything below
  absl::Status failure_;
  std::vector<int> missing_;
  int64_t sent_bytes_ = 0;
  std::map<std::string, std::unique_ptr<Channel>> channels_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LOCAL_H_
