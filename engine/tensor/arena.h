// One reserved range of device memory, cut up deterministically.
//
// The same sequence of requests gives the same offsets, on any device. So a
// step on the meta device gives the exact range that it needs
// (high_water_bytes), and the real arena reserves that once and never grows.
// Freed memory is reused at once. This is safe: before memory is freed, the
// compute stream has waited for its users on other streams (the executor awaits
// a collective before it releases a buffer), and its next user follows the
// compute stream.
// Longer-lived memory of units (gathered parameters, gradients) comes from the
// far end: among the activations, which are last in, first out, it would leave
// holes. While backward frees activations at one end, gradients fill the other,
// and the range is the maximum of their sum.
// A plan of all offsets by lifetimes could save at most the holes at the peak:
// 1 % of the range of Llama-3.2-1B at stages 0 and 1, up to 8 % at stages 2 and
// 3 (1,024 ranks; "fragmentation" in zero memory's rows).
// Invariant: blocks are disjoint; the holes of a side lie below its end and
// never touch.
// Threads: one at a time. Start reading at tensor.h, the user of this.
#ifndef ZERO_ENGINE_TENSOR_ARENA_H_
#define ZERO_ENGINE_TENSOR_ARENA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/tensor/ledger.h"
#include "kernels/device.h"

namespace zero {

class Arena;

// A live piece of an arena; returns itself when destroyed.
class ArenaBlock {
 public:
  // `offset`: from the end of the arena that the category comes from.
  ArenaBlock(Arena* arena, int64_t offset, int64_t bytes,
             MemoryCategory category)
      : arena_(arena), offset_(offset), bytes_(bytes), category_(category) {}
  ~ArenaBlock();
  ArenaBlock(const ArenaBlock&) = delete;
  ArenaBlock& operator=(const ArenaBlock&) = delete;

  // Returns all but the first `bytes` to the arena, and counts those as
  // `category`, on the same side. REQUIRES: the rest is unused.
  void Shrink(int64_t bytes, MemoryCategory category);

  void* data() const;
  int64_t offset() const { return offset_; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class Arena;
  Arena* arena_;
  int64_t offset_;
  int64_t bytes_;
  MemoryCategory category_;
};

class Arena {
 public:
  // Every block starts at a multiple of this and is padded to it.
  static constexpr int64_t kAlignment = 256;

  // Reserves `capacity_bytes` of `device`. `ledger` must outlive the arena.
  // Errors: ResourceExhausted, naming the arena and the size.
  static absl::StatusOr<std::unique_ptr<Arena>> Make(Device& device,
                                                     MemoryKind kind,
                                                     int64_t capacity_bytes,
                                                     std::string name,
                                                     MemoryLedger* ledger);
  ~Arena();

  // On the category's side: the smallest hole that fits, the one nearest to
  // where the side begins, else its end. The unused middle is not a hole:
  // otherwise its size would decide where blocks go, and an arena of exactly
  // high_water_bytes would be cut up differently.
  // Running out is the caller's mistake (the plan sizes arenas): the check
  // prints category, size and live memory.
  std::shared_ptr<ArenaBlock> Allocate(int64_t bytes, MemoryCategory category);

  // Whether Allocate would find a hole, so the category's side does not grow.
  bool HasHole(int64_t bytes, MemoryCategory category) const {
    const Side& side = IsFar(category) ? far_ : near_;
    return side.HasHole(PaddedBytes(bytes));
  }

  // The middle, which no block is in: free until the next Allocate.
  absl::Span<char> unused() const {
    return {static_cast<char*>(buffer_.data()) + near_.end(),
            static_cast<size_t>(capacity_ - near_.end() - far_.end())};
  }

  // Writes one byte to every page, so that a step never waits for the
  // operating system (first touch costs up to seconds per GiB). CPU only.
  void Touch();

  // How many of the arena's bytes are resident. CPU only.
  int64_t ResidentBytes() const;

  // Fills freed memory with NaNs, so that a test sees a use after free. CPU
  // only.
  void set_poison_freed(bool poison) { poison_freed_ = poison; }

  // Keeps `held`, such as a registration of the memory, alive as long as the
  // memory.
  void Hold(std::shared_ptr<void> held) { held_.push_back(std::move(held)); }

  Device& device() const { return *device_; }
  void* data() const { return buffer_.data(); }
  int64_t capacity_bytes() const { return capacity_; }
  int64_t live_bytes() const { return live_; }
  // The most that both sides ever took together, including holes.
  int64_t high_water_bytes() const { return high_water_; }
  const std::string& name() const { return name_; }

 private:
  friend class ArenaBlock;
  // The blocks at one end of the range.
  class Side {
   public:
    int64_t Take(int64_t bytes);
    bool HasHole(int64_t bytes) const {
      return by_size_.lower_bound({bytes, 0}) != by_size_.end();
    }
    void GiveBack(int64_t begin, int64_t bytes);
    // The end of the last live block; beyond it all is free.
    int64_t end() const { return end_; }

   private:
    void AddHole(int64_t begin, int64_t bytes);
    void EraseHole(std::map<int64_t, int64_t>::iterator it);

    std::map<int64_t, int64_t> by_begin_;            // holes: begin -> bytes
    std::set<std::pair<int64_t, int64_t>> by_size_;  // (bytes, begin)
    int64_t end_ = 0;
  };

  Arena(Device& device, Buffer buffer, int64_t capacity, std::string name,
        MemoryLedger* ledger);
  static bool IsFar(MemoryCategory category) {
    return category == MemoryCategory::kGatheredParameters ||
           category == MemoryCategory::kReduceBuffers ||
           category == MemoryCategory::kGradients;
  }
  Side& SideOf(MemoryCategory category) {
    return IsFar(category) ? far_ : near_;
  }
  static int64_t PaddedBytes(int64_t bytes);
  void Free(const ArenaBlock& block);
  // Returns `bytes` of a block, which begin at `data` and, from the category's
  // end, at `offset`.
  void GiveBack(void* data, int64_t offset, int64_t bytes,
                MemoryCategory category);

  Device* device_;
  Buffer buffer_;
  std::vector<std::shared_ptr<void>> held_;  // ends before buffer_
  int64_t capacity_;
  std::string name_;
  MemoryLedger* ledger_;
  Side near_, far_;
  int64_t live_ = 0;
  int64_t high_water_ = 0;
  bool poison_freed_ = false;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TENSOR_ARENA_H_
