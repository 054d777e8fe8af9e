#include "engine/comm/exchange.h"

#include <vector>

#include "kernels/ops.h"

namespace zero {
namespace {

using Collectives = absl::Span<const Collective* const>;

void AllGather(Stream& stream, int rank, Collectives all) {
  const Collective& own = *all[rank];
  const int world = static_cast<int>(all.size());
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const size_t bytes = own.segments[i].elems / world * DTypeBytes(own.dtype);
    if (bytes == 0) continue;
    // Every rank begins at another one's memory.
    for (int step = 0; step < world; ++step) {
      const int from = (rank + step) % world;
      const char* const src = Sent(*all[from], i, 0);
      char* const dst = static_cast<char*>(own.segments[i].recv) + from * bytes;
      if (dst != src) CopyOn(stream, dst, src, bytes);
    }
  }
}

void ReduceScatter(Stream& stream, int rank, Collectives all) {
  const Collective& own = *all[rank];
  const int64_t world = static_cast<int64_t>(all.size());
  std::vector<const void*> src(all.size());
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const int64_t piece = own.segments[i].elems / world;
    if (piece == 0) continue;
    for (size_t r = 0; r < all.size(); ++r) {
      src[r] = Sent(*all[r], i, rank * piece);
    }
    const Vector dst{own.segments[i].recv, own.dtype, piece};
    if (world == 1 && src[0] == dst.data) continue;
    stream.device().ops().SumRanks(stream,
                                   {src, own.dtype, dst, own.accumulate});
  }
}

void Reduce(Stream& stream, int rank, Collectives all) {
  const Collective& own = *all[rank];
  if (rank != own.root) return;
  std::vector<const void*> src(all.size());
  for (size_t i = 0; i < own.segments.size(); ++i) {
    if (own.segments[i].elems == 0) continue;
    for (size_t r = 0; r < all.size(); ++r) src[r] = Sent(*all[r], i, 0);
    stream.device().ops().SumRanks(
        stream, {src,
                 own.dtype,
                 {own.segments[i].recv, own.dtype, own.segments[i].elems}});
  }
}

void Broadcast(Stream& stream, int rank, Collectives all) {
  const Collective& own = *all[rank];
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const char* const src = Sent(*all[own.root], i, 0);
    if (own.segments[i].elems == 0 || src == own.segments[i].recv) continue;
    CopyOn(stream, own.segments[i].recv, src,
           own.segments[i].elems * DTypeBytes(own.dtype));
  }
}

// Of the greater ones; a NaN stays, whichever rank has it.
void Max(Collectives all, double* out) {
  const auto sent = [](const Collective& one) {
    return static_cast<const double*>(one.segments[0].send);
  };
  for (int64_t i = 0; i < all[0]->segments[0].elems; ++i) {
    out[i] = sent(*all[0])[i];
    for (const Collective* one : all.subspan(1)) {
      const double other = sent(*one)[i];
      if (other > out[i] || other != other) out[i] = other;
    }
  }
}

void SumNumbers(Stream& stream, Collectives all, void* out) {
  const DType dtype = all[0]->dtype;
  std::vector<const void*> src;
  for (const Collective* one : all) src.push_back(Sent(*one, 0, 0));
  const int64_t elems = all[0]->segments[0].elems;
  stream.device().ops().SumRanks(stream, {src, dtype, {out, dtype, elems}});
}

// The few numbers of a device, by way of the host.
void MaxOfDevice(Stream& stream, Collectives all, void* out) {
  const size_t bytes = ResultBytes(*all[0]);
  std::vector<char> numbers((all.size() + 1) * bytes);
  std::vector<Collective> on_host;
  std::vector<const Collective*> pointers;
  on_host.reserve(all.size());
  for (const Collective* one : all) {
    char* const copy = numbers.data() + on_host.size() * bytes;
    stream.device().Copy(stream, copy, Sent(*one, 0, 0), bytes);
    on_host.push_back({.kind = one->kind});
    on_host.back().segments = {{copy, nullptr, one->segments[0].elems}};
    pointers.push_back(&on_host.back());
  }
  stream.Synchronize();
  char* const most = numbers.data() + all.size() * bytes;
  Max(pointers, reinterpret_cast<double*>(most));
  stream.device().Copy(stream, out, most, bytes);
  stream.Synchronize();
}

void AllReduce(Stream& stream, Collectives all, void* result) {
  if (all[0]->op == ReduceOp::kSum) {
    SumNumbers(stream, all, result);
  } else if (stream.device().asynchronous()) {
    MaxOfDevice(stream, all, result);
  } else {
    Max(all, static_cast<double*>(result));
  }
}

}  // namespace

int64_t ResultBytes(const Collective& collective) {
  if (collective.kind != CollectiveKind::kAllReduce) return 0;
  return collective.segments[0].elems *
         static_cast<int64_t>(DTypeBytes(collective.dtype));
}

void Exchange(Stream& stream, int rank, Collectives all, const MeetFn& meet,
              void* result) {
  const bool ring =
      all[rank]->algorithm == BulkAlgorithm::kRing && all.size() > 1;
  switch (all[rank]->kind) {
    case CollectiveKind::kAllGather:
      ring ? RingAllGather(stream, rank, all, meet)
           : AllGather(stream, rank, all);
      break;
    case CollectiveKind::kReduceScatter:
      ring ? RingReduceScatter(stream, rank, all, meet)
           : ReduceScatter(stream, rank, all);
      break;
    case CollectiveKind::kAllReduce:
      AllReduce(stream, all, result);
      break;
    case CollectiveKind::kReduce:
      Reduce(stream, rank, all);
      break;
    case CollectiveKind::kBroadcast:
      Broadcast(stream, rank, all);
      break;
    case CollectiveKind::kBarrier:
      break;
  }
}

}  // namespace zero
