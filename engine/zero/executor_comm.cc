// What the executor sends: parameters, gradients, and the few numbers that
// ranks agree on.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/zero/executor.h"
#include "engine/zero/executor_internal.h"
#include "kernels/check.h"

namespace zero {

void Executor::FollowCompute(Stream& stream) {
  stream_->Record(*computed_);
  stream.Wait(*computed_);
}

template <typename Work>
void Executor::Wait(Channel channel, const std::string& name,
                    const Work& work) {
  if (plan_.world == 1) return work();
  Timed(work, [this, channel, name](TimePoint begin, TimePoint end) {
    waited_[channel] += Millis(end - begin);
    if (wait_hook_) wait_hook_(channel, name, begin, end);
  });
}

void Executor::AwaitEvent(Event& event, Channel channel,
                          const std::string& name) {
  Wait(channel, name, [&] { stream_->Wait(event); });
}

std::unique_ptr<Event> Executor::MarkTime() {
  std::unique_ptr<Event> event;
  if (idle_events_.empty()) {
    event = device_->MakeEvent();
  } else {
    event = std::move(idle_events_.back());
    idle_events_.pop_back();
  }
  stream_->Record(*event);
  return event;
}

// The host's clock is read when the last event is done, and says when the
// others were.
void Executor::ReadTimes(Event& last, std::vector<TimedWork>* timed) {
  last.Synchronize();
  const Clock::time_point now = Clock::now();
  const auto time_of = [&](const Event& event) {
    const std::chrono::duration<double, std::milli> ago(
        last.MillisSince(event));
    return now - std::chrono::duration_cast<Clock::duration>(ago);
  };
  for (TimedWork& work : *timed) {
    work.count(time_of(*work.begin), time_of(*work.end));
    idle_events_.push_back(std::move(work.begin));
    idle_events_.push_back(std::move(work.end));
  }
  timed->clear();
}

void Executor::Gather(int unit) {
  UnitState& state = units_[unit];
  const PlannedUnit& planned = plan_.units[unit];
  ZERO_CHECK(!state.gathered.defined()) << planned.name;
  const DType dtype = options_.param_dtype;
  state.gathered = Tensor::Empty(*rotating_, {planned.padded_elems}, dtype,
                                 MemoryCategory::kGatheredParameters);
  std::vector<CollectiveSegment> segments;
  for (int s = 0; s < static_cast<int>(planned.segments.size()); ++s) {
    const Segment& segment = planned.segments[s];
    segments.push_back(
        {params_.Piece({unit, s}).data(),
         state.gathered.Slice(segment.begin, {segment.elems}).data(),
         segment.elems});
  }
  GatherPieces(planned.name, dtype, std::move(segments));
  gather_stream_->Record(*state.gather_done);
  state.awaited.push_back({state.gather_done.get(), &planned.name});
  BindValues(unit, state.gathered);
}

void Executor::GatherPieces(const std::string& name, DType dtype,
                            std::vector<CollectiveSegment> segments) {
  FollowCompute(*gather_stream_);
  if (plan_.server) {
    for (CollectiveSegment& segment : segments) {
      if (rank_->rank() != 0) segment.send = segment.recv;  // owns nothing
    }
    rank_->gather->Broadcast(*gather_stream_, name, dtype, /*root=*/0,
                             std::move(segments));
  } else {
    rank_->gather->AllGather(*gather_stream_, name, dtype, std::move(segments));
  }
}

void Executor::Release(int unit) {
  BindValues(unit, Tensor());
  units_[unit].gathered = Tensor();
}

void Executor::AwaitParameters(int unit) {
  for (int needed : plan_.units[unit].needs) {
    for (const auto& [event, name] : units_[needed].awaited) {
      AwaitEvent(*event, Channel::kGather, *name);
    }
    units_[needed].awaited.clear();
  }
}

void Executor::AwaitAllParameters() {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) AwaitParameters(u);
}

void Executor::TakeSentGradients() {
  if (sent_gradients_.defined()) return;
  int64_t elems = 0;
  for (const Bucket& bucket : plan_.reduce_buckets) {
    elems = std::max(elems, bucket.elems);
  }
  sent_gradients_ = Tensor::Empty(*rotating_, {elems}, options_.reduce_dtype,
                                  MemoryCategory::kReduceBuffers);
}

