#include "engine/comm/peer_memory.h"

#include <cstring>
#include <vector>

namespace zero {

PeerMemory::Source PeerMemory::Sent(int rank, size_t segment,
                                    int64_t index) const {
  const auto item = static_cast<int64_t>(DTypeBytes(of(rank).dtype));
  return {rank, static_cast<const char*>(of(rank).segments[segment].send) +
                    index * item};
}

void PeerMemory::Copy(void* dst, Source src, int64_t bytes) {
  if (bytes == 0 || dst == src.data) return;
  if (stream_.device().asynchronous()) {
    stream_.device().Copy(stream_, dst, src.data, bytes);
  } else {
    std::memcpy(dst, src.data, bytes);
  }
  Count(src, bytes);
}

void PeerMemory::Sum(absl::Span<const Source> src, DType dtype,
                     const Vector& dst, bool accumulate) {
  if (dst.size == 0) return;
  std::vector<const void*> parts;
  for (const Source& one : src) {
    parts.push_back(one.data);
    Count(one, dst.size * static_cast<int64_t>(DTypeBytes(dtype)));
  }
  stream_.device().ops().SumRanks(stream_, {parts, dtype, dst, accumulate});
}

}  // namespace zero
