#include "engine/zero/state_access.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/base/hash.h"
#include "engine/base/status.h"
#include "kernels/rounding.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// The fp32 values of a tensor at `from` in the host's memory, with its rest
// (null: none) at `rest`: in place, or in `floats`.
absl::Span<const float> Floats(const Tensor& tensor, const void* from,
                               const void* rest, std::vector<float>* floats) {
  const size_t n = tensor.num_elems();
  if (tensor.dtype() == DType::kF32) {
    return {static_cast<const float*>(from), n};
  }
  const auto* half = static_cast<const uint16_t*>(from);
  const auto* low = static_cast<const uint16_t*>(rest);
  const bool bf16 = tensor.dtype() == DType::kBF16;
  floats->resize(n);
  for (size_t i = 0; i < n; ++i) {
    (*floats)[i] = low != nullptr ? JoinMaster(half[i], low[i])
                   : bf16         ? BF16ToF32(half[i])
                                  : F16ToF32(half[i]);
  }
  return *floats;
}

// Whether `a` is before `b` in the plan.
bool IsBefore(const SegmentRef& a, const SegmentRef& b) {
  return std::tie(a.unit, a.segment) < std::tie(b.unit, b.segment);
}

}  // namespace

void StateAccess::Initialize(uint64_t seed) {
  states_->Fill(
      StatePart::kLocal,
      [seed](const Parameter& parameter, int64_t begin, int64_t count,
             float* out) { InitialValues(parameter, seed, begin, count, out); },
      *upload_, *compute_);
  states_->CopyToHost(*compute_, /*to_disk=*/false);
}

absl::Status StateAccess::Load(const ModelStates::ValuesFn& values) {
  states_->Fill(StatePart::kShard, InFirstGroup() ? values : nullptr, *upload_,
                *compute_);
  ZERO_RETURN_IF_ERROR(numbers_->Meet("weights are read"));
  ZERO_RETURN_IF_ERROR(Share(states_->params()));
  states_->CopyToHost(*compute_, /*to_disk=*/!InFirstGroup());
  return states_->master().defined() ? Share(states_->master())
                                     : absl::OkStatus();
}

absl::Status StateAccess::Exchange() {
  states_->Exchange(*upload_, *compute_);
  return plan_->shards_parameters() ? rank_->status()
                                    : Share(states_->params());
}

std::vector<StateAccess::KeptPiece> StateAccess::KeptPieces() const {
  return PartOfShards(plan_->replicate.PlaceOf(rank_->rank()),
                      plan_->replicate.size);
}

int64_t StateAccess::KeptBytes() const {
  int64_t bytes = 0;
  for (const SegmentRef& ref : states_->segments()) {
    for (const auto& state : states_->kept(ref)) {
      bytes += plan_->segment(ref).elems * DTypeBytes(state.dtype);
    }
  }
  return bytes;
}

std::vector<StateAccess::KeptPiece> StateAccess::PartOfShards(int part,
                                                              int parts) const {
  std::vector<KeptPiece> pieces;
  // Ranges are ordered by state: so neighbours in a file have one dtype and are
  // in order.
  for (size_t i = 0, most = 1; i < most; ++i) {
    for (const SegmentRef& ref : states_->segments()) {
      const auto states = states_->kept(ref);
      most = std::max(most, states.size());
      if (i >= states.size()) continue;
      const Segment shard = plan_->Shard(plan_->segment(ref), rank_->rank());
      const int64_t begin = shard.elems * part / parts;
      const int64_t elems = shard.elems * (part + 1) / parts - begin;
      if (elems == 0) continue;
      const auto& [name, dtype, from] = states[i];
      const auto slice = [&, begin = begin](const FlatState* of) {
        return of == nullptr ? Tensor() : of->Shard(ref).Slice(begin, {elems});
      };
      pieces.push_back({name,
                        dtype,
                        ref,
                        {shard.begin + begin, elems},
                        slice(from.values),
                        slice(from.rest)});
    }
  }
  // A segment on a disk is read once for all of its states instead.
  if (plan_->UsesDisk()) {
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const KeptPiece& a, const KeptPiece& b) {
                       return IsBefore(a.segment, b.segment);
                     });
  }
  return pieces;
}

void StateAccess::ForEachKept(const std::vector<KeptPiece>& pieces,
                              const VisitKeptFn& visit) const {
  for (const KeptPiece& piece : pieces) {
    states_->ForEachRun(piece.segment, piece.range, piece.values, piece.rest,
                        [&](const StateRun& run) {
                          visit({piece.state, piece.dtype, run});
                        });
  }
}

