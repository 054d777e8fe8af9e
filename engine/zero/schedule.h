// The step as a list of actions: a pure function of the plan, tested by
// values, the same on every rank. The executor performs it; the planners print
// it and count it.
//
// Actions are in issue order. Each says on which stream it runs and which
// earlier actions of other streams it waits for; actions of one stream run in
// order. There is no other synchronization, for data or for buffers.
// With overlap off every action also waits for the one before it.
#ifndef ZERO_ENGINE_ZERO_SCHEDULE_H_
#define ZERO_ENGINE_ZERO_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/zero/plan.h"
#include "kernels/device.h"

namespace zero {

enum class ActionKind {
  kLoadBatch,         // copies the micro-step's batch to the device
  kForward,           // unit, without the last
  kForwardBackward,   // the last unit: the loss writes its gradients at once
  kBackward,          // unit, phase; recomputes what forward did not keep
  kReadParameters,    // unit, segment: starts reading what this rank owns of
                      // its parameters from the disk
  kFetch,             // unit (segment): takes a buffer, starts copying what
                      // this rank owns of its parameters there from the host
  kGather,            // unit: takes a buffer, unless it was fetched; starts
                      // gathering its parameters
  kLookUp,            // table: starts getting the rows of the micro-step's
                      // tokens from the ranks that have them
  kRelease,           // unit: gives its gathered parameters' buffer back
  kReduce,            // bucket: starts reducing its gradients; of rows:
                      // gathering them
  kReduceAcross,      // bucket: starts adding this rank's shards of it, which
                      // hold the group's sums, over the groups
  kOffload,           // bucket: starts copying what this rank owns of it to
                      // the host; of rows: all of them
  kAddOffloaded,      // bucket: adds it to earlier micro-steps'
  kReleaseGradients,  // unit, phase: gives its gradients' buffer back, but for
                      // the sums that this rank owns
  kAddRows,           // table: adds the rows of all ranks to its gradient
  kSumSquares,        // unit: of its gradients on the host, for the norm
  kNorm,              // global gradient norm, clip factor, finite check
  kReadStates,        // unit, segment: starts reading what its update needs
                      // from the disk
  kMoments,           // unit (segment): the optimizer's first pass
  kTensorNorms,       // norms of whole parameters, from the first pass
  kUpdate,            // unit (segment): optimizer step of the owned part
  kWriteStates,       // unit, segment: starts writing them back
  kUpload,            // unit (segment): starts copying updated parameters from
                      // the host
  kGatherUpdated,     // gather bucket: starts gathering updated parameters
};

struct Action {
  ActionKind kind;
  int index = -1;  // unit or bucket, see the kinds; -1: all
  int64_t micro_step = 0;
  // Indices in the list of actions on other streams that must be done before
  // this one starts, ascending. Below 0: of the same list in the step before,
  // -1 its last action. Waits that the stream has already made are left out.
  std::vector<int> waits = {};
  int phase = 0;  // of the unit's; of a unit on a disk its segment
  // Computation runs on kCompute, or on kHost for what the host has; the
  // collectives that bring parameters on kGather, those that sum gradients on
  // kReduce; copies on kUp and kDown; files on kRead and kWrite.
  StreamRole stream = StreamRole::kCompute;

  bool operator==(const Action&) const = default;
};

// "Forward(block.3)", "Reduce(bucket 2: block.3)".
std::string ActionName(const Action& action, const Plan& plan);

// When sharded parameters are gathered and released: DeepSpeed's stage3_* keys,
// in elements, for whole units. They change memory and traffic, but no bit of
// the result.
struct GatherPolicy {
  static constexpr int64_t kAuto = -1;

  // Gathers ahead for a computation while those before it, including the
  // running one, use fewer elements than this (0: nothing is gathered ahead).
  // kAuto: for the next one.
  int64_t prefetch_elems = kAuto;
  // A unit stays for its next use while at most `max_live_elems` are in place,
  // and if fewer than `max_reuse_distance` elements are used in between. Both
  // kAuto: if one of the next two computations uses it, or if another unit
  // borrows it next. One of them: the other does not limit.
  int64_t max_live_elems = kAuto;
  int64_t max_reuse_distance = kAuto;
  // Units whose largest parameter is smaller than this are gathered once per
  // step: the first ones, up to `max_persistent_elems` in total.
  int64_t persistence_threshold = 0;
  int64_t max_persistent_elems = INT64_MAX;

