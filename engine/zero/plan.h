// Who owns what: a pure function of the model's shapes, the world size and the
// sharding.
//
// A unit's parameters lie in one flat buffer, each at a multiple of 64
// elements, the frozen ones last, in their own segments: they have no gradient
// and no optimizer. The buffer is cut into fixed segments, each padded to a
// multiple of 64 * world and cut into equal shards, one for each owner. So
// reduce-scatter and all-gather run in place for any world size, shards stay
// aligned, and no bucket size ever moves an owner. A ZeRO stage is just a row
// of PlacementOfStage. Nothing here knows a thread, a device or a file.
//
// A vocabulary table is its own unit, after those that compute, and is divided
// into parts of whole rows, none larger than the largest other unit. Segments
// never cross a part, and products with the table go part by part. With
// `vocabulary_parts` each part is a unit, with the same bits: the lookup and
// the head compute part by part, and a part's gradient is reduced while the
// next one's is computed. If they are sharded, neither the table nor its
// gradient is full on a rank. The head recomputes its logits in backward,
// unless a micro-batch has few.
//
// A lookup adds one row per token to its gradient. If all ranks' tokens of a
// step are fewer than the table's rows, ranks exchange tokens and rows at the
// end of backward, and each adds all of them to its part of the reduced
// gradient: ordered by rank, then micro-step, then token. The gradient of a
// head that shares the table is reduced before, right after the head. Otherwise
// the lookup writes into the same dense gradient as the head, which is reduced
// when both have; in parts the head computes its share only then, from its own
// logits, so that at most one part is in memory. The rule depends only on
// shapes, so the bits are the same at every stage.
//
// A lookup of a sharded table gets only the rows of its tokens (kLookUp in
// schedule.h), if ranks send less for them than for the table, if that saves a
// gather (a whole table that a head shares stays in place for it), and if the
// device has the shards. Ranks gather the tokens, each fills in its elements of
// their rows, and the sum over ranks is the rows: exact, since all addends but
// one are -0. The exchange is in turns, each of at most a quarter of the rows
// that would be gathered at once, as some backends need twice that memory.
//
// A large unit's parameters are in phases, in the order in which its forward
// pass uses them, and no segment crosses a phase. If gradients are sharded, its
// backward runs phase by phase, last first, each with its own buffer: a phase
// is reduced while the others are computed, and at most one such unit's
// gradients are in memory.
//
// The ranks are a mesh of two axes. Along `shard`, consecutive ranks, the
// states are cut into shards, so each such group has all of them; along
// `replicate` ranks have the same shards. One group is ZeRO; several are MiCS
// and FSDP's hybrid sharding. A parameter server is a single owner on the axis.
//
// Invariants: parameters are disjoint; segments tile the unit;
//   padded_elems = sum of segment elems; segment elems % (64 * world) = 0;
//   every segment of trained parameters is in exactly one reduce bucket (but
//   those of a table that only a lookup reads, by rows) and one gather bucket.
#ifndef ZERO_ENGINE_ZERO_PLAN_H_
#define ZERO_ENGINE_ZERO_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/tensor/shape.h"
#include "kernels/dtype.h"

namespace zero {

// A parameter as the plan needs to know it.
struct ParameterSpec {
  std::string name;
  Shape shape;  // stored shape
  bool decay = false;
  bool frozen = false;
  bool vocabulary = false;  // a table [V, C]: its own unit
  bool looked_up = false;   // rows of the table, by token
  int phase = 0;            // of the unit's parameters, ascending
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  std::vector<std::string> borrowed;  // names of earlier units' parameters
  bool backward_reads_parameters = true;
};

// How one model state is placed on the data-parallel ranks: in full on every
// rank, or on each rank the shards it owns.
enum class Placement { kReplicated, kSharded };

struct StatePlacement {
  Placement parameters = Placement::kReplicated;
  Placement gradients = Placement::kReplicated;
  Placement optimizer = Placement::kReplicated;  // and master weights

