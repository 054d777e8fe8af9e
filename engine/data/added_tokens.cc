#include "engine/data/added_tokens.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"

namespace zero {
namespace {

// Whether `text` ends in a word, as the Rust library behind Hugging Face's
// tokenizers defines it.
bool EndsInWord(absl::string_view text, RegexScratch* scratch) {
  static const auto& regex = *new Regex(Regex::FromPcre(
      "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}]\\z"));
  if (text.empty()) return false;
  size_t last = text.size() - 1;
  while (last > 0 && (text[last] & 0xC0) == 0x80) --last;
  Regex::Match match;
  return regex.Find(text, last, scratch, &match);
}

bool BeginsWithWord(absl::string_view text, RegexScratch* scratch) {
  size_t end = std::min<size_t>(text.size(), 1);
  while (end < text.size() && (text[end] & 0xC0) == 0x80) ++end;
  return EndsInWord(text.substr(0, end), scratch);
}

// The number of bytes of white space at the start of `text`.
size_t LeadingSpace(absl::string_view text, RegexScratch* scratch) {
  static const auto& regex =
      *new Regex(Regex::FromPcre("\\A\\p{White_Space}*"));
  Regex::Match match;
  return regex.Find(text, 0, scratch, &match) ? match.end : 0;
}

size_t TrailingSpace(absl::string_view text, RegexScratch* scratch) {
  static const auto& regex = *new Regex(Regex::FromPcre("\\p{White_Space}\\z"));
  size_t begin = text.size();
  while (begin > 0) {
    size_t last = begin - 1;
    while (last > 0 && (text[last] & 0xC0) == 0x80) --last;
    Regex::Match match;
    if (!regex.Find(text.substr(0, begin), last, scratch, &match)) break;
    begin = last;
  }
  return text.size() - begin;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)) {
  for (uint32_t i = 0; i < tokens_.size(); ++i) {
    if (tokens_[i].content.empty()) continue;
    by_byte_[static_cast<uint8_t>(tokens_[i].content[0])].push_back(i);
    if (!tokens_[i].special) all_special_ = false;
  }
  for (auto& list : by_byte_) {
    std::stable_sort(list.begin(), list.end(), [&](uint32_t a, uint32_t b) {
      return tokens_[a].content.size() > tokens_[b].content.size();
    });
  }
}

const AddedToken* AddedTokens::Find(absl::string_view text) const {
  for (const uint32_t i : by_byte_[static_cast<uint8_t>(text[0])]) {
    if (absl::StartsWith(text, tokens_[i].content)) return &tokens_[i];
  }
  return nullptr;
}

void AddedTokens::Split(absl::string_view text, bool special_is_text,
                        RegexScratch* scratch,
                        std::vector<Segment>* segments) const {
  segments->clear();
  size_t done = 0;
  const bool any = !tokens_.empty() && !(all_special_ && special_is_text);
  for (size_t at = 0; any && at < text.size();) {
    const AddedToken* token = Find(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + token->content.size();
    at = end;
    if (token->special && special_is_text) continue;
    if (token->single_word && (EndsInWord(text.substr(0, begin), scratch) ||
                               BeginsWithWord(text.substr(end), scratch))) {
      continue;
    }
    if (token->lstrip) {
      begin -= TrailingSpace(text.substr(done, begin - done), scratch);
    }
    if (token->rstrip) end += LeadingSpace(text.substr(end), scratch);
    if (done < begin) segments->push_back({done, begin, -1});
    segments->push_back({begin, end, token->id});
    done = at = end;
  }
  if (done < text.size()) segments->push_back({done, text.size(), -1});
}

}  // namespace zero
