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
    const Vector dst{own.segments[i].recv, own.recv_dtype, piece};
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

void AllToAll(Stream& stream, int rank, Collectives all) {
  const Collective& own = *all[rank];
  const int world = static_cast<int>(all.size());
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const int64_t piece = own.segments[i].elems / world;
    const size_t bytes = piece * DTypeBytes(own.dtype);
    if (bytes == 0) continue;
    for (int step = 0; step < world; ++step) {
      const int from = (rank + step) % world;
      CopyOn(stream, static_cast<char*>(own.segments[i].recv) + from * bytes,
             Sent(*all[from], i, rank * piece), bytes);
    }
  }
}

// An all-reduce has one segment: its typed call takes no list.
// out[i] = fn(... fn(fn(rank 0's, rank 1's), rank 2's) ...).
template <class T, class Fn>
void Fold(Collectives all, void* out, const Fn& fn) {
  T* const result = static_cast<T*>(out);
  for (int64_t i = 0; i < all[0]->segments[0].elems; ++i) {
    result[i] = reinterpret_cast<const T*>(Sent(*all[0], 0, i))[0];
    for (const Collective* one : all.subspan(1)) {
      result[i] = static_cast<T>(
          fn(result[i], reinterpret_cast<const T*>(Sent(*one, 0, i))[0]));
    }
  }
}

// The greater one; a NaN stays, whichever rank has it.
template <class T>
T Greater(T a, T b) {
  return b > a || b != b ? b : a;
}

void Max(Collectives all, void* out) {
  switch (all[0]->dtype) {
    case DType::kF32:
      return Fold<float>(all, out, Greater<float>);
    case DType::kF64:
      return Fold<double>(all, out, Greater<double>);
    case DType::kBF16:
      return Fold<uint16_t>(all, out, [](uint16_t a, uint16_t b) {
        return F32ToBF16(Greater(BF16ToF32(a), BF16ToF32(b)));
      });
    case DType::kF16:
      return Fold<uint16_t>(all, out, [](uint16_t a, uint16_t b) {
        return F32ToF16(Greater(F16ToF32(a), F16ToF32(b)));
      });
    case DType::kI32:
      return Fold<int32_t>(all, out, Greater<int32_t>);
    case DType::kI64:
      return Fold<int64_t>(all, out, Greater<int64_t>);
    case DType::kU8:
      return Fold<uint8_t>(all, out, Greater<uint8_t>);
    case DType::kU16:
      return Fold<uint16_t>(all, out, Greater<uint16_t>);
  }
}

// Unsigned, so that an overflow wraps around.
template <class T>
void SumIntegers(Collectives all, void* out) {
  Fold<T>(all, out, [](T a, T b) { return a + b; });
}

void SumFloats(Stream& stream, Collectives all, void* out) {
  const DType dtype = all[0]->dtype;
  std::vector<const void*> src;
  for (const Collective* one : all) src.push_back(Sent(*one, 0, 0));
  const int64_t elems = all[0]->segments[0].elems;
  stream.device().ops().SumRanks(stream, {src, dtype, {out, dtype, elems}});
}

void SumIntegers(Collectives all, void* out) {
  switch (DTypeBytes(all[0]->dtype)) {
    case 1:
      return SumIntegers<uint8_t>(all, out);
    case 2:
      return SumIntegers<uint16_t>(all, out);
    case 4:
      return SumIntegers<uint32_t>(all, out);
    default:
      return SumIntegers<uint64_t>(all, out);
  }
}

void FoldOnHost(Collectives all, void* out) {
  all[0]->op == ReduceOp::kMax ? Max(all, out) : SumIntegers(all, out);
}

// The few numbers of a device, by way of the host.
void FoldFromDevice(Stream& stream, Collectives all, void* out) {
  const size_t bytes = ResultBytes(*all[0]);
  std::vector<char> numbers((all.size() + 1) * bytes);
  std::vector<Collective> on_host;
  std::vector<const Collective*> pointers;
  on_host.reserve(all.size());
  for (const Collective* one : all) {
    char* const copy = numbers.data() + on_host.size() * bytes;
    stream.device().Copy(stream, copy, Sent(*one, 0, 0), bytes);
    on_host.push_back({.kind = one->kind, .dtype = one->dtype, .op = one->op});
    on_host.back().segments = {{copy, nullptr, one->segments[0].elems}};
    pointers.push_back(&on_host.back());
  }
  stream.Synchronize();
  char* const folded = numbers.data() + all.size() * bytes;
  FoldOnHost(pointers, folded);
  stream.device().Copy(stream, out, folded, bytes);
  stream.Synchronize();
}

void AllReduce(Stream& stream, Collectives all, void* result) {
  if (all[0]->op == ReduceOp::kSum && IsFloat(all[0]->dtype)) {
    SumFloats(stream, all, result);
  } else if (stream.device().asynchronous()) {
    FoldFromDevice(stream, all, result);
  } else {
    FoldOnHost(all, result);
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
    case CollectiveKind::kAllToAll:
      AllToAll(stream, rank, all);
      break;
    case CollectiveKind::kBarrier:
      break;
  }
}

}  // namespace zero