  bool operator==(const StatePlacement&) const = default;
};

// The stages of Rajbhandari et al. 2020 (ZeRO, figure 1), numbered as in
// DeepSpeed: 0 replicates all (DDP), 1 shards the optimizer, 2 the gradients
// too, 3 the parameters too. REQUIRES: 0 <= stage <= 3.
StatePlacement PlacementOfStage(int stage);

// The placement with a parameter server: all ranks have the parameters and
// their own gradients; only the owner has the optimizer.
inline StatePlacement PlacementOfServer() { return PlacementOfStage(1); }

// The memory in which a unit's model state is kept: the device's, its host's,
// or a file on a disk (swapped_states.h), which the host reads.
enum class Home { kDevice, kHost, kNvme };
inline constexpr int kNumMemories = 2;  // the first two

struct StateHomes {
  // If not kDevice, parameters are sharded there, and on the device only while
  // the unit computes. Requires the optimizer to be off the device as well.
  Home parameters = Home::kDevice;
  // If not kDevice, the host updates: it holds masters and moments, and the
  // sums of gradients that a rank owns are in its memory.
  Home optimizer = Home::kDevice;

  bool operator==(const StateHomes&) const = default;
};

// Elements [begin, begin + elems) of a unit.
struct Segment {
  int64_t begin = 0;
  int64_t elems = 0;
  int64_t end() const { return begin + elems; }
};

// One axis of the mesh of ranks.
struct Axis {
  absl::string_view name;
  int64_t size = 1;
  int64_t stride = 1;  // from a rank to its neighbour on the axis

  bool operator==(const Axis&) const = default;

  int64_t PlaceOf(int64_t rank) const { return rank / stride % size; }
};

// How flat arrays are divided over an axis: into `owners` equal shards, owned
// in order by its first ranks; the others own nothing.
struct Partition {
  Axis axis;
  int64_t owners = 1;

  bool operator==(const Partition&) const = default;
  // Whether every rank of the axis owns a shard.
  bool even() const { return owners == axis.size; }
  // How many of `elems` are in the shard of `rank`.
  int64_t OwnedElems(int64_t elems, int64_t rank) const {
    return axis.PlaceOf(rank) < owners ? elems / owners : 0;
  }
  Segment Shard(const Segment& segment, int64_t rank) const {
    const int64_t elems = OwnedElems(segment.elems, rank);
    return {segment.begin + elems * axis.PlaceOf(rank), elems};
  }
};

// How elements travel.
struct Codec {
  DType dtype = DType::kF32;
  // The dtype of a ring's partial sums in transit.
  DType partial_sums = dtype;

  bool operator==(const Codec&) const = default;
};

// The data that one collective moves between the ranks of an axis: owners give
// their shards to all (kGather), or get the sum over all of them (kSum).
struct Transfer {
  enum class Kind { kGather, kSum };

  Kind kind = Kind::kGather;
  Partition partition;
  int64_t elems = 0;  // of all shards
  Codec codec;

  bool operator==(const Transfer&) const = default;

  struct Bytes {
    int64_t sent = 0, received = 0;
  };
  Bytes BytesOf(int64_t rank) const;
};

struct PlanOptions {
  // 25 MB of fp32.
  static constexpr int64_t kDefaultBucketElems = 6'553'600;

