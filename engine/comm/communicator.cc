#include "engine/comm/communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace zero {
namespace {

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a);
  const auto b_begin = reinterpret_cast<uintptr_t>(b);
  return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

bool HasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::kReduce || kind == CollectiveKind::kBroadcast;
}

// The bytes at one end of `rank`; `at_root` is the kind whose root carries all
// the others' bytes there.
int64_t BytesOf(const Collective& collective, int rank, int world,
                CollectiveKind at_root) {
  const int64_t bytes = WireBytes(collective, world);
  if (!HasRoot(collective.kind) || world == 1) return bytes;
  const bool is_root = rank == collective.root;
  if (collective.kind == at_root) return is_root ? bytes : 0;
  return is_root ? 0 : bytes / (world - 1);
}

// "[8 x2, 4]".
std::string Sizes(const std::vector<CollectiveSegment>& segments) {
  std::string sizes;
  for (size_t i = 0; i < segments.size();) {
    size_t end = i + 1;
    while (end < segments.size() && segments[end].elems == segments[i].elems) {
      ++end;
    }
    absl::StrAppend(&sizes, i == 0 ? "" : ", ", segments[i].elems);
    if (end - i > 1) absl::StrAppend(&sizes, " x", end - i);
    i = end;
  }
  return absl::StrCat("[", sizes, "]");
}

// Stops the program if a caller of `rank` made a mistake.
void CheckSegment(const Collective& collective, size_t index, int rank,
                  int world) {
  const CollectiveSegment& segment = collective.segments[index];
  const auto [send, recv, elems] = segment;
  // `all_gather "block.3": segment 2`, the beginning of every message.
  const std::string where =
      absl::StrCat(CollectiveKindName(collective.kind), " \"", collective.name,
                   "\": segment ", index);
  ZERO_CHECK_GE(elems, 0) << where;
  if (elems == 0) return;
  ZERO_CHECK(send != nullptr)
      << where << " of " << elems << " elements sends from null";
  ZERO_CHECK(recv != nullptr)
      << where << " of " << elems << " elements receives at null";
  const int64_t bytes =
      elems * static_cast<int64_t>(DTypeBytes(collective.dtype));
  if (HasRoot(collective.kind)) {
    ZERO_CHECK(send == recv || !Overlap(send, bytes, recv, bytes))
        << where << ": send and recv overlap, want two buffers";
    return;
  }
  ZERO_CHECK_EQ(elems % world, 0)
      << where << " has " << elems << " elements, want a multiple of world "
      << world << ": pad the segment";
  // One buffer may be the rank's own piece of the other.
  const bool gathers = collective.kind == CollectiveKind::kAllGather;
  const void* const full = gathers ? recv : send;
  const void* const piece = gathers ? send : recv;
  if (!Overlap(full, bytes, piece, bytes / world)) return;
  ZERO_CHECK(piece == static_cast<const char*>(full) + bytes / world * rank)
      << where << (gathers ? ": send overlaps recv" : ": recv overlaps send")
      << ", want rank " << rank << "'s own piece of it or other memory";
  ZERO_CHECK(!collective.accumulate)
      << where << ": in place there is nothing to accumulate into";
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
  return BytesOf(collective, rank, world, CollectiveKind::kBroadcast);
}

int64_t ReceivedBytes(const Collective& collective, int rank, int world) {
  return BytesOf(collective, rank, world, CollectiveKind::kReduce);
}

std::string Signature(const Collective& collective) {
  std::string text = absl::StrCat(CollectiveKindName(collective.kind), " \"",
                                  collective.name, "\"");
  if (collective.kind == CollectiveKind::kBarrier) return text;
  absl::StrAppend(&text, " ", DTypeName(collective.dtype));
  if (collective.accumulate) absl::StrAppend(&text, " +=");
  if (HasRoot(collective.kind)) {
    const bool sends = collective.kind == CollectiveKind::kBroadcast;
    absl::StrAppend(&text, sends ? " from" : " to", " rank ", collective.root);
  }
  if (collective.algorithm == BulkAlgorithm::kRing) {
    absl::StrAppend(&text, " by ring");
  } else if (collective.algorithm == BulkAlgorithm::kHierarchical) {
    absl::StrAppend(&text, " by hosts");
  }
  return absl::StrCat(text, " ", Sizes(collective.segments));
}

