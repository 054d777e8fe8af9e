#include "engine/zero/state_reader.h"

#include <algorithm>
#include <vector>

#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {

absl::Status StateReader::Read(const Parameter& parameter, int64_t first,
                               int64_t count, float* out, Arena& arena) {
  const BoundParameter& bound = states_->BoundOf(parameter);
  const FlatState& state = states_->readable();
  ZERO_CHECK_GE(first, 0);
  ZERO_CHECK_LE(first + count, bound.num_elems());
  const int64_t begin = bound.offset + first;
  const int64_t end = begin + count;
  if (!state.sharded()) {
    Download(state.Unit(bound.unit).Slice(begin, {end - begin}), out);
    return rank_->status();
  }
  const std::vector<Segment>& segments = plan_->units[bound.unit].segments;
  for (size_t s = 0; s < segments.size(); ++s) {
    const int64_t from = std::max(begin, segments[s].begin);
    const int64_t to = std::min(end, segments[s].end());
    if (from >= to) continue;
    ZERO_RETURN_IF_ERROR(Stage({bound.unit, static_cast<int>(s)}, arena));
    Download(staged_.Slice(from - segments[s].begin, {to - from}),
             out + (from - begin));
  }
  return absl::OkStatus();
}

// Gathers a whole segment of the state that Read reads.
absl::Status StateReader::Stage(const SegmentRef& ref, Arena& arena) {
  if (staged_.defined() && staged_ref_ == ref) return absl::OkStatus();
  const Tensor piece = states_->readable().Piece(ref);
  const int64_t elems = plan_->segment(ref).elems;
  staged_ = Tensor();
  staged_ = Tensor::Empty(arena, {elems}, piece.dtype(),
                          MemoryCategory::kGatheredParameters);
  staged_ref_ = ref;
  // Nothing is under way between steps, so the host may wait.
  compute_->Synchronize();
  wire_->Gather(plan_->units[ref.unit].name, piece.dtype(),
                {{piece.data(), staged_.data(), elems}});
  gather_->Synchronize();
  return rank_->status();
}

void StateReader::Download(const Tensor& from, float* out) {
  Device& device = *rank_->device;
  if (device.kind() == DeviceKind::kMeta) return;
  const int64_t n = from.num_elems();
  if (from.dtype() == DType::kF32) {
    device.Copy(*compute_, out, from.data(), from.bytes());
    compute_->Synchronize();
    return;
  }
  std::vector<uint16_t> half(n);
  device.Copy(*compute_, half.data(), from.data(), from.bytes());
  compute_->Synchronize();
  for (int64_t i = 0; i < n; ++i) {
    out[i] =
        from.dtype() == DType::kBF16 ? BF16ToF32(half[i]) : F16ToF32(half[i]);
  }
}

// Every rank looks at its own pieces, which are right at every stage.
bool StateReader::IsFinite(const BoundParameter& bound, const FlatState& state,
                           const Tensor& count) {
  const std::vector<Segment>& segments = plan_->units[bound.unit].segments;
  const int64_t end = bound.offset + bound.num_elems();
  for (int s = 0; s < static_cast<int>(segments.size()); ++s) {
    const Segment piece = plan_->Piece(segments[s], rank_->rank());
    const int64_t from = std::max(bound.offset, piece.begin);
    const int64_t to = std::min(end, piece.end());
    if (from >= to) continue;
    const Tensor part =
        state.Piece({bound.unit, s}).Slice(from - piece.begin, {to - from});
    rank_->device->ops().CountNonFinite(*compute_,
                                        {part.vector(), count.As<int64_t>()});
    if (numbers_->ReadScalar(count.As<int64_t>()) > 0) return false;
  }
  return true;
}

absl::StatusOr<std::string> StateReader::FirstNonFinite(const FlatState& state,
                                                        const char* name,
                                                        Arena& arena) {
  const Tensor count =
      Tensor::Empty(arena, {1}, DType::kI64, MemoryCategory::kWorkspace);
  std::vector<const BoundParameter*> order;
  for (const BoundParameter* bound : states_->bound()) {
    if (!bound->parameter->frozen) order.push_back(bound);
  }
  const auto bad = std::find_if(order.begin(), order.end(),
                                [&](const BoundParameter* bound) {
                                  return !IsFinite(*bound, state, count);
                                });
  double earliest = -static_cast<double>(bad - order.begin());
  ZERO_RETURN_IF_ERROR(
      numbers_->AllReduce(name, ReduceOp::kMax, {&earliest, 1}));
  const size_t first = static_cast<size_t>(-earliest);
  return first < order.size() ? order[first]->parameter->name : "";
}

}  // namespace zero