  int64_t world = 1;
  int64_t shards = 0;  // ranks of a group; divides world; 0: one group
  // Ranks of a group that own something: 0: all of them. 1: rank 0, a parameter
  // server; with one group and PlacementOfServer.
  int64_t owners = 0;
  StatePlacement placement;
  StateHomes homes;  // of every unit
  // With homes.optimizer not kDevice, the host updates at most this share of
  // the trained elements, in whole units (the parts of a table as one) and at
  // least one; the optimizer of the others is on the device. In (0, 1]; 1 if
  // homes.parameters is not kDevice.
  double host_share = 1;
  Codec parameters, gradients;
  // Tokens that a rank looks up in a step; 0: unknown, gradients are dense.
  int64_t tokens = 0;
  // Of these, those of one micro-step; 0: unknown, or tables stay in place for
  // several micro-steps. Tables are then gathered.
  int64_t micro_tokens = 0;
  // Vocabulary tables are in parts if there are other ranks, or gradients are
  // sharded. Changes memory and traffic, but no bit of the result.
  bool vocabulary_parts = false;
  // Parts below this, a MiB of fp32, are not worth a collective each.
  int64_t min_part_elems = int64_t{1} << 18;
  // Units with no more trained elements than this have one phase.
  int64_t max_one_phase_elems = int64_t{4} << 20;
  // Every parameter is its own segment, whatever its size. Moves owners and
  // costs padding: for measuring one collective per tensor.
  bool segment_per_tensor = false;
  // Upper limits of one collective's elements; one segment always fits.
  int64_t reduce_bucket_elems = kDefaultBucketElems;
  int64_t gather_bucket_elems = kDefaultBucketElems;
};

struct PlannedParameter {
  ParameterSpec spec;
  int64_t offset = 0;  // in the unit's flat buffer, in elements
  Shape shape;         // of the parameter, or of rows of it,
  int64_t first = 0;   // starting at this element of the parameter
  int64_t elems = 0;
  int phase = 0;  // of the unit's phases
};

// A table's parts, or the part that a unit computes with.
struct TablePart {
  int number = 0, count = 1;
  int64_t rows = 0;  // of a part; 0: the table has no parts
  bool operator==(const TablePart&) const = default;
};

struct PlannedUnit {
  std::string name;
  std::vector<PlannedParameter> parameters;
  // Parameters of earlier units that this one reads: they must be in place
  // while it runs.
  std::vector<std::string> borrowed;
  // The units whose parameters must be in place while this one runs forward,
  // ascending: itself, its tables, and those that own the borrowed ones.
  std::vector<int> required_units;
  // The units whose parameters its backward reads as well.
  std::vector<int> backward_required_units;
  // The units whose gradients its backward writes.
  std::vector<int> writes;
  // The unit that computes with these parameters first: itself, or the model's
  // unit that has this table.
  int owner = 0;
  int model_unit = 0;  // of the owner
  // The last unit whose backward writes the gradient; -1: none, it is all rows.
  int completed_by = 0;
  // With count 1 and rows > 0 the table is one unit, whose products go part by
  // part.
  TablePart part;
  // Set for the first part of a table that is exchanged by rows: how many rows
  // a rank looks up in a step, and their length.
  int64_t rows = 0, width = 0;
  // Set for the first part of a table that is looked up by rows: how many of
  // each rank's tokens are in a turn, and the transfers of a micro-step. A turn
  // is two: tokens, and rows.
  int64_t lookup_tokens = 0;
  std::vector<Transfer> lookup;
  // Set for a table in parts with a dense gradient from the lookup and a head:
  // the head's share is computed together with the lookup's.
  bool head_waits = false;
  std::vector<Segment> segments;
  // The trained elements that each phase of backward writes, in its order: from
  // the end down. One phase if gradients are replicated or shared with another
  // unit; none if nothing is trained.
  std::vector<Segment> phases;
  int64_t offset = 0;  // of this unit among all units, in elements
  int64_t padded_elems = 0;
  // The global number of its element 0: independent of parts, and far from
  // other units' numbers.
  int64_t first_element = 0;
  // The elements before frozen parameters: those with gradients and optimizer
  // arrays.
  int64_t trained_elems = 0;
  int num_trained_segments = 0;
  int64_t first_trained_segment = 0;  // among those of all units
  int64_t first_segment = 0;          // among all, in forward order
  StateHomes homes;
  // The transfer that gathers its sharded parameters.
  std::vector<Transfer> gather;
};

struct SegmentRef {
  int unit = 0;
  int segment = 0;
  bool operator==(const SegmentRef&) const = default;
};

// Segments that move together; or the rows of a table's gradient, and their
// tokens.
struct Bucket {
  std::vector<SegmentRef> segments;  // none of rows
  int64_t elems = 0;                 // rows: those of all ranks
  int unit = 0;                      // of the first segment, or the table
  int completed_by = 0;              // the unit whose backward completes it,
  int phase = 0;                     // and when
  // Transfers in sequence: within the group, then, once per step, between
  // groups.
  std::vector<Transfer> transfers, across;

  bool operator==(const Bucket&) const = default;
  bool is_rows() const { return segments.empty(); }
};

struct Plan {
  // Alignment of every parameter and shard, in elements.
  static constexpr int64_t kAlignElems = 64;
  // Units above this are cut into several segments: 16 MiB of fp32, small
  // enough that the first reduction of a step starts early.
  static constexpr int64_t kMaxSegmentElems = int64_t{4} << 20;