void StateAccess::CopyKept(const std::vector<KeptPiece>& to) {
  ZERO_CHECK(!plan_->UsesDisk()) << "states on a disk are read piece by piece";
  const std::vector<KeptPiece> from = KeptPieces();
  ZERO_CHECK_EQ(from.size(), to.size());
  // On the CPU, where all threads synchronize after each copy, neighbours on
  // both sides are copied as one. CUDA requires each copy to be within one
  // allocation.
  const bool joins = rank_->device->kind() == DeviceKind::kCpu;
  char* dst = nullptr;
  const char* src = nullptr;
  size_t bytes = 0;
  const auto copy = [&](const Tensor& to, const Tensor& from) {
    auto* const to_data = static_cast<char*>(to.data());
    const auto* const from_data = static_cast<const char*>(from.data());
    if (!joins || to_data != dst + bytes || from_data != src + bytes) {
      rank_->device->Copy(*compute_, dst, src, bytes);
      dst = to_data;
      src = from_data;
      bytes = 0;
    }
    bytes += from.bytes();
  };
  for (size_t i = 0; i < from.size(); ++i) copy(to[i].values, from[i].values);
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].rest.defined()) copy(to[i].rest, from[i].rest);
  }
  rank_->device->Copy(*compute_, dst, src, bytes);
  compute_->Synchronize();
}

absl::Span<const char> StateAccess::Bytes(const KeptRun& kept) {
  KeptRun on_host = kept;
  const auto fetch = [&](Tensor& values, std::vector<char>& copied) {
    if (!values.defined()) return;
    values = Tensor::Borrow(const_cast<void*>(OnHost(values, copied)),
                            values.shape(), values.dtype());
  };
  states_->Hold(kept.run.segment, /*change=*/false, *compute_);
  fetch(on_host.run.values, copied_);
  fetch(on_host.run.rest, copied_rest_);
  return HostBytes(on_host, &floats_);
}

absl::Span<const char> StateAccess::HostBytes(const KeptRun& kept,
                                              std::vector<float>* floats) {
  const Tensor& values = kept.run.values;
  const void* const from =
      kept.dtype == values.dtype()
          ? values.data()
          : Floats(values, values.data(), kept.run.rest.data(), floats).data();
  return {static_cast<const char*>(from),
          values.num_elems() * DTypeBytes(kept.dtype)};
}

DType StateAccess::WeightType(const Parameter& parameter) const {
  return states_->master().defined() && !parameter.frozen
             ? DType::kF32
             : states_->params().dtype();
}

std::vector<StateAccess::KeptRange> StateAccess::RangesToRestore(
    const std::vector<KeptPiece>& owned) const {
  std::vector<KeptRange> ranges;
  states_->ForEachRun(
      states_->params(), StatePart::kShard, [&](const StateRun& run) {
        ranges.push_back({"weight", run.parameter, run.begin, run.place.elems,
                          WeightType(*run.parameter), run.segment});
      });
  ForEachKept(owned, [&](const KeptRun& kept) {
    if (kept.state == "weight") return;
    ranges.push_back({kept.state, kept.run.parameter, kept.run.begin,
                      kept.run.place.elems, kept.dtype, kept.run.segment});
  });
  if (plan_->UsesDisk()) {
    std::stable_sort(ranges.begin(), ranges.end(),
                     [](const KeptRange& a, const KeptRange& b) {
                       return IsBefore(a.segment, b.segment);
                     });
  }
  return ranges;
}

