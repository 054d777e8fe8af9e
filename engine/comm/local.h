// The ranks of one process as threads over shared memory: that of the host, or
// of GPUs that reach each other's (several ranks may share one); on the CPU
// with those of other processes, over a Network.
//
// Ranks exchange addresses, never copies: a rank publishes its collective,
// waits until all have arrived, reads what it needs straight from the others'
// memory into its own, and goes on when nobody reads its memory any more.
// Waiting is on a condition variable, never spinning, since a waiting rank's
// core computes for another one. Sums run in rank order 0 .. world-1, or around
// a ring, so the bits do not depend on who came first.
//
// Every rank works on its own stream: a worker stream, so that collectives run
// beside compute, or the calling thread's. All ranks' streams must make
// progress by themselves; ranks that share one stream would wait for
// themselves until the timeout.
//
// With other processes the ranks of this one meet as ever; then the lowest of
// them, the leader, sends one message to each other process and receives one,
// round by round (rounds.h), and every rank does its share of a round as if all
// memory were here.
//
// On a GPU a collective is issued where Run is called: the calling threads meet
// there, for the moment of issuing it, and each makes its stream wait for where
// the others' streams are (events), before it reads their memory and before it
// goes on. No thread waits for a GPU.
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
  // Where they are in their collectives: asks them. Null: nobody tells.
  std::function<RanksProgress()> ask;
  // Why the run failed, where the network says that it did: an error here may
  // be the consequence of another process's end. Null: that is all.
  std::function<absl::Status(const absl::Status& own)> find_cause;
};

struct LocalOptions {
  // How long a rank waits for the others in one collective. It must outlast
  // the longest time that one rank computes while another waits for it.
  absl::Duration timeout = absl::Minutes(5);
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  // kHierarchical, on the CPU: ranks r to r + ranks_per_host - 1 are one host,
  // which divides the world. 0: all are.
  int ranks_per_host = 0;
  // Without a network all ranks are threads of this process. With one the
  // algorithm is not kRing and the ranks are on the CPU.
  OtherProcesses others;
};

// Threads: used by all ranks at once.
class LocalGroup : public std::enable_shared_from_this<LocalGroup> {
 public:
  static std::shared_ptr<LocalGroup> Make(int world, LocalOptions options = {});

  // The end of `rank`, one of this process, on `channel` ("gather", "reduce",
  // "scalar") among `members`, all ranks where it is empty: the communicator's
  // rank is the place in that list, messages name the rank of the run. A
  // channel is a sequence of collectives of its own; all channels share one
  // failure, so that a failed group fails all. A rank connects once to a
  // channel. An end that is destroyed has left: the others fail at once where
  // they need more of it than it issued. Errors: of the group, by status() of
  // any communicator.
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
  // Likewise, for what was heard of other processes, word by word.
  void Fail(const absl::Status& status);
  // Bytes of data that this process has begun to send to others.
  int64_t sent_bytes() const;
  // Where the ranks of this process are.
  RanksProgress progress() const;
  // OK, or why it failed.
  absl::Status status() const;
  // The ranks for which others waited in vain, ascending; none unless that is
  // how the group failed. One that waited itself, in another channel, is not
  // missing: those are for whom it waited.
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

  // `place` is a rank's place among the members of a channel.
  // Gives a collective its number. `marks`: of an asynchronous device.
  std::shared_ptr<const Call> Issue(Channel& channel, int place, Stream& stream,
                                    Collective collective,
                                    std::shared_ptr<Marks> marks);
  // The work of one collective, on the stream's thread. Open waits until all
  // ranks have arrived; false: they have not, the group has failed. Meet waits
  // in the middle of a share, Close until all have done theirs; `share` is how
  // long this one took, with waiting.
  void Perform(Channel& channel, int place,
               const std::shared_ptr<const Call>& call);
  bool Open(Channel& channel, int place,
            const std::shared_ptr<const Call>& call);
  bool Meet(Channel& channel, int place);  // false: somebody broke off
  void Close(Channel& channel, int place, int64_t read_bytes,
             std::chrono::nanoseconds share);
  // Its device has failed in there: nobody shall wait for it in the middle.
  void Break(Channel& channel, int place, const std::string& reason);

  void Leave(Channel& channel, int place);

  // A rank's share in a collective with ranks of other processes.
  class Crossing;
  int64_t Cross(Channel& channel, int place, Stream& stream);
  // This rank's part of the sums that its process sends in a round.
  void SumForOthers(Channel& channel, int place, PeerMemory& peers,
                    Stream& stream, const Rounds& rounds, int round);
  // Waits for messages; false: the group has failed.
  bool AwaitNetwork(Channel& channel, int place, Network::Exchange& exchange);
  // Another process is in another collective. Returns false.
  bool FailAcross(Channel& channel, int place);
  void BreakOff(Channel& channel);
  const char* name() const {
    return others_.network == nullptr ? "local" : "mpi";
  }

  // With the lock held:
  // Waits until `condition` holds; the group fails where that takes too long,
  // and the wait goes on.
  template <class Condition>
  void Await(Lock& lock, Channel& channel, int place,
             const Condition& condition);
  void Latch(const absl::Status& status);  // the first counts
  void FailIfGone(const Channel& channel);
  RanksProgress Told() const;
  // Lets go of the lock while it asks other processes.
  void FailLate(Lock& lock, const Channel& channel, int place);
  absl::Status Unreachable(const Channel& channel) const;

  const int world_;
  const absl::Duration timeout_;
  const BulkAlgorithm algorithm_;
  const int ranks_per_host_;
  const OtherProcesses others_;

  mutable std::mutex mutex_;  // guards all below and what is in it
  absl::Status failure_;
  std::vector<int> missing_;
  int64_t sent_bytes_ = 0;
  std::map<std::string, std::unique_ptr<Channel>> channels_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LOCAL_H_