  int64_t world = 1;
  Axis shard{"shard"}, replicate{"replicate"};
  Partition owners;  // of sharded states, over `shard`
  Codec parameters, gradients;
  // Gradient rows travel as backward writes them, in the parameters' dtype, or
  // in the gradients' if that is smaller.
  Codec rows;
  // A group of one has nothing to shard: all is replicated, whatever was asked.
  // But host states are sharded over one, so that the device has them only
  // while a unit computes.
  StatePlacement placement;
  // The model's units, followed by the tables, which compute nothing.
  std::vector<PlannedUnit> units;
  int num_computing = 0;
  // The first computing unit whose backward writes a gradient. Earlier ones
  // have no backward and keep nothing for it.
  int first_trained = 0;
  // All units in the order in which parameters are needed: a table before its
  // owner.
  std::vector<int> forward_order;
  // The buckets as backward completes them: from the last unit down.
  // That order is static: a unit's backward runs after those of all later
  // units, including borrowers of its parameters, and an unused parameter's
  // gradient is zero when it ends. So no step is traced to find the order in
  // which gradients become ready, and nothing is re-planned. If gradients are
  // replicated, a bucket may hold segments of several units; if sharded, of one
  // unit, whose buffer it frees.
  std::vector<Bucket> reduce_buckets;
  // Updated parameters, from the first unit up; empty unless parameters are
  // replicated and the optimizer is sharded.
  std::vector<Bucket> gather_buckets;
  int64_t padded_elems = 0;   // over all units
  int64_t trained_elems = 0;  // likewise
  int64_t num_trained_segments = 0;

  // Rank r's shard of a segment, in the unit's elements.
  Segment Shard(const Segment& segment, int64_t rank) const {
    return owners.Shard(segment, rank);
  }
  // How many of a state's `elems` are on one rank.
  int64_t StateElems(int64_t elems, Placement placement,
                     int64_t rank = 0) const {
    return placement == Placement::kSharded ? owners.OwnedElems(elems, rank)
                                            : elems;
  }
  const Segment& segment(const SegmentRef& ref) const {
    return units[ref.unit].segments[ref.segment];
  }
  bool shards_parameters() const {
    return placement.parameters == Placement::kSharded;
  }
  bool shards_gradients() const {
    return placement.gradients == Placement::kSharded;
  }
  // Whether the host updates a unit; whether it has its parameters.
  bool UpdatesOnHost(int unit) const {
    return units[unit].homes.optimizer != Home::kDevice &&
           units[unit].trained_elems > 0;
  }
  bool FetchesParameters(int unit) const {
    return units[unit].homes.parameters != Home::kDevice &&
           units[unit].padded_elems > 0;
  }
  // Whether a unit's parameters come from a disk; whether any state for its
  // update does: such a unit is updated segment by segment.
  bool ReadsParameters(int unit) const {
    return units[unit].homes.parameters == Home::kNvme &&
           units[unit].padded_elems > 0;
  }
  bool UpdatesFromDisk(int unit) const {
    return (units[unit].homes.optimizer == Home::kNvme ||
            ReadsParameters(unit)) &&
           units[unit].trained_elems > 0;
  }
  // Host buffers that segments rotate through.
  static constexpr int kNumSwapSlots = 3;
  int SwapSlot(const SegmentRef& ref) const {
    return static_cast<int>((units[ref.unit].first_segment + ref.segment) %
                            kNumSwapSlots);
  }
  // Whether the host updates any part of a bucket.
  bool Offloads(const Bucket& bucket) const;
  // Whether the host adds up the sums of several micro-steps for the units it
  // updates. The device does if gradients are replicated, or if they must still
  // be added up across groups.
  bool AddsOnHost() const { return shards_gradients() && replicate.size == 1; }
  // How many of trained_elems the host updates.
  int64_t HostUpdatedElems() const;
  // Whether the forward of a table's owner gets only rows of it.
  bool LooksUpRows(int table) const {
    return units[table - units[table].part.number].lookup_tokens > 0;
  }
  // Whether the host updates any unit.
  bool UpdatesOnHost() const;
  bool FetchesParameters() const;
  bool UsesDisk() const;
  bool ReadsParameters() const;
  // Whether units of the model compute with one part of a table at a time.
  bool in_parts() const { return units[num_computing - 1].part.count > 1; }
};

Plan MakePlan(const std::vector<UnitSpec>& units, const PlanOptions& options);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_PLAN_H_
