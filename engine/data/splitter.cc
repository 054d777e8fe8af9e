#include "engine/data/splitter.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace zero {
namespace {

using PieceFn = absl::FunctionRef<bool(size_t begin, size_t end, bool match)>;

// Calls `piece` for every match and the texts in between, in order, until it
// returns false.
void ForEachPiece(const SplitStage& stage, absl::string_view text,
                  RegexScratch* scratch, PieceFn piece) {
  size_t done = 0, from = 0;
  Regex::Match match;
  while (from < text.size() && stage.regex->Find(text, from, scratch, &match)) {
    from = match.end;
    if (match.begin == match.end) {  // cuts there, but is no word
      ++from;
      while (from < text.size() && (text[from] & 0xC0) == 0x80) ++from;
      if (match.begin == done) continue;
    }
    if (done < match.begin && !piece(done, match.begin, stage.invert)) return;
    done = match.end;
    if (match.begin < match.end &&
        !piece(match.begin, match.end, !stage.invert)) {
      return;
    }
  }
  if (done < text.size()) piece(done, text.size(), stage.invert);
}

}  // namespace

bool Splitter::Split(absl::string_view text, size_t size, bool continues,
                     RegexScratch* scratch, WordFn word) const {
  return SplitFrom(0, text, size, continues, scratch, word);
}

bool Splitter::SplitFrom(size_t number, absl::string_view text, size_t size,
                         bool continues, RegexScratch* scratch,
                         WordFn word) const {
  if (number == stages_.size()) {
    word(text.substr(0, size));
    return size == text.size();
  }
  const SplitStage& stage = stages_[number];
  std::string spaced;
  if (stage.add_prefix_space && !continues && !text.empty() && text[0] != ' ') {
    spaced = absl::StrCat(" ", text);
    text = spaced;
    ++size;
  }
  // A word of this stage: kept back while the next match may still change it.
  const auto emit = [&](size_t begin, size_t end) {
    const absl::string_view piece = text.substr(begin, end - begin);
    if (number + 1 == stages_.size()) {
      word(piece);
    } else {
      SplitFrom(number + 1, piece, piece.size(), /*continues=*/false, scratch,
                word);
    }
  };
  if (!stage.regex.has_value()) {
    if (size == text.size()) emit(0, size);
    return size == text.size();
  }
  size_t begin = 0, end = 0;  // the word kept back
  bool last_match = false;
  const auto joins = [&](bool match) {
    switch (stage.behavior) {
      case SplitBehavior::kRemoved:
      case SplitBehavior::kIsolated:
        return false;
      case SplitBehavior::kMergedWithPrevious:
        return match && !last_match;
      case SplitBehavior::kMergedWithNext:
        return !match && last_match;
      case SplitBehavior::kContiguous:
        return match == last_match;
    }
    return false;
  };
  bool ends_there = false;
  ForEachPiece(stage, text, scratch, [&](size_t from, size_t to, bool match) {
    const bool joined = begin < end && joins(match);
    if (!joined) {
      if (begin < end) emit(begin, end);
      begin = end = from;
      if (from >= size) {
        ends_there = from == size;
        return false;
      }
    }
    const bool removed = match && stage.behavior == SplitBehavior::kRemoved;
    end = to;
    if (removed) begin = end;
    last_match = match;
    return true;
  });
  if (begin < end && begin < size && end <= size) emit(begin, end);
  return ends_there || end == size;
}

}  // namespace zero
