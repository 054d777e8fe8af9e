// Reads and writes blocks of a file, many at a time and in no order: by
// io_uring, or, if the system does not permit that, by threads that call pread
// and pwrite.
#ifndef ZERO_ENGINE_BASE_BLOCK_IO_H_
#define ZERO_ENGINE_BASE_BLOCK_IO_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace zero {

// O_DIRECT's alignment of offsets, sizes and memory: the largest block of
// common disks.
inline constexpr int64_t kBlockAlignment = 4096;

struct BlockRequest {
  int64_t offset = 0;  // in the file, a multiple of kBlockAlignment
  char* data = nullptr;
  int64_t bytes = 0;  // also a multiple
};

enum class DiskCall { kAllocate, kRead, kWrite };

// A failing disk, for tests: gets the result of a call (bytes, or a negative
// errno) and returns the result for the caller.
// Threads: any.
using DiskFault = std::function<int64_t(DiskCall call, int64_t offset,
                                        int64_t bytes, int64_t result)>;

struct BlockIoOptions {
  // Requests in flight at once: queue_depth for each of `threads`.
  int queue_depth = 8;
  // Without io_uring: threads that call pread and pwrite, one block each.
  int threads = 1;
  // Submits each request to the kernel separately, not in batches.
  bool single_submit = false;
  // Submits new requests as soon as one completes, not when all in flight have.
  bool overlap_events = true;
  DiskFault fault;
};

// Threads: one at a time.
class BlockIo {
 public:
  // Called for every completed request, one at a time; an error ends the
  // transfer.
  using DoneFn = std::function<absl::Status(size_t request)>;

  virtual ~BlockIo() = default;

  // Performs all requests. When it returns none is in flight.
  // Errors: the first one. FileError, DataLoss if the file ends too early,
  //         Unavailable if the system keeps answering that it is busy: each
  //         with path, offset and bytes.
  virtual absl::Status Run(DiskCall call,
                           absl::Span<const BlockRequest> requests,
                           const DoneFn& done) = 0;

  // Why this is slower than it could be; empty if it is not.
  virtual std::string note() const { return ""; }
};

// Opens io_uring for the open file `fd`, named `path`. Memory within
// `registered` is pinned once, if the system's limits allow it.
// Errors: Unavailable, with the reason why this system permits no io_uring.
absl::StatusOr<std::unique_ptr<BlockIo>> MakeUringIo(
    int fd, std::string path, const BlockIoOptions& options,
    absl::Span<const absl::Span<char>> registered);
std::unique_ptr<BlockIo> MakeThreadIo(int fd, std::string path,
                                      const BlockIoOptions& options);

// The rest of one request, after the results of its calls so far.
class BlockProgress {
 public:
  BlockProgress() = default;
  BlockProgress(DiskCall call, const BlockRequest& request)
      : call_(call), rest_(request) {}

  const BlockRequest& rest() const { return rest_; }
  bool done() const { return rest_.bytes == 0; }
  // Takes the result of a call for rest(): bytes, or a negative errno.
  absl::Status Add(int64_t result, const std::string& path);

 private:
  DiskCall call_ = DiskCall::kRead;
  BlockRequest rest_;
  int num_vain_ = 0;  // calls in a row that did nothing
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_BLOCK_IO_H_
