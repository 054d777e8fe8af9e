// Collectives between the ranks of a run, asynchronous on a stream.
//
// Every collective is one value (Collective) that goes through one method
// (Run), so that wrappers (CommunicatorWrapper) see all of them and a new
// collective needs no new method there. The typed calls below build and check
// that value. Bulk collectives take lists of segments: one call moves a whole
// bucket, wherever its segments lie.
//
// Errors latch: after the first failure of any rank, every rank's communicator
// of the group fails, at once and for good. status() names the rank, the
// collective and the reason, and later work in the queue does nothing. A rank
// that does not arrive at a collective fails it for all after a timeout. A rank
// in the middle of a collective is waited for, since it may be reading the
// others' memory; the runner of the ranks ends a program that hangs there
// (on_hang in local_ranks.h). Start reading at Communicator, then local.h.
// This room must not know models, gradients or stages: it moves spans of
// memory that others own.
// To add a backend: derive from Communicator, implement Run, and give it a
// linked *_off twin if it can be missing. To add a collective: a kind, a typed
// call, its line in WireBytes and Signature, its case in exchange.cc. To add an
// algorithm: a value of BulkAlgorithm, and a file like ring.h.
#ifndef ZERO_ENGINE_COMM_COMMUNICATOR_H_
#define ZERO_ENGINE_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/ops.h"

namespace zero {

enum class CollectiveKind {
  kAllGather,
  kReduceScatter,
  kReduce,
  kBroadcast,
  kBarrier,
};

// "all_gather", ...
const char* CollectiveKindName(CollectiveKind kind);

// How reduce-scatter and all-gather are done. Bits are equal only within an
// algorithm: each has its own order of sums.
enum class BulkAlgorithm {
  kDirect,  // a rank reads all the others: sums in rank order
  kRing,    // a rank reads its neighbour, world - 1 times (ring.h)
  // Reduce-scatter sums within each host, rounds that to the dtype, and sums
  // the hosts' sums, both in rank order; all else is direct.
  kHierarchical,
  kNative,  // the backend's own: fp32 in its order, 16 bits in rank order
};

// The accumulator dtype for sums of `dtype`.
inline DType SumDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// A part of a collective. `elems` counts the full side: rank r's piece is
// [r * elems / world, (r + 1) * elems / world).
struct CollectiveSegment {
  const void* send = nullptr;
  void* recv = nullptr;
  int64_t elems = 0;
};

struct Collective {
  CollectiveKind kind;
  std::string name;  // for errors and traces: "block.3"; the same on all ranks
  DType dtype = DType::kF32;
  bool accumulate = false;  // kReduceScatter: recv += the sum
  int root = 0;             // kReduce, kBroadcast
  std::vector<CollectiveSegment> segments;
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  void* staging = nullptr;  // kReduceScatter: see StagingBytes
  int64_t staging_bytes = 0;
};

// Bytes that the busiest of `world` ranks sends, or receives. All-gather and
// reduce-scatter: (world - 1) / world of the full bytes, the same on all ranks.
// Barrier: nothing. The root of a broadcast sends, and that of a reduce
// receives, (world - 1) times the bytes. The sums of a ring's reduce-scatter
// travel in SumDType from its second step on.
int64_t WireBytes(const Collective& collective, int world);

// Bytes that `rank` sends, and that it receives. The root of a broadcast only
// sends, the root of a reduce only receives; every other rank moves the bytes
// once.
int64_t SentBytes(const Collective& collective, int rank, int world);
int64_t ReceivedBytes(const Collective& collective, int rank, int world);

// The properties of a collective that must match on all ranks, as one line of
// text, for comparison and messages. Kind, name, dtype, root, algorithm and the
// elements of every segment; equal runs of segments are folded: `reduce_scatter
// "block.3" bf16 += [128, 64 x3]`. Two collectives match exactly if their
// signatures are equal.
std::string Signature(const Collective& collective);

// The number and the bytes of the collectives issued on a communicator.
struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;     // sent by this rank: SentBytes
  int64_t received = 0;  // bytes: ReceivedBytes

  CollectiveCount& operator+=(const CollectiveCount& other);
};

// One rank's end. All ranks issue the same collectives in the same order on
// the communicators of one channel; a backend checks it by the signature.
// Errors:  world errors are in status(). A caller's mistake (null memory, a
//          size that the world does not divide, an overlap not allowed below)
//          stops the program.
// Threads: used by one thread; status() and Abort by any.
class Communicator {
 public:
  Communicator(int rank, int world,
               BulkAlgorithm algorithm = BulkAlgorithm::kDirect)
      : rank_(rank), world_(world), algorithm_(algorithm) {}
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int world() const { return world_; }
  BulkAlgorithm algorithm() const { return algorithm_; }

