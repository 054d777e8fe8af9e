// Byte-pair encoding: a word's bytes become tokens. The adjacent pair whose
// merge was learned first is merged, again and again, until no pair has a
// merge.
#ifndef ZERO_ENGINE_DATA_BPE_H_
#define ZERO_ENGINE_DATA_BPE_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace zero {

// A cache of words, and the memory of a merge.
// Threads: one at a time.
class BpeScratch {
 public:
  BpeScratch();

 private:
  friend class Bpe;

  // A cache of words of at most kLongestWord bytes and their ids. It is cleared
  // when full: frequent words soon return.
  static constexpr size_t kSlots = size_t{1} << 16;
  static constexpr size_t kLongestWord = 48;
  struct Slot {
    uint64_t hash = 0;
    uint32_t text = 0, ids = 0;  // where they begin
    uint16_t text_size = 0;      // 0: free
    uint16_t num_ids = 0;
  };
  // The slot of `word`, or the free one for it.
  Slot* FindSlot(absl::string_view word, uint64_t hash);
  void Remember(Slot* slot, absl::string_view word, uint64_t hash,
                const int32_t* ids, size_t num_ids);

  std::vector<Slot> slots_;
  std::string text_;
  std::vector<int32_t> ids_;
  size_t num_words_ = 0;

  // One token of the word in a linked list; a merged token leaves the list.
  struct Symbol {
    int32_t id, previous, next;  // id < 0: removed; next < 0: the last one
  };
  // An adjacent pair that can merge; its left token is at `position`.
  struct Candidate {
    uint32_t rank;
    int32_t position, left, right, result;
    // The order for std::push_heap, which keeps the largest on top.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

// Threads: const methods may be called from many threads.
class Bpe {
 public:
  struct Merge {
    int32_t left, right, result;
  };

  // The token of every byte, and merges in the order of their priority.
  // `whole`: words that are one token regardless of merges.
  Bpe(const std::array<int32_t, 256>& byte_ids,
      const std::vector<Merge>& merges,
      absl::flat_hash_map<std::string, int32_t> whole);

  // Appends the ids of `word`. Of equal pairs the leftmost is merged first.
  void Encode(absl::string_view word, BpeScratch* scratch,
              std::vector<int32_t>* ids) const;

 private:
  struct Rule {
    uint32_t rank;
    int32_t result;
  };
  void MergeWord(absl::string_view word, BpeScratch* scratch,
                 std::vector<int32_t>* ids) const;
  void Push(int32_t position, BpeScratch* scratch) const;

  std::array<int32_t, 256> byte_ids_;
  absl::flat_hash_map<std::pair<int32_t, int32_t>, Rule> rules_;
  absl::flat_hash_map<std::string, int32_t> whole_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_BPE_H_
