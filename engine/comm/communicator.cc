#include "engine/comm/communicator.h"

#include <utility>

#include "kernels/check.h"

namespace zero {
namespace {

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a);
  const auto b_begin = reinterpret_cast<uintptr_t>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

// The checks of one segment of a typed call.
struct SegmentCheck {
  const Collective& collective;
  const CollectiveSegment& segment;
  size_t index;
  int rank;
  int world;

  // `all_gather "block.3": segment 2`, the beginning of every message.
  std::string Where() const {
    return std::string(CollectiveKindName(collective.kind)) + " \"" +
           collective.name + "\": segment " + std::to_string(index);
  }

  int64_t Bytes(int64_t elems) const {
    return elems * static_cast<int64_t>(DTypeBytes(collective.dtype));
  }
  int64_t OwnOffset() const { return Bytes(segment.elems / world * rank); }

  void Memory() const {
    ZERO_CHECK_GE(segment.elems, 0) << Where();
    if (segment.elems == 0) return;
    ZERO_CHECK(segment.send != nullptr)
        << Where() << " of " << segment.elems << " elements sends from null";
    ZERO_CHECK(segment.recv != nullptr)
        << Where() << " of " << segment.elems << " elements receives at null";
  }

  void Divisible() const {
    ZERO_CHECK_EQ(segment.elems % world, 0)
        << Where() << " has " << segment.elems
        << " elements, want a multiple of world " << world
        << ": pad the segment";
  }

  // `recv` may be the own piece of `send`, element for element.
  void ScatteredInPlace() const {
    const int64_t piece = segment.elems / world;
    if (!Overlap(segment.send, Bytes(segment.elems), segment.recv,
                 Bytes(piece))) {
      return;
    }
    ZERO_CHECK(segment.recv ==
               static_cast<const char*>(segment.send) + OwnOffset())
        << Where() << ": recv overlaps send, want rank " << rank
        << "'s own piece of it or other memory";
    ZERO_CHECK(!collective.accumulate)
        << Where() << ": in place there is nothing to accumulate into";
  }

  // `send` may be the own piece of `recv`.
  void GatheredInPlace() const {
    if (!Overlap(segment.send, Bytes(segment.elems / world), segment.recv,
                 Bytes(segment.elems))) {
      return;
    }
    ZERO_CHECK(segment.send ==
               static_cast<const char*>(segment.recv) + OwnOffset())
        << Where() << ": send overlaps recv, want rank " << rank
        << "'s own piece of it or other memory";
  }

  // `recv` may be `send`, or has nothing of it.
  void TheSameOrApart() const {
    if (segment.recv == segment.send) return;
    ZERO_CHECK(!Overlap(segment.send, Bytes(segment.elems), segment.recv,
                        Bytes(segment.elems)))
        << Where() << ": send and recv overlap, want two memories";
  }
};

template <class Fn>
void CheckSegments(const Communicator& comm, const Collective& collective,
                   const Fn& fn) {
  for (size_t i = 0; i < collective.segments.size(); ++i) {
    const SegmentCheck check{collective, collective.segments[i], i, comm.rank(),
                             comm.world()};
    check.Memory();
    fn(check);
  }
}

void CheckSummable(const Collective& collective) {
  ZERO_CHECK(IsFloat(collective.dtype))
      << CollectiveKindName(collective.kind) << " \"" << collective.name
      << "\": " << collective.dtype << ", want fp32, bf16, fp16 or fp64";
}

}  // namespace

const char* CollectiveKindName(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kReduce:
      return "reduce";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "?";
}

int64_t WireBytes(const Collective& collective, int world) {
  int64_t bytes = 0;
  for (const CollectiveSegment& segment : collective.segments) {
    bytes += segment.elems * static_cast<int64_t>(DTypeBytes(collective.dtype));
  }
  switch (collective.kind) {
    case CollectiveKind::kReduceScatter:
      if (collective.algorithm == BulkAlgorithm::kRing && world > 2) {
        const auto item = static_cast<int64_t>(DTypeBytes(collective.dtype));
        const auto sum =
            static_cast<int64_t>(DTypeBytes(SumDType(collective.dtype)));
        return bytes / item / world * (item + (world - 2) * sum);
      }
      return bytes / world * (world - 1);
    case CollectiveKind::kAllGather:
      return bytes / world * (world - 1);
    case CollectiveKind::kReduce:
    case CollectiveKind::kBroadcast:
      return bytes * (world - 1);
    case CollectiveKind::kBarrier:
      return 0;
  }
  return 0;
}