// dst (+)= src, rounded once.
struct Executor::Conversion {
  ConstVector src;
  Vector dst;
  bool accumulate = false;
};

// On the reduce stream, which runs beside compute: one thread on the CPU.
void Executor::ConvertForReduce(std::vector<Conversion> conversions) {
  reduce_stream_->Enqueue([ops = &context_->ops(),
                           stream = reduce_stream_.get(),
                           conversions = std::move(conversions)] {
    for (const Conversion& one : conversions) {
      ops->SumRanks(*stream, {.src = {&one.src.data, 1},
                              .src_dtype = one.src.dtype,
                              .dst = one.dst,
                              .accumulate = one.accumulate});
    }
  });
}

// Of what is reduced: all of it, and the part of it that this rank owns (none
// on the workers of a server). Parts lie in the order of ranks.
struct Executor::ReducePart {
  Tensor whole, own;
};

// Adds up the parts over the ranks of `comm`, sent in reduce_dtype; with `all`
// every rank gets the whole sums, in the same order as at every stage.
void Executor::ReduceParts(Communicator& comm, const std::string& name,
                           const std::vector<ReducePart>& parts, bool all,
                           bool accumulate) {
  const DType dtype = options_.reduce_dtype;
  const bool converts = dtype != options_.grad_dtype;
  if (converts) TakeSentGradients();
  std::vector<CollectiveSegment> sums, totals;
  std::vector<Conversion> before, after;
  int64_t sent_elems = 0;
  for (auto [whole, own] : parts) {
    if (converts) {
      const Tensor sent = sent_gradients_.Slice(sent_elems, whole.shape());
      const Tensor sent_own =
          sent.Slice(comm.rank() * own.num_elems(), own.shape());
      sent_elems += whole.num_elems();
      before.push_back({whole.vector(), sent.vector()});
      const Tensor& result = all ? sent : sent_own;
      if (result.num_elems() > 0) {
        after.push_back(
            {result.vector(), (all ? whole : own).vector(), accumulate});
      }
      whole = sent;
      own = sent_own;
    }
    sums.push_back({whole.data(), own.data(), whole.num_elems()});
    totals.push_back({own.data(), whole.data(), whole.num_elems()});
  }
  if (converts) ConvertForReduce(std::move(before));
  if (plan_.server) {
    comm.Reduce(*reduce_stream_, name, dtype, /*root=*/0, std::move(sums));
  } else {
    comm.ReduceScatter(*reduce_stream_, name, dtype, accumulate && !converts,
                       std::move(sums), AsWorkspace(staging_));
  }
  if (all) comm.AllGather(*reduce_stream_, name, dtype, std::move(totals));
  if (converts) ConvertForReduce(std::move(after));
}

void Executor::Reduce(int index, int64_t micro_step) {
  const Bucket& bucket = plan_.reduce_buckets[index];
  const bool sharded = grads_.sharded();
  std::vector<ReducePart> parts;
  for (const SegmentRef& ref : bucket.segments) {
    FinishGradients(ref.unit);
    const Segment& segment = plan_.segment(ref);
    parts.push_back({sharded ? units_[ref.unit].gradients.Slice(segment.begin,
                                                                {segment.elems})
                             : grads_.Whole(ref),
                     grads_.Piece(ref)});
  }
  FollowCompute(*reduce_stream_);
  // Who updates all parameters needs all gradients.
  ReduceParts(*rank_->reduce, plan_.units[bucket.segments.front().unit].name,
              parts, plan_.placement.optimizer == Placement::kReplicated,
              /*accumulate=*/sharded && micro_step > 0);
  reduce_stream_->Record(*reduced_[index]);
}