  bool operator==(const GatherPolicy&) const = default;
};

// The units that stay in place from their first use in a step to their last,
// by the thresholds.
std::vector<bool> PersistentUnits(const Plan& plan, const GatherPolicy& policy);

struct ScheduleOptions {
  int64_t micro_steps = 1;
  bool overlap = true;
  GatherPolicy gather = {};
  bool tensor_norms = false;  // the optimizer needs them before any update
  // The host's update of a step runs during the next step, which therefore
  // computes with parameters one update behind; a unit's new ones are uploaded
  // after that step's last use of the old ones.
  // REQUIRES: the host updates all units that are trained.
  bool delayed_update = false;
  // The host updates a unit right behind the sum of its squares.
  // REQUIRES: no tensor_norms, no delayed_update, no states on a disk.
  bool update_before_norm = false;
};

// The actions of one training step.
std::vector<Action> MakeSchedule(const Plan& plan,
                                 const ScheduleOptions& options);

// The actions of one forward pass without gradients. The last unit is only
// gathered and released: the caller computes with it.
std::vector<Action> MakeForwardSchedule(const Plan& plan,
                                        const ScheduleOptions& options);

// Whether the host adds what kOffload copies to the sums of earlier
// micro-steps, from a buffer of its own.
bool AddsUp(const Action& offload, const Plan& plan);

// The transfers of an action; none for a computation.
absl::Span<const Transfer> TransfersOf(const Action& action, const Plan& plan);

// Bytes that `rank` sends and receives in `actions`: the sum over their
// transfers. The few numbers that ranks agree on (norm, loss, counts) are left
// out.
struct StepWire {
  int64_t gathered = 0;  // sent: parameters, within the group
  int64_t reduced = 0;   // sent: gradients, within the group
  int64_t across = 0;    // sent: gradients, between the groups
  int64_t received = 0;  // in all

  int64_t sent() const { return gathered + reduced + across; }
  bool operator==(const StepWire&) const = default;
};
StepWire CountWire(const Plan& plan, const std::vector<Action>& actions,
                   int64_t rank = 0);

// Bytes that `rank` copies from its host's memory and to it in `actions`.
struct HostTraffic {
  int64_t up = 0;    // parameters
  int64_t down = 0;  // gradients
};
HostTraffic CountHostTraffic(const Plan& plan,
                             const std::vector<Action>& actions, int64_t rank,
                             DType param_dtype, DType grad_dtype);

// The closed formulas per placement, of Rajbhandari et al. 2020 (section 7):
// k = (shards - 1) / shards, Psi = padded elements, for gradients and updates
// without frozen parameters, G = micro_steps. Across the groups, once per step:
// 2 (groups - 1) / groups * Psi / shards. If a table is exchanged by rows, a
// rank also sends its tokens and their rows to all others, and Psi of gradients
// counts the table only if a head shares it. If it is looked up by rows, a rank
// sends each micro-step's tokens, and their rows, instead of its shard of the
// table. Frozen units before the first trained one are gathered only for
// forward. A server sends (world - 1) times the parameters and receives as many
// times the gradients; a worker sends its gradients and receives the
// parameters. Around a ring 16-bit sums travel in fp32 from the second hop on.
// If parameters are sharded, a table in parts that the head shares is
// gathered for the head twice per micro-step, for the lookup if that is not by
// rows, and once more if the head's share of the gradient waits for the
// lookup's. There the schedule may differ by units that stay in place, or that
// are gathered again when borrowed.
StepWire FormulaWire(const Plan& plan, int64_t micro_steps, int64_t rank = 0);

// The part of FormulaWire that is not in the paper: tokens, with the rows of a
// table that are looked up instead of gathered, and with those of its gradient
// that are exchanged instead of reduced. Equal on all ranks.
StepWire RowsWire(const Plan& plan, int64_t micro_steps);

// Bytes that a rank sends for the few numbers that all ranks gather in a step:
// norm and loss, the numbers agreed on before it (kNumAgreed), and with
// `tensor_norms`, LAMB's, two for each trained parameter. The agreed numbers:
// requests to stop and for a checkpoint, failed writes, a checkpoint's parts
// that are written and that cannot be, targets; and four times, only collected:
// the parts of a rank's step (engine/train/stragglers.h).
inline constexpr int kNumAgreed = 10;
int64_t NumbersWire(const Plan& plan, bool tensor_norms);

// XXH3 of the plan's layout, placements and buckets and of the actions: equal
// on all ranks, or they would deadlock.
std::string ScheduleHash(const Plan& plan, const std::vector<Action>& actions);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_SCHEDULE_H_
