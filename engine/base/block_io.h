// Blocks of a file, many at a time, in no order: through io_uring, or where the
// system permits none by threads with pread and pwrite.
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

// What O_DIRECT wants offsets, sizes and memory to be multiples of: the largest
// block of common disks.
inline constexpr int64_t kBlockAlignment = 4096;

struct BlockRequest {
  int64_t offset = 0;  // in the file, a multiple of kBlockAlignment
  char* data = nullptr;
  int64_t bytes = 0;  // likewise a multiple
};

enum class DiskCall { kAllocate, kRead, kWrite };

// A disk that fails, for tests: gets the result of a call (bytes, or below 0 an
// errno) and returns what the caller is to see instead.
// Threads: any.
using DiskFault = std::function<int64_t(DiskCall call, int64_t offset,
                                        int64_t bytes, int64_t result)>;

struct BlockIoOptions {
  // In flight at once: queue_depth for each of `threads`.
  int queue_depth = 8;
  // Without io_uring: that call pread and pwrite, a block each.
  int threads = 1;
  // Gives each request to the kernel at once, not as many as there are.
  bool single_submit = false;
  // New requests follow as soon as one is done, not when all in flight are.
  bool overlap_events = true;
  DiskFault fault;
};

// Threads: one at a time.
class BlockIo {
 public:
  // Called for every request that is done, one at a time; an error ends the
  // transfer.
  using DoneFn = std::function<absl::Status(size_t request)>;

  virtual ~BlockIo() = default;

  // Performs all requests. When it returns none is in flight.
  // Errors: the first one. FileError, DataLoss where the file ends before,
  //         Unavailable where the system answers again and again that it has
  //         no time: each with path, offset and bytes.
  virtual absl::Status Run(DiskCall call,
                           absl::Span<const BlockRequest> requests,
                           const DoneFn& done) = 0;

  // Why it is slower than it could be; empty: it is not.
  virtual std::string note() const { return ""; }
};

// Of the open file `fd`, whose name is `path`. Memory within `registered` is
// pinned once, where the limits of the system allow it.
// Errors: Unavailable, why this system permits no io_uring.
absl::StatusOr<std::unique_ptr<BlockIo>> MakeUringIo(
    int fd, std::string path, const BlockIoOptions& options,
    absl::Span<const absl::Span<char>> registered);
std::unique_ptr<BlockIo> MakeThreadIo(int fd, std::string path,
                                      const BlockIoOptions& options);

// What is left of a request, and what its calls say.
class BlockProgress {
 public:
  BlockProgress() = default;
  BlockProgress(DiskCall call, const BlockRequest& request)
      : call_(call), rest_(request) {}

  const BlockRequest& rest() const { return rest_; }
  bool done() const { return rest_.bytes == 0; }
  // Takes the result of a call for rest(): bytes, or below 0 an errno.
  absl::Status Add(int64_t result, const std::string& path);

 private:
  DiskCall call_ = DiskCall::kRead;
  BlockRequest rest_;
  int num_vain_ = 0;  // calls in a row that did nothing
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_BLOCK_IO_H_
