#include "engine/data/bpe.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero {

BpeScratch::BpeScratch() : slots_(kSlots) {}

BpeScratch::Slot* BpeScratch::FindSlot(absl::string_view word, uint64_t hash) {
  for (size_t at = hash % kSlots;; at = (at + 1) % kSlots) {
    Slot& slot = slots_[at];
    if (slot.text_size == 0) return &slot;
    if (slot.hash == hash &&
        absl::string_view(text_).substr(slot.text, slot.text_size) == word) {
      return &slot;
    }
  }
}

void BpeScratch::Remember(Slot* slot, absl::string_view word, uint64_t hash,
                          const int32_t* ids, size_t num_ids) {
  *slot = {hash, static_cast<uint32_t>(text_.size()),
           static_cast<uint32_t>(ids_.size()),
           static_cast<uint16_t>(word.size()), static_cast<uint16_t>(num_ids)};
  text_.append(word.data(), word.size());
  ids_.insert(ids_.end(), ids, ids + num_ids);
  if (++num_words_ < kSlots / 2) return;
  std::fill(slots_.begin(), slots_.end(), Slot{});
  text_.clear();
  ids_.clear();
  num_words_ = 0;
}

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids,
         const std::vector<Merge>& merges,
         absl::flat_hash_map<std::string, int32_t> whole)
    : byte_ids_(byte_ids), whole_(std::move(whole)) {
  rules_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& merge = merges[rank];
    rules_[{merge.left, merge.right}] = {static_cast<uint32_t>(rank),
                                         merge.result};
  }
}

void Bpe::Encode(absl::string_view word, BpeScratch* scratch,
                 std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  if (word.size() > BpeScratch::kLongestWord) {
    return MergeWord(word, scratch, ids);
  }
  const uint64_t hash = XXH3_64bits(word.data(), word.size());
  BpeScratch::Slot* slot = scratch->FindSlot(word, hash);
  if (slot->text_size > 0) {
    const int32_t* known = scratch->ids_.data() + slot->ids;
    ids->insert(ids->end(), known, known + slot->num_ids);
    return;
  }
  const size_t begin = ids->size();
  MergeWord(word, scratch, ids);
  scratch->Remember(slot, word, hash, ids->data() + begin, ids->size() - begin);
}

void Bpe::Push(int32_t position, BpeScratch* scratch) const {
  const BpeScratch::Symbol& left = scratch->symbols_[position];
  if (left.next < 0) return;
  const int32_t right = scratch->symbols_[left.next].id;
  const auto rule = rules_.find({left.id, right});
  if (rule == rules_.end()) return;
  scratch->heap_.push_back(
      {rule->second.rank, position, left.id, right, rule->second.result});
  std::push_heap(scratch->heap_.begin(), scratch->heap_.end());
}

void Bpe::MergeWord(absl::string_view word, BpeScratch* scratch,
                    std::vector<int32_t>* ids) const {
  if (const auto it = whole_.find(word); it != whole_.end()) {
    ids->push_back(it->second);
    return;
  }
  auto& symbols = scratch->symbols_;
  auto& heap = scratch->heap_;
  const int32_t size = static_cast<int32_t>(word.size());
  symbols.resize(word.size());
  for (int32_t i = 0; i < size; ++i) {
    symbols[i] = {byte_ids_[static_cast<uint8_t>(word[i])], i - 1,
                  i + 1 < size ? i + 1 : -1};
  }
  heap.clear();
  for (int32_t i = 0; i < size; ++i) Push(i, scratch);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const BpeScratch::Candidate best = heap.back();
    heap.pop_back();
    BpeScratch::Symbol& left = symbols[best.position];
    // Either may have merged with another token.
    if (left.id != best.left || left.next < 0) continue;
    BpeScratch::Symbol& right = symbols[left.next];
    if (right.id != best.right) continue;
    left.id = best.result;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    if (left.previous >= 0) Push(left.previous, scratch);
    Push(best.position, scratch);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next)
    ids->push_back(symbols[i].id);
}

}  // namespace zero
