#include "engine/tensor/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {

ArenaBlock::~ArenaBlock() { arena_->Free(*this); }

void* ArenaBlock::data() const {
  return static_cast<char*>(arena_->buffer_.data()) + offset_;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Make(Device& device,
                                                   MemoryKind kind,
                                                   int64_t capacity_bytes,
                                                   std::string name,
                                                   MemoryLedger* ledger) {
  const int64_t capacity = RoundUp(capacity_bytes, kAlignment);
  absl::StatusOr<Buffer> buffer = device.Allocate(capacity, kind);
  if (!buffer.ok()) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "memory for %s: cannot reserve %.1f MiB (%s); use a smaller "
        "train_micro_batch_size_per_gpu or model, or turn on "
        "activation_checkpointing.enabled",
        name, capacity / 1048576.0, buffer.status().message()));
  }
  return std::unique_ptr<Arena>(
      new Arena(device, *std::move(buffer), capacity, std::move(name), ledger));
}

Arena::Arena(Device& device, Buffer buffer, int64_t capacity, std::string name,
             MemoryLedger* ledger)
    : device_(&device),
      buffer_(std::move(buffer)),
      capacity_(capacity),
      name_(std::move(name)),
      ledger_(ledger) {}

Arena::~Arena() { ZERO_CHECK_EQ(live_, 0) << "live blocks in arena " << name_; }

std::shared_ptr<ArenaBlock> Arena::Allocate(int64_t bytes,
                                            MemoryCategory category) {
  const int64_t padded = std::max(RoundUp(bytes, kAlignment), kAlignment);
  int64_t offset = end_;
  const auto fit = free_by_size_.lower_bound({padded, 0});
  if (fit != free_by_size_.end()) {
    const int64_t size = fit->first;
    offset = fit->second;
    EraseFree(free_by_offset_.find(offset));
    if (size > padded) AddFree(offset + padded, size - padded);
  } else {
    ZERO_CHECK_LE(end_ + padded, capacity_)
        << "arena " << name_ << " has no room for " << padded << " bytes of "
        << MemoryCategoryName(category) << "; " << live_ << " bytes are live";
    end_ += padded;
  }
  live_ += padded;
  high_water_ = std::max(high_water_, offset + padded);
  ledger_->Add(category, padded);
  return std::make_shared<ArenaBlock>(this, offset, padded, category);
}

void Arena::Free(const ArenaBlock& block) {
  if (poison_freed_ && device_->kind() == DeviceKind::kCpu) {
    std::memset(block.data(), 0xff, block.bytes());
  }
  live_ -= block.bytes();
  ledger_->Remove(block.category_, block.bytes());
  int64_t begin = block.offset(), bytes = block.bytes();
  auto next = free_by_offset_.lower_bound(begin);
  if (next != free_by_offset_.end() && next->first == begin + bytes) {
    bytes += next->second;
    EraseFree(next++);
  }
  if (next != free_by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      EraseFree(previous);
    }
  }
  if (begin + bytes == end_) {
    end_ = begin;
  } else {
    AddFree(begin, bytes);
  }
}

void Arena::AddFree(int64_t offset, int64_t bytes) {
  free_by_offset_[offset] = bytes;
  free_by_size_.insert({bytes, offset});
}

void Arena::EraseFree(std::map<int64_t, int64_t>::iterator it) {
  free_by_size_.erase({it->second, it->first});
  free_by_offset_.erase(it);
}

void Arena::Touch() {
  if (device_->kind() != DeviceKind::kCpu) return;
  volatile char* base = static_cast<char*>(buffer_.data());
  for (int64_t i = 0; i < capacity_; i += 4096) base[i] = 0;
}

int64_t Arena::ResidentBytes() const {
  if (device_->kind() != DeviceKind::kCpu) return 0;
  constexpr int64_t kPage = 4096;
  std::vector<unsigned char> pages(CeilDiv(capacity_, kPage));
  if (::mincore(buffer_.data(), capacity_, pages.data()) != 0) return 0;
  return kPage * std::count_if(pages.begin(), pages.end(),
                               [](unsigned char page) { return page & 1; });
}

}  // namespace zero
