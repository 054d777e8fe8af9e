#include "engine/zero/wire.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/autograd/context.h"
#include "engine/base/status.h"

namespace zero {

void Wire::TakeStaging(Arena& arena) {
  // Buckets are reduced one after the other, each within the group first.
  int64_t bytes = 0;
  for (const Bucket& bucket : plan_->reduce_buckets) {
    for (const auto& [comm, transfers] :
         {std::pair(rank_->reduce.get(), &bucket.transfers),
          std::pair(rank_->across.get(), &bucket.across)}) {
      for (const Transfer& transfer : *transfers) {
        if (transfer.kind != Transfer::Kind::kSum) continue;
        bytes = std::max(
            bytes, comm->StagingBytes(transfer.codec.dtype, transfer.elems));
      }
    }
  }
  if (bytes == 0) return;
  staging_ =
      Tensor::Empty(arena, {bytes}, DType::kU8, MemoryCategory::kReduceBuffers);
}

absl::Status Wire::Register(const std::vector<Arena*>& arenas) {
  std::vector<std::pair<Arena*, std::shared_ptr<void>>> registered;
  bool all = true;
  for (Arena* arena : arenas) {
    for (Communicator* comm :
         {rank_->gather.get(), rank_->reduce.get(), rank_->across.get()}) {
      // A rank alone on a channel sends nothing.
      if (comm->world() == 1) continue;
      auto held = comm->Register(arena->data(), arena->capacity_bytes());
      all = all && held != nullptr;
      registered.emplace_back(arena, std::move(held));
    }
  }
  if (rank_->agree) {
    ZERO_ASSIGN_OR_RETURN(all, rank_->agree("memory is registered", all));
  }
  if (!all) return absl::OkStatus();
  for (auto& [arena, held] : registered) arena->Hold(std::move(held));
  return absl::OkStatus();
}

void Wire::Gather(const std::string& name, DType dtype,
                  std::vector<CollectiveSegment> segments) {
  Start(*rank_->gather, *gather_, name,
        {.partition = plan_->owners, .codec = {dtype}}, std::move(segments));
}

void Wire::Start(Communicator& comm, Stream& stream, const std::string& name,
                 const Transfer& transfer,
                 std::vector<CollectiveSegment> segments, const Tensor& staging,
                 bool accumulate) {
  const DType dtype = transfer.codec.dtype;
  const bool even = transfer.partition.even();
  if (transfer.kind == Transfer::Kind::kSum) {
    return even ? comm.ReduceScatter(stream, name, dtype, accumulate,
                                     std::move(segments), AsWorkspace(staging))
                : comm.Reduce(stream, name, dtype, /*root=*/0,
                              std::move(segments));
  }
  if (even) return comm.AllGather(stream, name, dtype, std::move(segments));
  for (CollectiveSegment& segment : segments) {
    if (comm.rank() != 0) segment.send = segment.recv;  // owns nothing
  }
  comm.Broadcast(stream, name, dtype, /*root=*/0, std::move(segments));
}

void Wire::GatherUnit(int unit, const FlatState& params,
                      const Tensor& gathered) {
  const PlannedUnit& planned = plan_->units[unit];
  std::vector<CollectiveSegment> segments;
  for (int s = 0; s < static_cast<int>(planned.segments.size()); ++s) {
    const Segment& segment = planned.segments[s];
    const Segment shard = plan_->Shard(segment, rank_->rank());
    // Data from the host is already in place.
    const Tensor own = plan_->FetchesParameters(unit)
                           ? gathered.Slice(shard.begin, {shard.elems})
                           : params.Shard({unit, s});
    segments.push_back({own.data(),
                        gathered.Slice(segment.begin, {segment.elems}).data(),
                        segment.elems});
  }
  for (const Transfer& transfer : planned.gather) {
    Start(*rank_->gather, *gather_, planned.name, transfer, segments);
  }
}

Lookup Wire::LookUp(int table, const FlatState& params, const BatchView& batch,
                    Arena& arena) {
  const PlannedUnit& planned = plan_->units[table];
  const Shape& shape = planned.parameters[0].spec.shape;
  // The plan's turns are of a training batch; this may be another.
  Transfer asked = planned.lookup[0], answer = planned.lookup[1];
  Communicator& comm = *rank_->gather;
  const DType dtype = answer.codec.dtype;
  const int64_t count = batch.num_tokens(), width = shape[1];
  const int64_t in_turn = std::min(planned.lookup_tokens, count);
  const int64_t most = comm.world() * in_turn;
  const auto empty = [&](const Shape& shape, DType dtype) {
    return Tensor::Empty(arena, shape, dtype,
                         MemoryCategory::kGatheredParameters);
  };
  Lookup lookup{.rows = empty({count, width}, dtype),
                .ids = empty({most}, DType::kI32),
                .stored = empty({most, width}, dtype)};
  if (const int64_t bytes = comm.StagingBytes(dtype, most * width); bytes > 0) {
    lookup.staging = empty({bytes}, DType::kU8);
  }
  Ops& ops = rank_->device->ops();
  // If a gather fails, missing tokens must still be valid ids.
  ops.Fill(*gather_, {lookup.ids.vector(), 0});
  for (int64_t begin = 0; begin < count; begin += in_turn) {
    const int64_t rows = std::min(in_turn, count - begin);
    asked.elems = comm.world() * rows;
    answer.elems = asked.elems * width;
    Start(comm, *gather_, planned.name, asked,
          {{batch.tokens + begin, lookup.ids.data(), asked.elems}});
    for (int part = table; part < table + planned.part.count; ++part) {
      const EmbeddingForwardArgs args{
          .ids = lookup.ids.As<int32_t>(),
          .table = {params.Local(part).data(), dtype, shape[0], width, width},
          .pieces = params.PiecesOf(part),
          .out = lookup.stored.Slice(0, {asked.elems, width}).matrix()};
      gather_->Enqueue([args, ops = &ops, stream = gather_] {
        ops->EmbeddingForward(*stream, args);
      });
    }
    const Tensor own = lookup.rows.Slice(begin * width, {rows, width});
    Start(comm, *gather_, planned.name, answer,
          {{lookup.stored.data(), own.data(), answer.elems}}, lookup.staging);
  }
  return lookup;
}

void Wire::GatherUpdated(int index, const FlatState& params) {
  const Bucket& bucket = plan_->gather_buckets[index];
  std::vector<CollectiveSegment> segments;
  for (const SegmentRef& ref : bucket.segments) {
    segments.push_back({params.Shard(ref).data(), params.Full(ref).data(),
                        plan_->segment(ref).elems});
  }
  for (const Transfer& transfer : bucket.transfers) {
    Start(*rank_->gather, *gather_, NameOf(bucket), transfer, segments);
  }
}

void Wire::Reduce(int index, const Tensor& gradients, const FlatState& grads,
                  Sums sums, Arena& arena) {
  const Bucket& bucket = plan_->reduce_buckets[index];
  const bool adds = sums == Sums::kAdded;
  std::vector<Part> parts;
  for (const SegmentRef& ref : bucket.segments) {
    const Segment& segment = plan_->segment(ref);
    if (!plan_->shards_gradients()) {
      parts.push_back({grads.Full(ref), grads.Shard(ref)});
      continue;
    }
    const int64_t phase = plan_->units[ref.unit].phases[bucket.phase].begin;
    const Segment shard = plan_->Shard(segment, rank_->rank());
    // No rank reads this rank's addends in front of the bucket any more.
    const int64_t packed_end = plan_->StateElems(
        segment.end() - phase, Placement::kSharded, rank_->rank());
    const bool in_front =
        sums == Sums::kPacked &&
        packed_end <= plan_->segment(bucket.segments[0]).begin - phase;
    parts.push_back(
        {gradients.Slice(segment.begin - phase, {segment.elems}),
         adds || sums == Sums::kKept || in_front
             ? grads.Shard(ref)
             : gradients.Slice(shard.begin - phase, {shard.elems})});
  }
  ReduceParts(*rank_->reduce, NameOf(bucket), bucket.transfers, parts, adds,
              arena);
  if (sums != Sums::kPacked) return;
  for (size_t i = 0; i < parts.size(); ++i) {
    MoveToFront(parts[i].own, grads.Shard(bucket.segments[i]));
  }
}

void Wire::MoveToFront(const Tensor& from, const Tensor& to) {
  const char* const src = static_cast<const char*>(from.data());
  char* const dst = static_cast<char*>(to.data());
  // No copy overlaps. One suffices unless segments differ in size.
  const int64_t distance = src - dst, bytes = to.bytes();
  for (int64_t at = 0; distance > 0 && at < bytes; at += distance) {
    rank_->device->Copy(*reduce_, dst + at, src + at,
                        std::min(distance, bytes - at));
  }
}

void Wire::ReduceAcross(int index, const FlatState& grads, Arena& arena) {
  const Bucket& bucket = plan_->reduce_buckets[index];
  std::vector<Part> parts;
  for (const SegmentRef& ref : bucket.segments) {
    const Tensor shard = grads.Shard(ref);
    const int64_t elems = shard.num_elems() / plan_->replicate.size;
    parts.push_back(
        {shard, shard.Slice(rank_->across->rank() * elems, {elems})});
  }
  ReduceParts(*rank_->across, absl::StrCat(NameOf(bucket), " across groups"),
              bucket.across, parts, /*accumulate=*/false, arena);
}

void Wire::GatherRows(int index, const TableRows& own, const TableRows& all) {
  const Bucket& bucket = plan_->reduce_buckets[index];
  const int64_t group = plan_->replicate.PlaceOf(rank_->rank());
  const auto start = [&](const Transfer& transfer, const Tensor& send,
                         const Tensor& recv) {
    const Tensor part = recv.Slice(group * transfer.elems, {transfer.elems});
    Start(*rank_->reduce, *reduce_, NameOf(bucket), transfer,
          {{send.data(), part.data(), transfer.elems}});
  };
  start(bucket.transfers[0], own.ids, all.ids);
  start(bucket.transfers[1], own.rows, all.rows);
}

void Wire::GatherRowsAcross(int index, const TableRows& all) {
  const Bucket& bucket = plan_->reduce_buckets[index];
  const std::string name = absl::StrCat(NameOf(bucket), " across groups");
  const auto start = [&](const Transfer& transfer, const Tensor& recv) {
    const int64_t elems = transfer.elems / plan_->replicate.size;
    const Tensor part = recv.Slice(rank_->across->rank() * elems, {elems});
    Start(*rank_->across, *reduce_, name, transfer,
          {{part.data(), recv.data(), transfer.elems}});
  };
  start(bucket.across[0], all.ids);
  start(bucket.across[1], all.rows);
}

void Wire::ReduceParts(Communicator& comm, const std::string& name,
                       const std::vector<Transfer>& transfers,
                       const std::vector<Part>& parts, bool accumulate,
                       Arena& arena) {
  const DType sent_dtype = transfers.front().codec.dtype;
  const bool converts = sent_dtype != grad_dtype_;
  const bool all = transfers.size() > 1;
  if (converts && !sent_gradients_.defined()) {
    int64_t elems = 0;
    for (const Bucket& bucket : plan_->reduce_buckets) {
      if (!bucket.is_rows()) elems = std::max(elems, bucket.elems);
    }
    sent_gradients_ = Tensor::Empty(arena, {elems}, sent_dtype,
                                    MemoryCategory::kReduceBuffers);
  }
  std::vector<CollectiveSegment> sums, totals;
  std::vector<Conversion> before, after;
  int64_t sent_elems = 0;
  for (auto [full, own] : parts) {
    if (converts) {
      const Tensor sent = sent_gradients_.Slice(sent_elems, full.shape());
      const Tensor sent_own =
          sent.Slice(comm.rank() * own.num_elems(), own.shape());
      sent_elems += full.num_elems();
      before.push_back({full.vector(), sent.vector()});
      const Tensor& result = all ? sent : sent_own;
      if (result.num_elems() > 0) {
        after.push_back(
            {result.vector(), (all ? full : own).vector(), accumulate});
      }
      full = sent;
      own = sent_own;
    }
    sums.push_back({full.data(), own.data(), full.num_elems()});
    totals.push_back({own.data(), full.data(), full.num_elems()});
  }
  if (converts) Convert(std::move(before));
  Start(comm, *reduce_, name, transfers[0], std::move(sums), staging_,
        accumulate && !converts);
  if (all) Start(comm, *reduce_, name, transfers[1], std::move(totals));
  if (converts) Convert(std::move(after));
}

// Converts on the reduce stream, concurrently with compute: one thread on the
// CPU.
void Wire::Convert(std::vector<Conversion> conversions) {
  reduce_->Enqueue([ops = &rank_->device->ops(), stream = reduce_,
                    conversions = std::move(conversions)] {
    for (const Conversion& one : conversions) {
      ops->SumRanks(*stream, {.src = {&one.src.data, 1},
                              .src_dtype = one.src.dtype,
                              .dst = one.dst,
                              .accumulate = one.accumulate});
    }
  });
}

}  // namespace zero