absl::Status StateAccess::Restore(const OpenKeptFn& open, bool has_stale) {
  // The first group's ranks read their shards and send them to the others.
  std::vector<KeptPiece> owned;
  ReadNextFn next;
  absl::Status status;
  if (InFirstGroup()) {
    owned = PartOfShards(0, 1);
    std::erase_if(owned, [&](const KeptPiece& piece) {
      return !has_stale && piece.state == ModelStates::kStale;
    });
    absl::StatusOr<ReadNextFn> opened = open(RangesToRestore(owned));
    status = opened.status();
    if (opened.ok()) next = *std::move(opened);
  }
  const auto get = [&](void* out) {
    if (status.ok()) status = next(out);
  };
  std::vector<uint16_t> halves;
  const auto weights = [&](const Parameter& parameter, int64_t /*begin*/,
                           int64_t count, float* out) {
    const DType dtype = WeightType(parameter);
    if (dtype == DType::kF32) return get(out);
    halves.resize(count);
    get(halves.data());
    for (int64_t i = 0; i < count; ++i) {
      out[i] =
          dtype == DType::kBF16 ? BF16ToF32(halves[i]) : F16ToF32(halves[i]);
    }
  };
  const auto fill_rest = [&](const KeptRun& kept) {
    if (kept.state == "weight") return;
    const Tensor& to = kept.run.values;
    upload_->Stage([&](void* host) { get(host); },
                   [&](const void* host) {
                     rank_->device->Copy(*compute_, to.data(), host,
                                         to.bytes());
                   });
  };
  // The ranges of one segment with its weights, if they are on a disk: sorted
  // by segment.
  const auto of_segment = [&](const SegmentRef& segment) {
    const auto found =
        std::ranges::equal_range(owned, segment, IsBefore, &KeptPiece::segment);
    ForEachKept({found.begin(), found.end()}, fill_rest);
  };
  const bool on_disk = plan_->UsesDisk();
  states_->Fill(StatePart::kShard,
                InFirstGroup() ? ModelStates::ValuesFn(weights) : nullptr,
                *upload_, *compute_,
                on_disk ? ModelStates::AddFn(of_segment) : nullptr);
  if (!on_disk) ForEachKept(owned, fill_rest);
  compute_->Synchronize();
  // If one could not read, none continues, and all know whether that is damage.
  double failed = status.ok() ? 0 : absl::IsDataLoss(status) ? 2 : 1;
  ZERO_RETURN_IF_ERROR(
      numbers_->AllReduce("states are read", ReduceOp::kMax, {&failed, 1}));
  ZERO_RETURN_IF_ERROR(status);
  if (failed == 2) return absl::DataLossError("another rank found damage");
  if (failed == 1) return absl::UnavailableError("another rank cannot read");
  ZERO_RETURN_IF_ERROR(numbers_->Meet("weights are read"));
  for (const FlatState* state : states_->lasting()) {
    ZERO_RETURN_IF_ERROR(Share(*state));
  }
  if (has_stale && states_->keeps_stale()) {
    ZERO_RETURN_IF_ERROR(Share(states_->stale()));
    states_->set_params_are(ModelStates::Params::kNewer);
  } else {
    states_->CopyToHost(*compute_, /*to_disk=*/!InFirstGroup());
  }
  return absl::OkStatus();
}

// Sends the first group's shards to the other groups, and within each to all
// holders.
absl::Status StateAccess::Share(const FlatState& state) {
  const bool full_here = state.sharded() || plan_->shard.size == 1;
  if (plan_->replicate.size == 1 && full_here) return rank_->status();
  const DType dtype = state.dtype();
  std::vector<CollectiveSegment> shards, segments;
  const auto send = [&] {
    compute_->Synchronize();
    if (plan_->replicate.size > 1) {
      rank_->across->Broadcast(*reduce_, state.name(), dtype, /*root=*/0,
                               std::exchange(shards, {}));
      reduce_->Synchronize();
    }
    if (plan_->shard.size > 1 && !state.sharded()) {
      wire_->Gather(state.name(), dtype, std::exchange(segments, {}));
      gather_->Synchronize();
    }
  };
  for (const SegmentRef& ref : states_->segments()) {
    if (!state.Has(ref)) continue;
    const bool on_disk = state.OnDisk(ref.unit);
    if (on_disk) states_->Hold(ref, /*change=*/!InFirstGroup(), *compute_);
    const Tensor shard = state.Shard(ref);
    shards.push_back({shard.data(), shard.data(), shard.num_elems()});
    if (!state.sharded()) {
      const Tensor full = state.Full(ref);
      segments.push_back({shard.data(), full.data(), full.num_elems()});
    }
    if (on_disk) send();  // before another segment takes its place
  }
  send();
  states_->Settle(*compute_);
  return rank_->status();
}

absl::Status StateAccess::Read(const TakeFn& take) {
  for (const SegmentRef& ref : states_->segments()) {
    const auto [values, rest] = states_->readable(ref);
    states_->Hold(ref, /*change=*/false, *compute_);
    ZERO_ASSIGN_OR_RETURN(const Tensor full, Full(*values, ref));
    Tensor full_rest;
    if (rest != nullptr) {
      ZERO_ASSIGN_OR_RETURN(full_rest, Full(*rest, ref));
    }
    if (take == nullptr || rank_->device->kind() == DeviceKind::kMeta) continue;
    states_->ForEachRun(ref, plan_->segment(ref), full, full_rest,
                        [&](const StateRun& run) {
                          take(*run.parameter, run.begin, Download(run));
                        });
  }
  return rank_->status();
}

