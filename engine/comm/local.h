// The ranks of one process as threads over shared memory: the host's, or that
// of GPUs with peer access (several ranks may share one); on the CPU also with
// ranks of other processes, over a Network.
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
// With other processes the ranks of this one meet as usual; then the lowest,
// the leader, sends one message to each other process and receives one, round
// by round (rounds.h), and every rank does its share of a round as if all
// memory were here.
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
  // Asks them where they are in their collectives. Null: unknown.
  std::function<RanksProgress()> ask;
  // Why the run failed, if the network knows: an error here may be the
  // consequence of another process's end. Null: unknown.
  std::function<absl::Status(const absl::Status& own)> find_cause;
};

struct LocalOptions {
  // How long a rank waits for the others in one collective: longer than any
  // computation of a rank that another waits for.
  absl::Duration timeout = absl::Minutes(5);
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  // kHierarchical, on the CPU: this many consecutive ranks are one host;
  // divides the world. 0: all ranks.
  int ranks_per_host = 0;
  // Without a network all ranks are threads of this process. With one, the
  // algorithm is not kRing and the ranks are on the CPU.
  OtherProcesses others;
};

// Threads: used by all ranks at once.
class LocalGroup : public std::enable_shared_from_this<LocalGroup> {
 public:
  static std::shared_ptr<LocalGroup> Make(int world, LocalOptions options = {});

  // The end of `rank`, one of this process, on `channel` ("gather", "reduce",
  // "scalar") among `members`, or all ranks if empty: the communicator's rank
  // is the index in that list; messages name the rank of the run. A channel is
  // its own sequence of collectives; all channels share one failure, so a
  // failed group fails all. A rank connects once to a channel. Destroying an
  // end leaves the channel: the others fail at once if they need more from it
  // than it issued. Errors: of the group, by status() of any communicator.
  //   DeadlineExceeded    a rank did not arrive within the timeout
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
  // The same with an error of another process, verbatim.
  void Fail(const absl::Status& status);
  // Bytes of data that this process has begun to send to others.
  int64_t sent_bytes() const;
  // Where this process's ranks are in their collectives.
  RanksProgress progress() const;
  // OK, or why it failed.
  absl::Status status() const;
  // The ranks that others waited for in vain, ascending; none unless the group
  // failed that way. A rank that waited itself, in another channel, is not
  // missing: the ranks it waited for are.
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

  // `place` is a rank's index among the members of a channel.
  // Gives a collective its number. `marks`: of an asynchronous device.
  std::shared_ptr<const Call> Issue(Channel& channel, int place, Stream& stream,
                                    Collective collective,
                                    std::shared_ptr<Marks> marks);
  // The work of one collective, on the stream's thread. Open waits until all
  // ranks have arrived; false: the group has failed. Meet waits in the middle
  // of a share, Close until all shares are done; `share` is how long this one
  // took, with waiting.
  void Perform(Channel& channel, int place,
               const std::shared_ptr<const Call>& call);
  bool Open(Channel& channel, int place,
            const std::shared_ptr<const Call>& call);
  bool Meet(Channel& channel, int place);  // false: a rank broke off
  void Close(Channel& channel, int place, int64_t read_bytes,
             std::chrono::nanoseconds share);
  // Its device has failed inside: other ranks must not wait for it there.
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

  // With the lock held:
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
