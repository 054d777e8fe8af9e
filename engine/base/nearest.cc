#include "engine/base/nearest.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"

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

std::vector<std::string> NearestNames(
    absl::string_view word, const std::vector<std::string>& candidates,
    int limit) {
  std::vector<std::pair<int, std::string>> ranked;
  for (const std::string& candidate : candidates) {
    const int distance = EditDistance(absl::AsciiStrToLower(word),
                                      absl::AsciiStrToLower(candidate));
    const int longest =
        static_cast<int>(std::max(word.size(), candidate.size()));
    // More than half different is no typing error.
    if (distance * 2 <= longest) ranked.emplace_back(distance, candidate);
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::string> names;
  for (const auto& [distance, name] : ranked) {
    if (static_cast<int>(names.size()) == limit) break;
    names.push_back(name);
  }
  return names;
}

}  // namespace zero
