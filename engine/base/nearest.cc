#include "engine/base/nearest.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"

namespace zero {

int EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substitute = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

std::vector<std::string> NearestNames(absl::string_view word,
                                      absl::Span<const std::string> candidates,
                                      int limit) {
  const auto plain = [](absl::string_view name) {
    return absl::StrReplaceAll(absl::AsciiStrToLower(name), {{"-", "_"}});
  };
  const std::string wanted = plain(word);
  std::vector<std::string> longer;
  std::vector<std::pair<int, std::string>> ranked;
  for (const std::string& candidate : candidates) {
    const std::string name = plain(candidate);
    // The word may be a prefix, which lacks many letters.
    if (wanted.size() >= 4 && absl::StartsWith(name, wanted)) {
      longer.push_back(candidate);
    }
    const size_t longest = std::max(wanted.size(), name.size());
    // More than half different is not a typo, nor is a longer name.
    const size_t gap = longest - std::min(wanted.size(), name.size());
    if (gap * 2 > longest) continue;
    const int distance = EditDistance(wanted, name);
    if (static_cast<size_t>(distance) * 2 <= longest) {
      ranked.emplace_back(distance, candidate);
    }
  }
  if (longer.size() == 1) return longer;
  std::stable_sort(
      ranked.begin(), ranked.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (const auto& [distance, name] : ranked) {
    if (static_cast<int>(names.size()) == limit) break;
    names.push_back(name);
  }
  return names;
}

}  // namespace zero
