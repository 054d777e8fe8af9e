// A rank's traffic of parameters and gradients: starts the schedule's
// collectives on the gather and reduce streams.
//
// It never waits: the executor does, as the schedule says.
#ifndef ZERO_ENGINE_ZERO_WIRE_H_
#define ZERO_ENGINE_ZERO_WIRE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/autograd/context.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/zero/flat_state.h"
#include "engine/zero/plan.h"
#include "kernels/device.h"

namespace zero {

// How elements of `dtype` travel: around a ring, sums in fp32.
inline Codec CodecOf(DType dtype, BulkAlgorithm algorithm) {
  return {dtype, algorithm == BulkAlgorithm::kRing ? DType::kF32 : dtype};
}

// Tokens, and their rows of a table's gradient: [n], [n, C].
struct TableRows {
  Tensor ids, rows;
};

// The memory of a lookup.
struct Lookup {
  Tensor rows;         // [M, C], of this rank's tokens
  Tensor ids, stored;  // of all ranks' tokens in a turn: [n], [n, C]
  Tensor staging;      // of their sum
};

class Wire {
 public:
  // Gradients accumulate in `grad_dtype`; they are sent, and their sum is
  // rounded once, in the plan's. `gather` and `reduce` may be null in a world
  // of one.
  Wire(const Rank& rank, const Plan& plan, DType grad_dtype, Stream* gather,
       Stream* reduce)
      : rank_(&rank),
        plan_(&plan),
        grad_dtype_(grad_dtype),
        gather_(gather),
        reduce_(reduce) {}

  // Takes the buffers of reductions from `arena`.
  void TakeStaging(Arena& arena);

  // Registers the memory to send and receive with the communicators. On all
  // ranks or none: if one rank cannot register its memory, none may.
  absl::Status Register(const std::vector<Arena*>& arenas);

  // Starts gathering segments on all ranks: `send` is the owner's shard, `recv`
  // the full segment.
  void Gather(const std::string& name, DType dtype,
              std::vector<CollectiveSegment> segments);
  // Gathers a full unit into `gathered` [padded elems], which holds the part
  // fetched from the host.
  void GatherUnit(int unit, const FlatState& params, const Tensor& gathered);
  // Starts getting the rows of the batch's tokens from the ranks of the group,
  // which have batches of one size. Takes memory from `arena`.
  Lookup LookUp(int table, const FlatState& params, const BatchView& batch,
                Arena& arena);
  // Gathers a bucket of updated, replicated parameters.
  void GatherUpdated(int bucket, const FlatState& params);

  // Starts reducing a bucket: to its owners, and back to all if all update. If
  // `grads` is sharded, `gradients` has those of the bucket's phase, and the
  // sums of this rank's shards go to `sums`. Send buffers come from `arena`.
  enum class Sums {
    kInPlace,  // they replace this rank's addends
    kPacked,   // the same, then moved to the front of `gradients`, where
               // they are lent to `grads`
    kKept,     // to `grads`
    kAdded,    // added to `grads`
  };
  void Reduce(int bucket, const Tensor& gradients, const FlatState& grads,
              Sums sums, Arena& arena);
  // Starts adding up this rank's shards of a bucket over the groups.
  void ReduceAcross(int bucket, const FlatState& grads, Arena& arena);
  // Starts gathering this rank's tokens and rows (`own`) in its group, or from
  // there in all groups, into `all`, in rank order.
  void GatherRows(int bucket, const TableRows& own, const TableRows& all);
  void GatherRowsAcross(int bucket, const TableRows& all);
  // Gives back what Reduce took from `arena`. REQUIRES: the compute stream
  // has waited for all reductions.
  void EndReductions() { sent_gradients_ = Tensor(); }

 private:
  // The memory that is reduced: all of it, and the part that this rank owns
  // (none on a server's workers). Parts are in rank order.
  struct Part {
    Tensor full, own;
  };
  // dst (+)= src, rounded once.
  struct Conversion {
    ConstVector src;
    Vector dst;
    bool accumulate = false;
  };

  // The only place that maps a transfer to a collective.
  void Start(Communicator& comm, Stream& stream, const std::string& name,
             const Transfer& transfer, std::vector<CollectiveSegment> segments,
             const Tensor& staging = Tensor(), bool accumulate = false);
  // Adds up the parts over the ranks of `comm`; if the sum is gathered, every
  // rank gets all of it, in the same order as at every stage.
  void ReduceParts(Communicator& comm, const std::string& name,
                   const std::vector<Transfer>& transfers,
                   const std::vector<Part>& parts, bool accumulate,
                   Arena& arena);
  void Convert(std::vector<Conversion> conversions);
  // Moves elements towards the front; `to` may overlap `from`.
  void MoveToFront(const Tensor& from, const Tensor& to);
  const std::string& NameOf(const Bucket& bucket) const {
    return plan_->units[bucket.unit].name;
  }

  const Rank* rank_;
  const Plan* plan_;
  DType grad_dtype_;
  Stream* gather_;
  Stream* reduce_;
  Tensor staging_;  // for reductions that need their own memory
  // One bucket of gradients in their wire dtype, if that differs from the
  // accumulated one; [elems of the largest bucket], from the first reduction of
  // a step to the last. Only the reduce stream touches it.
  Tensor sent_gradients_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_WIRE_H_
