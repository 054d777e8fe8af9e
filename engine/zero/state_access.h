// The model states between steps: values go in, values and their hash come out.
//
// For any stage, world and groups, all of it is loops over the runs of named
// parameters (ModelStates::ForEachRun).
// Order: all ranks make the same calls, in the same order, except Initialize
//        and ForEachRun, which a rank may call alone.
#ifndef ZERO_ENGINE_ZERO_STATE_ACCESS_H_
#define ZERO_ENGINE_ZERO_STATE_ACCESS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/zero/batch_upload.h"
#include "engine/zero/model_states.h"
#include "engine/zero/rank_numbers.h"
#include "engine/zero/wire.h"
#include "kernels/device.h"

namespace zero {

class StateAccess {
 public:
  // Segments are gathered for reading, one at a time, into memory of `arena`.
  // `gather` and `reduce` may be null in a world of one.
  StateAccess(const Rank& rank, const Plan& plan, ModelStates& states,
              BatchUpload& upload, Wire& wire, RankNumbers& numbers,
              Arena& arena, Stream& compute, Stream* gather, Stream* reduce)
      : rank_(&rank),
        plan_(&plan),
        states_(&states),
        upload_(&upload),
        wire_(&wire),
        numbers_(&numbers),
        arena_(&arena),
        compute_(&compute),
        gather_(gather),
        reduce_(reduce) {}

  // Sets the initial values, a pure function of (seed, parameter name,
  // element): every rank makes the ones it holds.
  void Initialize(uint64_t seed);
  // Takes the parameters' fp32 values from `values`, rounds them to the
  // parameter dtype and clears the optimizer's arrays. Each element is asked
  // for on one rank, its owner in the first group, and sent to the others.
  absl::Status Load(const ModelStates::ValuesFn& values);

  // Gives `take` all parameters' fp32 values, from ModelStates::readable, in
  // plan order: values.size() <= ModelStates::kPieceElems elements from `begin`
  // on. A rank that needs none passes null. The meta device delivers nothing.
  using TakeFn = std::function<void(const Parameter&, int64_t begin,
                                    absl::Span<const float> values)>;
  absl::Status Read(const TakeFn& take);
  // BlockHash of the same values (engine/base/hash.h), the parameters one after
  // the other in the order of their names. Each rank hashes what it owns.
  absl::StatusOr<std::string> Hash();

  // ModelStates::Exchange, on all ranks that have params(). Nothing else may be
  // in flight.
  absl::Status Exchange();

  // This rank's share of what a later run needs (ModelStates::kept). All ranks'
  // shares together have each element once: groups that own the same elements
  // (hybrid sharding) divide them. Ordered by state and in plan order; states
  // on a disk, by segment.
  // Order: a rank may call it alone, here and below.
  struct KeptPiece {    // of this rank's shard of a segment
    std::string state;  // "weight", "exp_avg"
    DType dtype;        // of a checkpoint
    SegmentRef segment;
    Segment range;        // of the unit's flat elements
    Tensor values, rest;  // as StateRun's
  };
  std::vector<KeptPiece> KeptPieces() const;
  // Bytes of what all ranks keep: of a checkpoint. REQUIRES: params() or, with
  // a parameter server, rank 0.
  int64_t KeptBytes() const;
  // The same, or `pieces` that are copies, cut into runs of named parameters of
  // at most ModelStates::kPieceElems.
  struct KeptRun {
    std::string state;
    DType dtype;
    StateRun run;
  };
  using VisitKeptFn = std::function<void(const KeptRun&)>;
  void ForEachKept(const VisitKeptFn& visit) const {
    ForEachKept(KeptPieces(), visit);
  }
  void ForEachKept(const std::vector<KeptPiece>& pieces,
                   const VisitKeptFn& visit) const;
  // Copies KeptPieces() to pieces of the same sizes in the host's memory: on
  // the CPU with all threads of the rank.
  void CopyKept(const std::vector<KeptPiece>& to);
  // The bytes of a run, until the next call.
  absl::Span<const char> Bytes(const KeptRun& kept);
  // The same for a run that the host can read: in place, or a copy in `floats`.
  // Threads: any.
  static absl::Span<const char> HostBytes(const KeptRun& kept,
                                          std::vector<float>* floats);
  // Restores everything kept from the reader that `open` returns, which writes
  // one range after the other to `out`. Exactly one rank asks for each element.
  struct KeptRange {
    std::string state;
    const Parameter* parameter;
    int64_t begin, elems;
    DType dtype;
    SegmentRef segment;
  };
  using ReadNextFn = std::function<absl::Status(void* out)>;
  using OpenKeptFn = std::function<absl::StatusOr<ReadNextFn>(
      const std::vector<KeptRange>& ranges)>;
  // `has_stale` says whether ModelStates::kStale exists; else "weight" replaces
  // it.
  absl::Status Restore(const OpenKeptFn& open, bool has_stale = false);

  // The states of this rank that a later run needs, in their own dtypes: its
  // runs may be read and, on the CPU, written.
  void ForEachRun(const std::function<void(const FlatState& state,
                                           const StateRun& run)>& visit);

  // The first trained parameter (in plan order) with a non-finite gradient, or
  // value, on any rank, or "". Gradients exist only until the end of a step, so
  // the executor asks (StepOutput).
  absl::StatusOr<std::string> FirstNonFiniteGradient() {
    return FirstNonFinite(
        [this](int unit) -> const FlatState& {
          return states_->reduced_grads(unit);
        },
        "first non-finite gradient");
  }
  absl::StatusOr<std::string> FirstNonFiniteParameter() {
    return FirstNonFinite(
        [this](int) -> const FlatState& { return states_->params(); },
        "first non-finite parameter");
  }

 private:
  // Part `part` of `parts` equal parts of this rank's shards.
  std::vector<KeptPiece> PartOfShards(int part, int parts) const;
  // The ranges that Restore fills, in this order: weights, then the rest of
  // `owned`. States on a disk come segment by segment, so that each is written
  // once.
  std::vector<KeptRange> RangesToRestore(
      const std::vector<KeptPiece>& owned) const;
  absl::Status Share(const FlatState& state);
  // The address of `values` for the host: their own, or that of a copy in
  // `copied` if the device has its own memory.
  const void* OnHost(const Tensor& values, std::vector<char>& copied);
  // A full segment, gathered if it is sharded.
  absl::StatusOr<Tensor> Full(const FlatState& state, const SegmentRef& ref);
  // The values of a run in fp32, valid until the next call.
  absl::Span<const float> Download(const StateRun& run);
  absl::StatusOr<std::string> FirstNonFinite(
      const std::function<const FlatState&(int unit)>& state_of,
      const char* name);
  // The dtype of a parameter's weight in a checkpoint.
  DType WeightType(const Parameter& parameter) const;
  // Whether this rank is of the first group, whose ranks together own every
  // element once.
  bool InFirstGroup() const {
    return plan_->replicate.PlaceOf(rank_->rank()) == 0;
  }

  const Rank* rank_;
  const Plan* plan_;
  ModelStates* states_;
  BatchUpload* upload_;
  Wire* wire_;
  RankNumbers* numbers_;
  Arena* arena_;
  Stream* compute_;
  Stream* gather_;
  Stream* reduce_;
  std::vector<char> copied_, copied_rest_;  // of Download
  std::vector<float> floats_;               // likewise
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_STATE_ACCESS_H_
