#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/uio.h>

#include <algorithm>
#include <deque>

#include "absl/strings/str_cat.h"
#include "engine/base/block_io.h"
#include "engine/base/status.h"

namespace zero {
namespace {

class UringIo final : public BlockIo {
 public:
  UringIo(int fd, std::string path, const BlockIoOptions& options, int depth,
          absl::Span<const absl::Span<char>> memory)
      : fd_(fd),
        path_(std::move(path)),
        options_(options),
        depth_(depth),
        memory_(memory.begin(), memory.end()) {}
  ~UringIo() override { io_uring_queue_exit(&ring_); }

  io_uring* ring() { return &ring_; }

  // Without it the kernel pins pages again for every request.
  void RegisterMemory() {
    std::vector<iovec> all;
    for (const auto& memory : memory_) {
      all.push_back({memory.data(), memory.size()});
    }
    if (all.empty()) return;
    const int error = io_uring_register_buffers(
        &ring_, all.data(), static_cast<unsigned>(all.size()));
    if (error == 0) return;
    memory_.clear();
    note_ = absl::StrCat(
        "the memory of states on a disk is not registered with io_uring (",
        ::strerror(-error),
        "), so that every request pins it anew; raise the limit of locked "
        "memory (ulimit -l)");
  }
  std::string note() const override { return note_; }

  absl::Status Run(DiskCall call, absl::Span<const BlockRequest> requests,
                   const DoneFn& done) override {
    if (!broken_.ok()) return broken_;
    call_ = call;
    progress_.clear();
    std::deque<size_t> waiting;
    for (size_t i = 0; i < requests.size(); ++i) {
      progress_.emplace_back(call, requests[i]);
      waiting.push_back(i);
    }
    absl::Status status;
    while (in_flight_ > 0 || (status.ok() && !waiting.empty())) {
      if (status.ok() && (options_.overlap_events || in_flight_ == 0)) {
        status = Submit(waiting);
        if (!broken_.ok()) return broken_;
      }
      size_t i = 0;
      int64_t result = 0;
      if (in_flight_ == 0) continue;
      if (!Reap(&i, &result)) return broken_;
      const BlockRequest& rest = progress_[i].rest();
      if (options_.fault) {
        result = options_.fault(call, rest.offset, rest.bytes, result);
      }
      status.Update(progress_[i].Add(result, path_));
      if (!status.ok()) continue;
      if (progress_[i].done()) {
        status.Update(done(i));
      } else {
        waiting.push_front(i);
      }
    }
    return status;
  }

 private:
  // Fills the ring.
  absl::Status Submit(std::deque<size_t>& waiting) {
    unsigned num_ready = 0;
    while (!waiting.empty() && in_flight_ + num_ready < depth_) {
      io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      Prepare(entry, progress_[waiting.front()].rest());
      io_uring_sqe_set_data64(entry, waiting.front());
      waiting.pop_front();
      ++num_ready;
      if (options_.single_submit) {
        ZERO_RETURN_IF_ERROR(Give(std::exchange(num_ready, 0)));
      }
    }
    return Give(num_ready);
  }

  void Prepare(io_uring_sqe* entry, const BlockRequest& rest) const {
    const auto bytes = static_cast<unsigned>(rest.bytes);
    const int buffer = BufferOf(rest);
    const bool reads = call_ == DiskCall::kRead;
    if (buffer >= 0 && reads) {
      io_uring_prep_read_fixed(entry, fd_, rest.data, bytes, rest.offset,
                               buffer);
    } else if (buffer >= 0) {
      io_uring_prep_write_fixed(entry, fd_, rest.data, bytes, rest.offset,
                                buffer);
    } else if (reads) {
      io_uring_prep_read(entry, fd_, rest.data, bytes, rest.offset);
    } else {
      io_uring_prep_write(entry, fd_, rest.data, bytes, rest.offset);
    }
  }

  int BufferOf(const BlockRequest& rest) const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (rest.data >= memory_[i].data() &&
          rest.data + rest.bytes <= memory_[i].data() + memory_[i].size()) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  // Gives `num_ready` prepared entries to the kernel.
  absl::Status Give(unsigned num_ready) {
    for (int vain = 0; num_ready > 0;) {
      const int n = io_uring_submit(&ring_);
      if (n > 0) {
        in_flight_ += static_cast<unsigned>(n);
        num_ready -= static_cast<unsigned>(n);
        continue;
      }
      const bool busy = n == 0 || n == -EINTR || n == -EAGAIN || n == -EBUSY;
      if (busy && ++vain < 1000) continue;
      // The kernel has none of these entries, but may still have others.
      size_t i;
      int64_t result;
      while (in_flight_ > 0 && Reap(&i, &result)) {
      }
      return broken_ = absl::UnavailableError(absl::StrCat(
                 "'", path_, "': io_uring takes no requests: ", ::strerror(-n),
                 "; see dmesg"));
    }
    return absl::OkStatus();
  }

  // Waits for a request. False if the ring is broken.
  bool Reap(size_t* i, int64_t* result) {
    io_uring_cqe* entry = nullptr;
    int error;
    do {
      error = io_uring_wait_cqe(&ring_, &entry);
    } while (error == -EINTR || error == -EAGAIN);
    if (error != 0) {
      broken_ = absl::UnavailableError(absl::StrCat(
          "'", path_, "': io_uring gives no results: ", ::strerror(-error),
          "; see dmesg"));
      return false;
    }
    *i = io_uring_cqe_get_data64(entry);
    *result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    --in_flight_;
    return true;
  }

  const int fd_;
  const std::string path_;
  const BlockIoOptions options_;
  const unsigned depth_;
  std::vector<absl::Span<char>> memory_;  // registered, in this order
  std::string note_;
  io_uring ring_ = {};
  DiskCall call_ = DiskCall::kRead;
  std::vector<BlockProgress> progress_;
  unsigned in_flight_ = 0;
  absl::Status broken_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockIo>> MakeUringIo(
    int fd, std::string path, const BlockIoOptions& options,
    absl::Span<const absl::Span<char>> registered) {
  constexpr int kMaxDepth = 4096;  // 32768 is the kernel's
  const int depth = static_cast<int>(std::min<int64_t>(
      int64_t{options.queue_depth} * options.threads, kMaxDepth));
  io_uring ring;
  const int error = io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("io_uring: ", ::strerror(-error)));
  }
  auto io = std::make_unique<UringIo>(fd, std::move(path), options, depth,
                                      registered);
  *io->ring() = ring;
  io->RegisterMemory();
  return io;
}

}  // namespace zero
