// Measured memory with names: live and peak bytes per category.
//
// Categories are tags over the arenas (arena.h). Maxima of different moments do
// not add up, so besides each category's own peak the ledger keeps the
// composition at the moment of the largest total.
// Invariant: sum over categories of live_bytes = total_live_bytes.
#ifndef ZERO_ENGINE_TENSOR_LEDGER_H_
#define ZERO_ENGINE_TENSOR_LEDGER_H_

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace zero {

enum class MemoryCategory : uint8_t {
  kParameters,
  kGradients,
  kOptimizer,
  kGatheredParameters,
  kReduceBuffers,
  kActivations,
  kWorkspace,
  kInputs,         // token ids, positions, rotary tables, scalars
  kSnapshot,       // the copy of the states that a checkpoint is written from
  kFragmentation,  // reserved gaps between blocks at the peak
  kFixed,  // outside arenas: libraries, a GPU's context, streams, staging
};
inline constexpr int kNumMemoryCategories = 11;

// "parameters", "gradients", ... as in metrics.jsonl.
const char* MemoryCategoryName(MemoryCategory category);

class MemoryLedger {
 public:
  using ByCategory = std::array<int64_t, kNumMemoryCategories>;

  void Add(MemoryCategory category, int64_t bytes);
  void Remove(MemoryCategory category, int64_t bytes);

  int64_t live_bytes(MemoryCategory category) const {
    return live_[static_cast<int>(category)];
  }
  int64_t peak_bytes(MemoryCategory category) const {
    return peak_[static_cast<int>(category)];
  }
  int64_t total_live_bytes() const { return total_live_; }
  int64_t total_peak_bytes() const { return total_peak_; }

  // Adds permanent bytes that became known only now.
  void AddConstant(MemoryCategory category, int64_t bytes);

  // Bytes per category: at the category's own peak, and at the total's.
  const ByCategory& peaks() const { return peak_; }
  const ByCategory& at_peak() const { return at_peak_; }

  // The categories that are not zero, by name.
  using NamedBytes = std::vector<std::pair<const char*, int64_t>>;
  static NamedBytes Parts(const ByCategory& bytes);

  // Bytes per category when the total was at its highest since the last call.
  ByCategory TakeRecentPeak();

  // Resets peaks to the live bytes.
  void ResetPeaks();

 private:
  ByCategory live_ = {}, peak_ = {}, at_peak_ = {}, recent_ = {};
  int64_t total_live_ = 0, total_peak_ = 0, recent_total_ = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TENSOR_LEDGER_H_