absl::StatusOr<Tensor> StateAccess::Full(const FlatState& state,
                                         const SegmentRef& ref) {
  if (!state.sharded()) return state.Full(ref);
  const Segment& segment = plan_->segment(ref);
  const Segment shard = plan_->Shard(segment, rank_->rank());
  const Tensor full = Tensor::Empty(*arena_, {segment.elems}, state.dtype(),
                                    MemoryCategory::kGatheredParameters);
  // Collectives read the device's memory; the shard may be in the host's.
  const Tensor own = full.Slice(shard.begin - segment.begin, {shard.elems});
  rank_->device->Copy(*compute_, own.data(), state.Shard(ref).data(),
                      own.bytes());
  // Nothing is in flight between steps, so the host may wait.
  compute_->Synchronize();
  if (plan_->world == 1) return full;
  wire_->Gather(plan_->units[ref.unit].name, state.dtype(),
                {{own.data(), full.data(), segment.elems}});
  gather_->Synchronize();
  ZERO_RETURN_IF_ERROR(rank_->status());
  return full;
}

const void* StateAccess::OnHost(const Tensor& values,
                                std::vector<char>& copied) {
  if (!rank_->device->asynchronous()) return values.data();
  copied.resize(values.bytes());
  rank_->device->Copy(*compute_, copied.data(), values.data(), values.bytes());
  compute_->Synchronize();
  return copied.data();
}

absl::Span<const float> StateAccess::Download(const StateRun& run) {
  states_->Hold(run.segment, /*change=*/false, *compute_);
  const void* const values = OnHost(run.values, copied_);
  const void* const rest =
      run.rest.defined() ? OnHost(run.rest, copied_rest_) : nullptr;
  return Floats(run.values, values, rest, &floats_);
}

absl::StatusOr<std::string> StateAccess::Hash() {
  // The number of each parameter's first block.
  std::map<std::string, int64_t> first_block;
  for (const BoundParameter* bound : states_->bound()) {
    first_block[bound->parameter->name] =
        CeilDiv(bound->parameter->shape.num_elems(), BlockHash::kBlockElems);
  }
  int64_t num_blocks = 0;
  for (auto& [name, block] : first_block) {
    num_blocks += std::exchange(block, num_blocks);
  }
  BlockHash hash;
  for (const SegmentRef& ref : states_->segments()) {
    if (!InFirstGroup()) break;
    const Segment shard = plan_->Shard(plan_->segment(ref), rank_->rank());
    const auto [values, rest] = states_->readable(ref);
    states_->ForEachRun(ref, shard, values->Shard(ref),
                        rest != nullptr ? rest->Shard(ref) : Tensor(),
                        [&](const StateRun& run) {
                          hash.Add(first_block[run.parameter->name] +
                                       run.begin / BlockHash::kBlockElems,
                                   Download(run));
                        });
  }
  std::array<double, BlockHash::kNumParts> parts = hash.parts();
  ZERO_RETURN_IF_ERROR(numbers_->AllReduce("parameters hash", ReduceOp::kSum,
                                           absl::MakeSpan(parts)));
  return BlockHash::HexDigest(parts);
}

void StateAccess::ForEachRun(
    const std::function<void(const FlatState&, const StateRun&)>& visit) {
  for (const FlatState* state : states_->lasting()) {
    states_->ForEachRun(*state, StatePart::kLocal, [&](const StateRun& run) {
      states_->Hold(run.segment, /*change=*/true, *compute_);
      visit(*state, run);
    });
  }
  states_->Settle(*compute_);
}

// Every rank checks its own shards, which are valid at every stage.
absl::StatusOr<std::string> StateAccess::FirstNonFinite(
    const std::function<const FlatState&(int unit)>& state_of,
    const char* name) {
  const Tensor count =
      Tensor::Empty(*arena_, {1}, DType::kI64, MemoryCategory::kWorkspace);
  const std::vector<BoundParameter*> order = states_->bound();
  size_t at = 0, first = order.size();
  const auto look = [&](const StateRun& run) {
    if (first < order.size() || run.parameter->frozen) return;
    while (order[at]->parameter != run.parameter) ++at;
    rank_->device->ops().CountNonFinite(
        *compute_, {run.values.vector(), count.As<int64_t>()});
    if (numbers_->ReadScalar(count.As<int64_t>()) > 0) first = at;
  };
  for (const SegmentRef& ref : states_->segments()) {
    const FlatState& state = state_of(ref.unit);
    if (!state.Has(ref)) continue;
    if (state.OnDisk(ref.unit)) {
      states_->Hold(ref, /*change=*/false, *compute_);
    }
    const Segment shard = plan_->Shard(plan_->segment(ref), rank_->rank());
    states_->ForEachRun(ref, shard, state.Shard(ref), /*rest=*/{}, look);
  }
  double earliest = -static_cast<double>(first);
  ZERO_RETURN_IF_ERROR(
      numbers_->AllReduce(name, ReduceOp::kMax, {&earliest, 1}));
  first = static_cast<size_t>(-earliest);
  return first < order.size() ? order[first]->parameter->name : "";
}

}  // namespace zero