  // Extra memory that a reduce-scatter of `elems` of `dtype`, over all
  // segments, needs. A ring keeps two pieces of running sums if there are three
  // ranks or more. The native algorithm keeps its sums, or in 16 bits all
  // ranks' data.
  int64_t StagingBytes(DType dtype, int64_t elems) const;

  // Gathers every rank's piece into every rank's `recv`, in rank order.
  // Shapes: send [elems / world], recv [elems]; send may be the rank's own
  //         piece of recv. elems % world == 0.
  // Wire:   (world - 1) / world * elems * itemsize bytes per rank.
  void AllGather(Stream& stream, std::string name, DType dtype,
                 std::vector<CollectiveSegment> segments);

  // Sums over ranks 0 .. world-1, in that order (a ring has its own order), in
  // SumDType, and rounds once. With `accumulate` the content of recv is part of
  // the sum.
  // Shapes: send [elems], recv [elems / world], the rank's own piece; recv may
  //         be that piece of send, without accumulate. elems % world == 0.
  //         staging: StagingBytes of the sum of elems, not overlapping.
  // Wire:   (world - 1) / world * elems * itemsize bytes per rank.
  void ReduceScatter(Stream& stream, std::string name, DType dtype,
                     bool accumulate, std::vector<CollectiveSegment> segments,
                     Workspace staging = {});

  // Sums in the order of ReduceScatter with kDirect, all of it on one rank.
  // Shapes: send [elems], recv [elems], only the root's is used; it may be the
  //         root's send.
  // Wire:   elems * itemsize bytes from each rank but the root.
  void Reduce(Stream& stream, std::string name, DType dtype, int root,
              std::vector<CollectiveSegment> segments);

  // Copies the root's data to all ranks.
  // Shapes: send [elems], only the root's is used; recv [elems]; send and recv
  //         may be the same.
  // Wire:   (world - 1) * elems * itemsize bytes from the root.
  void Broadcast(Stream& stream, std::string name, DType dtype, int root,
                 std::vector<CollectiveSegment> segments);

  // Later work in the queue begins when all ranks have reached it.
  void Barrier(Stream& stream, std::string name);

  // Totals of the typed calls so far.
  const CollectiveCount& Total() const { return total_; }

  // Enqueues a collective that a typed call has checked. Its memory must stay
  // until its work is done.
  virtual void Run(Stream& stream, Collective collective) = 0;

  // Registers device memory that collectives use repeatedly, so that a backend
  // can map it for peers and the network. The registration ends with the
  // returned value, which must be destroyed before the memory. Memory of one
  // collective is registered on all ranks or on none.
  // Null: this backend has no registration.
  virtual std::shared_ptr<void> Register(void* /*data*/, size_t /*bytes*/) {
    return nullptr;
  }

  // Makes every rank of the group fail; the status of the first call stays.
  virtual void Abort(const absl::Status& status) = 0;

  // OK, or why the group failed.
  virtual absl::Status status() const = 0;

  // Bytes received from other ranks so far. They are counted where they are
  // copied, summed or passed to a library; ReceivedBytes predicts them.
  virtual int64_t received_bytes() const { return 0; }

  // Milliseconds that this rank's own copies and sums took so far, without
  // waiting for others. 0 if a device or a library does them.
  virtual double busy_ms() const { return 0; }

 private:
  // Checks, counts and runs.
  void Issue(Stream& stream, Collective collective);

  int rank_;
  int world_;
  BulkAlgorithm algorithm_;
  CollectiveCount total_;
};

// A communicator around another one, which does the work. Derived classes
// override Run and see every collective.
class CommunicatorWrapper : public Communicator {
 public:
  explicit CommunicatorWrapper(std::unique_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->world(), inner->algorithm()),
        inner_(std::move(inner)) {}

  std::shared_ptr<void> Register(void* data, size_t bytes) override {
    return inner_->Register(data, bytes);
  }
  void Abort(const absl::Status& status) override { inner_->Abort(status); }
  absl::Status status() const override { return inner_->status(); }
  int64_t received_bytes() const override { return inner_->received_bytes(); }
  double busy_ms() const override { return inner_->busy_ms(); }

 protected:
  // Shared with work that is still queued when this is destroyed.
  const std::shared_ptr<Communicator> inner_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_COMMUNICATOR_H_
