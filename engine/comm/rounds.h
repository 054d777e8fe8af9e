// A collective between processes, cut into rounds. The bytes received per round
// are bounded, and the ranks do their shares of a round while the next one is
// in flight. Pure: depends only on shapes, the same on all processes.
//
// All-gather and broadcast land in the recv memory of the leader, the lowest
// rank of this process; its neighbours copy from there. Addends land in staging
// memory, one block per sender and rank here. The sum runs over all ranks in
// rank order and is rounded once, so the bits are those of threads of one
// process, however ranks are split into processes.
// A sender is usually a rank. In a hierarchical sum it is a host, if each
// process has all ranks of its hosts: it sends their sum instead of each rank's
// data.
#ifndef ZERO_ENGINE_COMM_ROUNDS_H_
#define ZERO_ENGINE_COMM_ROUNDS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "engine/comm/communicator.h"
#include "engine/comm/exchange.h"
#include "engine/comm/network.h"

namespace zero {

class Rounds {
 public:
  // A process receives at most this many bytes in a round, unless world * ranks
  // here exceeds a few thousand: each piece has at least kLeastElems.
  static constexpr int64_t kBytes = int64_t{2} << 20;
  static constexpr int64_t kLeastElems = 16;

  // `processes`: the process of each member of the channel, ascending.
  // `process`: this one. `hosts`: each member's host, ascending, for
  // kHierarchical.
  Rounds(const Collective& collective, absl::Span<const int> processes,
         int process, absl::Span<const int> hosts = {}, int64_t bytes = kBytes);

  // The number of rounds; 0 if there is nothing to move.
  int size() const { return static_cast<int>(windows_.size()); }
  // The place of the leader.
  int leader() const { return first_; }
  absl::Span<const Window> windows(int round) const { return windows_[round]; }

  // Memory for a round's addends.
  int64_t staging_bytes() const;
  // Memory for the sums that this process sends in a round; 0 if its ranks send
  // their own data.
  int64_t outgoing_bytes() const;
  // Bytes that Messages sends in all rounds.
  int64_t sent_bytes() const;
  // Calls visit(begin, end, piece, window, to) for each sum that `place`, a
  // rank of this process, must make before Messages. The sum is over the data
  // of places [begin, end) and goes to `to` in `outgoing`.
  using VisitSumFn = std::function<void(int begin, int end, int64_t piece,
                                        const Window& window, char* to)>;
  void ForEachSum(int round, int place, char* outgoing,
                  const VisitSumFn& visit) const;
  // This process's messages. `all`: each rank's collective, null for ranks of
  // other processes.
  std::vector<PeerMessages> Messages(int round,
                                     absl::Span<const Collective* const> all,
                                     char* staging, char* outgoing) const;
  // The block of received data, for PeerMemory::ReceivedFn. `leader` is the
  // leader's collective.
  PeerMemory::Block Received(int round, const Collective& leader,
                             const char* staging, int rank, int64_t piece,
                             const Window& window) const;

 private:
  // The senders of one block of a sum: the places [begin, end).
  struct Sender {
    int begin = 0, end = 0;
  };
  bool IsHere(int place) const {
    return place >= first_ && place < first_ + num_here_;
  }
  void AddSenders(absl::Span<const int> hosts);
  int64_t ItemBytes() const;
  int64_t RoundElems(int round) const;
  char* Landing(const Collective& leader, int rank, const Window& window) const;
  int64_t StagedElem(int round, int rank, int64_t piece) const;
  char* Outgoing(int round, int sender, int64_t piece, char* outgoing) const;

  const CollectiveKind kind_;
  const DType dtype_;
  const int root_;
  const std::vector<int> processes_;
  int first_ = 0;                    // place of this process
  int num_here_ = 0;                 // places of this process
  std::vector<Sender> senders_;      // of all processes, in order
  std::vector<int> sender_;          // by place
  int own_begin_ = 0, own_end_ = 0;  // this process's of senders_
  std::vector<std::vector<Window>> windows_;
  std::vector<int64_t> piece_elems_;  // by segment
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_ROUNDS_H_
