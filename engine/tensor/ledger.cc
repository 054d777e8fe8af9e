#include "engine/tensor/ledger.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

namespace zero {

const char* MemoryCategoryName(MemoryCategory category) {
  constexpr const char* kNames[] = {
      "parameters",     "gradients",     "optimizer", "gathered_parameters",
      "reduce_buffers", "activations",   "workspace", "inputs",
      "snapshot",       "fragmentation", "fixed"};
  static_assert(std::size(kNames) == kNumMemoryCategories);
  return kNames[static_cast<int>(category)];
}

void MemoryLedger::Add(MemoryCategory category, int64_t bytes) {
  const int i = static_cast<int>(category);
  live_[i] += bytes;
  peak_[i] = std::max(peak_[i], live_[i]);
  total_live_ += bytes;
  if (total_live_ > total_peak_) {
    total_peak_ = total_live_;
    at_peak_ = live_;
  }
  if (total_live_ > recent_total_) {
    recent_total_ = total_live_;
    recent_ = live_;
  }
}

void MemoryLedger::Remove(MemoryCategory category, int64_t bytes) {
  const int i = static_cast<int>(category);
  ZERO_CHECK_GE(live_[i], bytes) << MemoryCategoryName(category);
  live_[i] -= bytes;
  total_live_ -= bytes;
}

void MemoryLedger::AddConstant(MemoryCategory category, int64_t bytes) {
  const int i = static_cast<int>(category);
  for (ByCategory* counts : {&live_, &peak_, &at_peak_, &recent_}) {
    (*counts)[i] += bytes;
  }
  total_live_ += bytes;
  total_peak_ += bytes;
  recent_total_ += bytes;
}

MemoryLedger::NamedBytes MemoryLedger::Parts(const ByCategory& bytes) {
  NamedBytes parts;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    if (bytes[i] == 0) continue;
    parts.emplace_back(MemoryCategoryName(static_cast<MemoryCategory>(i)),
                       bytes[i]);
  }
  return parts;
}

MemoryLedger::ByCategory MemoryLedger::TakeRecentPeak() {
  recent_total_ = total_live_;
  return std::exchange(recent_, live_);
}

void MemoryLedger::ResetPeaks() {
  peak_ = live_;
  at_peak_ = live_;
  total_peak_ = total_live_;
}

}  // namespace zero