int64_t SentBytes(const Collective& collective, int rank, int world) {
  const int64_t bytes = WireBytes(collective, world);
  const bool is_root = rank == collective.root;
  if (world == 1) return 0;
  switch (collective.kind) {
    case CollectiveKind::kReduce:
      return is_root ? 0 : bytes / (world - 1);
    case CollectiveKind::kBroadcast:
      return is_root ? bytes : 0;
    default:
      return bytes;
  }
}

int64_t ReceivedBytes(const Collective& collective, int rank, int world) {
  const int64_t bytes = WireBytes(collective, world);
  const bool is_root = rank == collective.root;
  if (world == 1) return 0;
  switch (collective.kind) {
    case CollectiveKind::kReduce:
      return is_root ? bytes : 0;
    case CollectiveKind::kBroadcast:
      return is_root ? 0 : bytes / (world - 1);
    default:
      return bytes;
  }
}

int64_t Communicator::StagingBytes(DType dtype, int64_t elems) const {
  if (algorithm_ == BulkAlgorithm::kNative) {
    const auto item = static_cast<int64_t>(DTypeBytes(dtype));
    return SumDType(dtype) == dtype ? elems / world_ * item : elems * item;
  }
  if (algorithm_ == BulkAlgorithm::kDirect || world_ < 3) return 0;
  return 2 * (elems / world_) *
         static_cast<int64_t>(DTypeBytes(SumDType(dtype)));
}

void Communicator::AllGather(Stream& stream, std::string name, DType dtype,
                             std::vector<CollectiveSegment> segments) {
  Collective collective;
  collective.kind = CollectiveKind::kAllGather;
  collective.name = std::move(name);
  collective.dtype = dtype;
  collective.segments = std::move(segments);
  collective.algorithm = algorithm_;
  CheckSegments(*this, collective, [](const SegmentCheck& check) {
    check.Divisible();
    check.GatheredInPlace();
  });
  Run(stream, std::move(collective));
}

void Communicator::ReduceScatter(Stream& stream, std::string name, DType dtype,
                                 bool accumulate,
                                 std::vector<CollectiveSegment> segments,
                                 Workspace staging) {
  Collective collective;
  collective.kind = CollectiveKind::kReduceScatter;
  collective.name = std::move(name);
  collective.dtype = dtype;
  collective.accumulate = accumulate;
  collective.segments = std::move(segments);
  collective.algorithm = algorithm_;
  collective.staging = staging.data;
  CheckSummable(collective);
  CheckSegments(*this, collective, [](const SegmentCheck& check) {
    check.Divisible();
    check.ScatteredInPlace();
  });
  int64_t elems = 0;
  for (const CollectiveSegment& segment : collective.segments) {
    elems += segment.elems;
  }
  collective.staging_bytes = StagingBytes(dtype, elems);
  ZERO_CHECK_GE(static_cast<int64_t>(staging.bytes), collective.staging_bytes)
      << "reduce_scatter \"" << collective.name
      << (algorithm_ == BulkAlgorithm::kRing ? "\": staging memory of a ring"
                                             : "\": staging memory");
  Run(stream, std::move(collective));
}

Collective Communicator::Rooted(CollectiveKind kind, std::string name,
                                DType dtype, int root,
                                std::vector<CollectiveSegment> segments) const {
  ZERO_CHECK(root >= 0 && root < world())
      << CollectiveKindName(kind) << " \"" << name << "\": root " << root
      << " is not in [0, " << world() << ")";
  Collective collective;
  collective.kind = kind;
  collective.name = std::move(name);
  collective.dtype = dtype;
  collective.root = root;
  collective.segments = std::move(segments);
  CheckSegments(*this, collective,
                [](const SegmentCheck& check) { check.TheSameOrApart(); });
  return collective;
}

void Communicator::Reduce(Stream& stream, std::string name, DType dtype,
                          int root, std::vector<CollectiveSegment> segments) {
  Collective collective = Rooted(CollectiveKind::kReduce, std::move(name),
                                 dtype, root, std::move(segments));
  CheckSummable(collective);
  Run(stream, std::move(collective));
}

void Communicator::Broadcast(Stream& stream, std::string name, DType dtype,
                             int root,
                             std::vector<CollectiveSegment> segments) {
  Run(stream, Rooted(CollectiveKind::kBroadcast, std::move(name), dtype, root,
                     std::move(segments)));
}

void Communicator::Barrier(Stream& stream, std::string name) {
  Collective collective;
  collective.kind = CollectiveKind::kBarrier;
  collective.name = std::move(name);
  Run(stream, std::move(collective));
}

}  // namespace zero
