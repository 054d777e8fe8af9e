// The data movement of a collective over memory that all ranks can access: the
// host's, or GPUs'.
#ifndef ZERO_ENGINE_COMM_EXCHANGE_H_
#define ZERO_ENGINE_COMM_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "engine/comm/communicator.h"
#include "kernels/ops.h"

namespace zero {

// Waits until all ranks of the collective have reached this point.
using MeetFn = std::function<void()>;

// A part of every rank's piece of a segment; if a root sends or receives all of
// the segment, a part of the segment.
struct Window {
  size_t segment = 0;
  int64_t begin = 0;
  int64_t elems = 0;
  int64_t before = 0;  // elements of the windows before it in a list
};

// Elements of each rank's piece of a segment, or of the segment if there is a
// root.
int64_t PieceElems(const Collective& collective, size_t segment, int world);

// The windows that cover all of a collective, one per segment.
std::vector<Window> WholePieces(const Collective& collective, int world);

// The memory of all ranks of a collective, as one of them reads it. Bytes from
// other ranks are counted here, when they are read.
class PeerMemory {
 public:
  // Memory of one rank.
  struct Source {
    int rank;
    const void* data;
    int ranks = 1;  // the sum of this many, from `rank` on
  };
  // Memory where this process has received the data of another process's rank:
  // the elements of a window of piece `piece` (0 if a root sends or gets all).
  // `ranks`: how many ranks, from `rank` on, are summed in it: 1, or a host's.
  struct Block {
    const void* data;
    int ranks = 1;
  };
  using ReceivedFn =
      std::function<Block(int rank, int64_t piece, const Window& window)>;

  // `all`: the matching collectives of all ranks; null for a rank of another
  // process, see `received`. `rank` reads, on `stream`.
  // `hosts`: each rank's host, ascending, for kHierarchical.
  PeerMemory(Stream& stream, int rank, absl::Span<const Collective* const> all,
             absl::Span<const int> hosts, ReceivedFn received = nullptr)
      : stream_(stream),
        rank_(rank),
        all_(all),
        hosts_(hosts),
        received_(std::move(received)) {}

  int rank() const { return rank_; }
  int world() const { return static_cast<int>(all_.size()); }
  const Collective& of(int rank) const { return *all_[rank]; }
  const Collective& own() const { return of(rank_); }

  // Element `index` of the data that `rank`, one of this process, sends in a
  // segment.
  Source Sent(int rank, size_t segment, int64_t index) const;
  // Any rank's data for a piece.
  Source Sent(int rank, int64_t piece, const Window& window) const;

  // Copies on the stream's worker. On the CPU the copy is done when this
  // returns.
  void Copy(void* dst, Source src, int64_t bytes);
  // dst = the sum of `src` in this order; with `accumulate` dst is added too.
  void Sum(absl::Span<const Source> src, DType dtype, const Vector& dst,
           bool accumulate = false);
  // The same for all ranks' data for a piece, in the order of the collective's
  // algorithm.
  void SumOfAll(int64_t piece, const Window& window, const Vector& dst,
                bool accumulate = false);

  // Bytes read from other ranks so far.
  int64_t read_bytes() const { return read_bytes_; }

 private:
  // A sum counts as all of its addends.
  void Count(Source src, int64_t bytes) {
    if (src.rank != rank_) read_bytes_ += src.ranks * bytes;
  }
  void SumByHosts(absl::Span<const Source> sources, const Vector& dst,
                  bool accumulate);

  Stream& stream_;
  const int rank_;
  const absl::Span<const Collective* const> all_;
  const absl::Span<const int> hosts_;
  const ReceivedFn received_;
  int64_t read_bytes_ = 0;
};

// Does a rank's share of some windows of a collective with kDirect: reads every
// rank's memory and writes its own. No other rank reads what it writes, so
// ranks may do their shares concurrently.
void DoShare(PeerMemory& peers, absl::Span<const Window> windows);

// Does the share of `rank` in the collectives `all`, one per rank, all of this
// process, on `stream`. No rank may change its memory before all are done. Only
// a ring waits: it calls `meet` between its steps. On a GPU nothing blocks the
// host. Returns the bytes read from other ranks' memory.
int64_t Exchange(Stream& stream, int rank,
                 absl::Span<const Collective* const> all,
                 absl::Span<const int> hosts, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_EXCHANGE_H_