CollectiveCount& CollectiveCount::operator+=(const CollectiveCount& other) {
  calls += other.calls;
  bytes += other.bytes;
  received += other.received;
  return *this;
}

int64_t Communicator::StagingBytes(DType dtype, int64_t elems) const {
  if (algorithm_ == BulkAlgorithm::kNative) {
    const auto item = static_cast<int64_t>(DTypeBytes(dtype));
    return SumDType(dtype) == dtype ? elems / world_ * item : elems * item;
  }
  if (algorithm_ != BulkAlgorithm::kRing || world_ < 3) return 0;
  return 2 * (elems / world_) *
         static_cast<int64_t>(DTypeBytes(SumDType(dtype)));
}

void Communicator::AllGather(Stream& stream, std::string name, DType dtype,
                             std::vector<CollectiveSegment> segments) {
  Issue(stream, {.kind = CollectiveKind::kAllGather,
                 .name = std::move(name),
                 .dtype = dtype,
                 .segments = std::move(segments),
                 .algorithm = algorithm_});
}

void Communicator::ReduceScatter(Stream& stream, std::string name, DType dtype,
                                 bool accumulate,
                                 std::vector<CollectiveSegment> segments,
                                 Workspace staging) {
  int64_t elems = 0;
  for (const CollectiveSegment& segment : segments) elems += segment.elems;
  const int64_t staging_bytes = StagingBytes(dtype, elems);
  ZERO_CHECK_GE(static_cast<int64_t>(staging.bytes), staging_bytes)
      << "reduce_scatter \"" << name
      << (algorithm_ == BulkAlgorithm::kRing ? "\": staging memory of a ring"
                                             : "\": staging memory");
  Issue(stream, {.kind = CollectiveKind::kReduceScatter,
                 .name = std::move(name),
                 .dtype = dtype,
                 .accumulate = accumulate,
                 .segments = std::move(segments),
                 .algorithm = algorithm_,
                 .staging = staging.data,
                 .staging_bytes = staging_bytes});
}

void Communicator::Reduce(Stream& stream, std::string name, DType dtype,
                          int root, std::vector<CollectiveSegment> segments) {
  Issue(stream, {.kind = CollectiveKind::kReduce,
                 .name = std::move(name),
                 .dtype = dtype,
                 .root = root,
                 .segments = std::move(segments)});
}

void Communicator::Broadcast(Stream& stream, std::string name, DType dtype,
                             int root,
                             std::vector<CollectiveSegment> segments) {
  Issue(stream, {.kind = CollectiveKind::kBroadcast,
                 .name = std::move(name),
                 .dtype = dtype,
                 .root = root,
                 .segments = std::move(segments)});
}

void Communicator::Barrier(Stream& stream, std::string name) {
  Issue(stream, {.kind = CollectiveKind::kBarrier, .name = std::move(name)});
}

void Communicator::Issue(Stream& stream, Collective collective) {
  const bool sums = collective.kind == CollectiveKind::kReduceScatter ||
                    collective.kind == CollectiveKind::kReduce;
  ZERO_CHECK(!sums || IsFloat(collective.dtype))
      << CollectiveKindName(collective.kind) << " \"" << collective.name
      << "\": " << collective.dtype << ", want fp32, bf16, fp16 or fp64";
  ZERO_CHECK(collective.root >= 0 && collective.root < world_)
      << CollectiveKindName(collective.kind) << " \"" << collective.name
      << "\": root " << collective.root << " is not in [0, " << world_ << ")";
  for (size_t i = 0; i < collective.segments.size(); ++i) {
    CheckSegment(collective, i, rank_, world_);
  }
  total_ += {.calls = 1,
             .bytes = SentBytes(collective, rank_, world_),
             .received = ReceivedBytes(collective, rank_, world_)};
  Run(stream, std::move(collective));
}

}  // namespace zero