void Executor::ReduceAcross(int index) {
  const Bucket& bucket = plan_.reduce_buckets[index];
  std::vector<ReducePart> parts;
  for (const SegmentRef& ref : bucket.segments) {
    const Tensor piece = grads_.Piece(ref);
    const int64_t elems = piece.num_elems() / plan_.groups();
    parts.push_back(
        {piece, piece.Slice(rank_->across->rank() * elems, {elems})});
  }
  ReduceParts(*rank_->across,
              absl::StrCat(plan_.units[bucket.segments.front().unit].name,
                           " across groups"),
              parts, /*all=*/true, /*accumulate=*/false);
  reduce_stream_->Record(*reduced_across_[index]);
}

void Executor::AwaitReduce(int index) {
  const int unit = plan_.reduce_buckets[index].segments.front().unit;
  const std::string& name = plan_.units[unit].name;
  AwaitEvent(*reduced_[index], Channel::kReduce, name);
  if (plan_.groups() > 1) {
    AwaitEvent(*reduced_across_[index], Channel::kAcross, name);
  }
  if (!grads_.sharded()) return;
  UnitState& state = units_[unit];
  if (--state.buckets_to_reduce > 0) return;
  BindSinks(unit, Tensor());
  state.gradients = Tensor();
}

void Executor::GatherUpdated(int index) {
  std::vector<CollectiveSegment> segments;
  const Bucket& bucket = plan_.gather_buckets[index];
  Event* done = updated_[index].get();
  const std::string& name = plan_.units[bucket.segments.front().unit].name;
  int last = -1;
  for (const SegmentRef& ref : bucket.segments) {
    segments.push_back({params_.Piece(ref).data(), params_.Whole(ref).data(),
                        plan_.segment(ref).elems});
    if (ref.unit != last) units_[ref.unit].awaited.push_back({done, &name});
    last = ref.unit;
  }
  GatherPieces(name, options_.param_dtype, std::move(segments));
  gather_stream_->Record(*done);
  if (!options_.overlap) AwaitEvent(*done, Channel::kGather, name);
}

// ---- What ranks agree on --------------------------------------------------

void Executor::ReduceNumbers(const std::string& name, ReduceOp op,
                             const Tensor& numbers) {
  Wait(Channel::kScalar, name, [&] {
    rank_->scalar->AllReduce(*stream_, name, DType::kF64, op, numbers.data(),
                             numbers.num_elems());
  });
}

const void* Executor::ReadNumbers(const void* from, int64_t bytes) {
  device_->Copy(*stream_, host_numbers_.data(), from, bytes);
  stream_->Record(*read_);
  read_->Synchronize();
  return host_numbers_.data();
}

void Executor::ReadNumbers(const Tensor& from, float* to) {
  if (device_->kind() == DeviceKind::kMeta) return;
  const auto piece =
      static_cast<int64_t>(host_numbers_.bytes() / sizeof(float));
  for (int64_t begin = 0; begin < from.num_elems(); begin += piece) {
    const Tensor part =
        from.Slice(begin, {std::min(piece, from.num_elems() - begin)});
    std::memcpy(to + begin, ReadNumbers(part.data(), part.bytes()),
                part.bytes());
  }
}

absl::StatusOr<std::string> Executor::FirstNonFiniteGradient() {
  return FirstNonFinite(grads_, "first non-finite gradient");
}

absl::StatusOr<std::string> Executor::FirstNonFiniteParameter() {
  return FirstNonFinite(master_.defined() ? master_ : params_,
                        "first non-finite parameter");
}

// Every rank looks at its own pieces, which are right at every stage.
absl::StatusOr<std::string> Executor::FirstNonFinite(const FlatState& state,
                                                     const char* name) {
  const Tensor count = context_->Empty({1}, DType::kI64);
  const auto is_bad = [&](const BoundParameter& bound) {
    const std::vector<Segment>& segments = plan_.units[bound.unit].segments;
    const int64_t begin = bound.offset;
    const int64_t end = begin + bound.parameter->stored_shape.num_elems();
    for (int s = 0; s < static_cast<int>(segments.size()); ++s) {
      const Segment piece = plan_.Piece(segments[s], rank_->rank());
      const int64_t from = std::max(begin, piece.begin);
      const int64_t to = std::min(end, piece.end());
      if (from >= to) continue;
      const Tensor part =
          state.Piece({bound.unit, s}).Slice(from - piece.begin, {to - from});
      context_->ops().CountNonFinite(*stream_,
                                     {part.vector(), count.As<int64_t>()});
      if (ReadScalar(count.As<int64_t>()) > 0) return true;
    }
    return false;
  };
  std::vector<const BoundParameter*> order;
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      if (!bound->parameter->frozen) order.push_back(bound.get());
    }
  }
  const auto bad =
      std::find_if(order.begin(), order.end(),
                   [&](const BoundParameter* bound) { return is_bad(*bound); });
  double earliest = -static_cast<double>(bad - order.begin());
  ZERO_RETURN_IF_ERROR(AllReduce(name, ReduceOp::kMax, {&earliest, 1}));
  const size_t first = static_cast<size_t>(-earliest);
  return first < order.size() ? order[first]->parameter->name : "";
}

