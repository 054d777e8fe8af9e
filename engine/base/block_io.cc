#include "engine/base/block_io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"

namespace zero {
namespace {

// The most calls in a row that a signal or a busy system may interrupt.
constexpr int kMaxVain = 1000;

class ThreadIo final : public BlockIo {
 public:
  ThreadIo(int fd, std::string path, const BlockIoOptions& options)
      : fd_(fd), path_(std::move(path)), options_(options) {}

  absl::Status Run(DiskCall call, absl::Span<const BlockRequest> requests,
                   const DoneFn& done) override {
    std::atomic<size_t> next = 0;
    std::mutex mutex;
    absl::Status status;
    const auto work = [&] {
      for (size_t i = next++; i < requests.size(); i = next++) {
        absl::Status own = Perform(call, requests[i]);
        const std::lock_guard<std::mutex> lock(mutex);
        if (own.ok()) own = done(i);
        if (own.ok()) continue;
        status.Update(own);
        next = requests.size();
      }
    };
    const size_t num_threads =
        std::min(requests.size(), static_cast<size_t>(options_.threads));
    std::vector<std::thread> helpers;
    // The system may refuse a thread; the others do its work.
    CatchExceptions([&] {
      while (helpers.size() + 1 < num_threads) helpers.emplace_back(work);
      return absl::OkStatus();
    }).IgnoreError();
    work();
    for (std::thread& helper : helpers) helper.join();
    return status;
  }

 private:
  absl::Status Perform(DiskCall call, const BlockRequest& request) {
    BlockProgress progress(call, request);
    while (!progress.done()) {
      const auto& [offset, data, bytes] = progress.rest();
      const size_t n = static_cast<size_t>(bytes);
      int64_t result = call == DiskCall::kRead ? ::pread(fd_, data, n, offset)
                                               : ::pwrite(fd_, data, n, offset);
      if (result < 0) result = -errno;
      if (options_.fault) result = options_.fault(call, offset, bytes, result);
      ZERO_RETURN_IF_ERROR(progress.Add(result, path_));
    }
    return absl::OkStatus();
  }

  const int fd_;
  const std::string path_;
  const BlockIoOptions options_;
};

}  // namespace

std::unique_ptr<BlockIo> MakeThreadIo(int fd, std::string path,
                                      const BlockIoOptions& options) {
  return std::make_unique<ThreadIo>(fd, std::move(path), options);
}

absl::Status BlockProgress::Add(int64_t result, const std::string& path) {
  const bool reads = call_ == DiskCall::kRead;
  const std::string action =
      absl::StrCat(reads ? "cannot read " : "cannot write ", rest_.bytes,
                   " bytes at offset ", rest_.offset, reads ? " of" : " to");
  const bool busy = result == -EINTR || result == -EAGAIN || result == -EBUSY;
  if (result < 0 && !busy) {
    return FileError(action, path, static_cast<int>(-result));
  }
  if (result == 0 && reads) {
    return absl::DataLossError(
        absl::StrCat(action, " '", path,
                     "': the file ends before that; another program truncated "
                     "it, start the run again"));
  }
  // A direct call resumes only at a whole block.
  const int64_t n =
      std::max<int64_t>(result, 0) / kBlockAlignment * kBlockAlignment;
  rest_.offset += n;
  rest_.data += n;
  rest_.bytes -= n;
  num_vain_ = n > 0 ? 0 : num_vain_ + 1;
  if (num_vain_ < kMaxVain) {
    if (result == -EAGAIN || result == -EBUSY) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return absl::OkStatus();
  }
  const std::string why =
      busy ? absl::StrCat(": ", ::strerror(static_cast<int>(-result)))
           : absl::StrCat(": only ", result, " bytes at a time");
  return absl::UnavailableError(absl::StrCat(
      action, " '", path, "'", why, ", ", kMaxVain,
      " times in a row; find out what keeps the disk busy (iostat, dmesg)"));
}

}  // namespace zero
