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

void ArenaBlock::Shrink(int64_t bytes, MemoryCategory category) {
  const int64_t kept = Arena::PaddedBytes(bytes);
  ZERO_CHECK_LE(kept, bytes_);
  ZERO_CHECK_EQ(Arena::IsFar(category), Arena::IsFar(category_));
  // The first bytes of a far block are the farthest from its side's beginning.
  const int64_t rest = bytes_ - kept;
  const bool far = Arena::IsFar(category_);
  if (rest > 0) {
    arena_->GiveBack(static_cast<char*>(data()) + kept,
                     far ? offset_ : offset_ + kept, rest, category_);
  }
  if (far) offset_ += rest;
  bytes_ = kept;
  arena_->ledger_->Remove(category_, kept);
  arena_->ledger_->Add(category, kept);
  category_ = category;
}

void* ArenaBlock::data() const {
  const int64_t begin =
      Arena::IsFar(category_) ? arena_->capacity_ - offset_ - bytes_ : offset_;
  return static_cast<char*>(arena_->buffer_.data()) + begin;
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

int64_t Arena::PaddedBytes(int64_t bytes) {
  return std::max(RoundUp(bytes, kAlignment), kAlignment);
}

std::shared_ptr<ArenaBlock> Arena::Allocate(int64_t bytes,
                                            MemoryCategory category) {
  const int64_t padded = PaddedBytes(bytes);
  const int64_t offset = SideOf(category).Take(padded);
  const int64_t taken = near_.end() + far_.end();
  ZERO_CHECK_LE(taken, capacity_)
      << "arena " << name_ << " has no room for " << padded << " bytes of "
      << MemoryCategoryName(category) << "; " << live_ << " bytes are live";
  live_ += padded;
  high_water_ = std::max(high_water_, taken);
  ledger_->Add(category, padded);
  return std::make_shared<ArenaBlock>(this, offset, padded, category);
}

void Arena::Free(const ArenaBlock& block) {
  GiveBack(block.data(), block.offset(), block.bytes(), block.category_);
}

void Arena::GiveBack(void* data, int64_t offset, int64_t bytes,
                     MemoryCategory category) {
  if (poison_freed_ && device_->kind() == DeviceKind::kCpu) {
    std::memset(data, 0xff, bytes);
  }
  live_ -= bytes;
  ledger_->Remove(category, bytes);
  SideOf(category).GiveBack(offset, bytes);
}

int64_t Arena::Side::Take(int64_t bytes) {
  const auto fit = by_size_.lower_bound({bytes, 0});
  if (fit == by_size_.end()) {
    end_ += bytes;
    return end_ - bytes;
  }
  const auto [size, begin] = *fit;
  EraseHole(by_begin_.find(begin));
  if (size > bytes) AddHole(begin + bytes, size - bytes);
  return begin;
}

void Arena::Side::GiveBack(int64_t begin, int64_t bytes) {
  auto next = by_begin_.lower_bound(begin);
  if (next != by_begin_.end() && next->first == begin + bytes) {
    bytes += next->second;
    EraseHole(next++);
  }
  if (next != by_begin_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      EraseHole(previous);
    }
  }
  if (begin + bytes == end_) {
    end_ = begin;
  } else {
    AddHole(begin, bytes);
  }
}

void Arena::Side::AddHole(int64_t begin, int64_t bytes) {
  by_begin_[begin] = bytes;
  by_size_.insert({bytes, begin});
}

void Arena::Side::EraseHole(std::map<int64_t, int64_t>::iterator it) {
  by_size_.erase({it->second, it->first});
  by_begin_.erase(it);
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