absl::Status Executor::AgreeOnSchedule() {
  if (plan_.world == 1) return absl::OkStatus();
  const std::string own = ScheduleHash(plan_, schedule_);
  const int64_t size = static_cast<int64_t>(own.size());
  const Tensor all = Tensor::Empty(*activations_, {plan_.world * size},
                                   DType::kU8, MemoryCategory::kInputs);
  if (device_->kind() == DeviceKind::kMeta) return absl::OkStatus();
  void* const piece = all.Slice(rank_->rank() * size, {size}).data();
  ZERO_CHECK_LE(all.bytes(), static_cast<int64_t>(host_numbers_.bytes()));
  std::memcpy(host_numbers_.data(), own.data(), size);
  device_->Copy(*stream_, piece, host_numbers_.data(), size);
  Wait(Channel::kScalar, "schedule", [&] {
    rank_->scalar->AllGather(*stream_, "schedule", DType::kU8,
                             {{piece, all.data(), all.num_elems()}});
  });
  const std::string hashes(
      static_cast<const char*>(ReadNumbers(all.data(), all.bytes())),
      all.bytes());
  ZERO_RETURN_IF_ERROR(rank_->status());
  const auto rank_text = [&](int64_t rank) {
    return absl::StrCat("rank ", rank, " (schedule ",
                        hashes.substr(rank * size, size), ")");
  };
  std::vector<std::string> others;
  for (int64_t rank = 1; rank < plan_.world; ++rank) {
    if (hashes.compare(rank * size, size, hashes, 0, size) != 0) {
      others.push_back(rank_text(rank));
    }
  }
  if (others.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      absl::StrJoin(others, " and "), " planned another step than ",
      rank_text(0), "; give all ranks the same config"));
}

absl::Status Executor::AllReduce(const std::string& name, ReduceOp op,
                                 absl::Span<double> values) {
  StartAllReduce(name, op, values);
  return FinishAllReduce(values);
}

void Executor::StartAllReduce(const std::string& name, ReduceOp op,
                              absl::Span<const double> values) {
  if (plan_.world == 1 || device_->kind() == DeviceKind::kMeta) return;
  const int64_t size = static_cast<int64_t>(values.size());
  ZERO_CHECK_GE(agreed_.num_elems(), size);
  const Tensor numbers = agreed_.Slice(0, {size});
  // One that was not finished may still be to read and to write them.
  if (!agreed_read_->IsDone()) agreed_read_->Synchronize();
  std::memcpy(host_agreed_.data(), values.data(), numbers.bytes());
  device_->Copy(*stream_, numbers.data(), host_agreed_.data(), numbers.bytes());
  ReduceNumbers(name, op, numbers);
  device_->Copy(*stream_, host_agreed_.data(), numbers.data(), numbers.bytes());
  stream_->Record(*agreed_read_);
}

absl::Status Executor::FinishAllReduce(absl::Span<double> values) {
  if (plan_.world == 1 || device_->kind() == DeviceKind::kMeta) {
    return absl::OkStatus();
  }
  agreed_read_->Synchronize();
  ZERO_RETURN_IF_ERROR(rank_->status());
  std::memcpy(values.data(), host_agreed_.data(),
              values.size() * sizeof(double));
  return absl::OkStatus();
}

}  // namespace zero
