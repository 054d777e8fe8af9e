// What a rank sends of parameters and gradients: starts the collectives that
// the schedule asks for, on the gather and the reduce stream.
//
// It waits for nothing: the executor does, as the schedule says.
#ifndef ZERO_ENGINE_ZERO_WIRE_H_
#define ZERO_ENGINE_ZERO_WIRE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/zero/flat_state.h"
#include "engine/zero/plan.h"
#include "kernels/device.h"

namespace zero {

// How gradients of `dtype` travel: around a ring, sums in fp32.
inline Codec GradientCodec(DType dtype, BulkAlgorithm algorithm) {
  return {dtype, algorithm == BulkAlgorithm::kRing ? DType::kF32 : dtype};
}

// Rows of a table's gradient, and whose they are: [n], [n, C].
struct TableRows {
  Tensor ids, rows;
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

  // Takes what reductions need beside gradients from `arena`.
  void TakeStaging(Arena& arena);

  // Tells the communicators of the memory that they will send and receive. On
  // all ranks or none: where one rank cannot register its memory, none may.
  absl::Status Register(const std::vector<Arena*>& arenas);

  // Starts bringing the owners' pieces (send) of whole segments (recv) to all.
  void Gather(const std::string& name, DType dtype,
              std::vector<CollectiveSegment> segments);
  // All of a unit into `gathered` [padded elems], which has what was fetched
  // from the host.
  void GatherUnit(int unit, const FlatState& params, const Tensor& gathered);
  // A gather bucket of replicated parameters.
  void GatherUpdated(int bucket, const FlatState& params);

  // Starts reducing a bucket: to its owners, and back to all where all update.
  // Where `grads` is sharded, `gradients` has those of the bucket's phase, and
  // the sums of this rank's pieces go to `sums`. Memory of a bucket as it is
  // sent comes from `arena`.
  enum class Sums {
    kInPlace,  // they replace this rank's addends
    kPacked,   // that, and then they move to the front of `gradients`, where
               // they are lent to `grads`
    kKept,     // to `grads`
    kAdded,    // to `grads`, added to what is there
  };
  void Reduce(int bucket, const Tensor& gradients, const FlatState& grads,
              Sums sums, Arena& arena);
  // Starts adding up this rank's pieces of a bucket over the groups.
  void ReduceAcross(int bucket, const FlatState& grads, Arena& arena);
  // Starts gathering this rank's tokens and rows (`own`) in its group, or from
  // there in all groups, to where they lie in the order of ranks (`all`).
  void GatherRows(int bucket, const TableRows& own, const TableRows& all);
  void GatherRowsAcross(int bucket, const TableRows& all);
  // Gives back what Reduce took from `arena`. REQUIRES: the compute stream
  // has waited for all reductions.
  void EndReductions() { sent_gradients_ = Tensor(); }

 private:
  // Of what is reduced: all of it, and the part of it that this rank owns (none
  // on the workers of a server). Parts lie in the order of ranks.
  struct Part {
    Tensor whole, own;
  };
  // dst (+)= src, rounded once.
  struct Conversion {
    ConstVector src;
    Vector dst;
    bool accumulate = false;
  };

  // The one place that knows which collective a transfer is.
  void Start(Communicator& comm, Stream& stream, const std::string& name,
             const Transfer& transfer, std::vector<CollectiveSegment> segments,
             bool accumulate = false);
  // Adds up the parts over the ranks of `comm`; where the sum is gathered,
  // every rank gets all of it, in the same order as at every stage.
  void ReduceParts(Communicator& comm, const std::string& name,
                   const std::vector<Transfer>& transfers,
                   const std::vector<Part>& parts, bool accumulate,
                   Arena& arena);
  void Convert(std::vector<Conversion> conversions);
  // Moves elements towards the front, to where `to` may overlap `from`.
  void MoveToFront(const Tensor& from, const Tensor& to);
  const std::string& NameOf(const Bucket& bucket) const {
    return plan_->units[bucket.unit].name;
  }

  const Rank* rank_;
  const Plan* plan_;
  DType grad_dtype_;
  Stream* gather_;
  Stream* reduce_;
  Tensor staging_;  // of reductions that need memory of their own
  // One bucket of gradients as they are sent, where that is not as they are
  // accumulated; [elems of the largest bucket], from the first reduction of a
  // step to the last. Only work of the reduce stream touches it.
  Tensor sent_gradients_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_WIRE_H_
