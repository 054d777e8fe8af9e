#include "engine/comm/progress.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace zero {
namespace {

const ChannelProgress* Find(const std::vector<ChannelProgress>& channels,
                            const std::string& name) {
  for (const ChannelProgress& one : channels) {
    if (one.channel == name) return &one;
  }
  return nullptr;
}

// What a rank issued as collective `number`, if it is known; else null.
const CollectiveMark* Issued(const ChannelProgress& progress, int64_t number) {
  for (const CollectiveMark* mark :
       {&progress.inside, &progress.finished, &progress.issued}) {
    if (mark->number == number) return mark;
  }
  return nullptr;
}

// "rank 1 differs from rank 0 at #3 ..." where not all issued the same; of two
// kinds the rarer one differs.
std::string Mismatch(
    int rank, const std::string& channel, const CollectiveMark& call,
    const std::map<int, std::vector<ChannelProgress>>& others) {
  std::map<std::string, std::vector<int>> ranks = {{call.signature, {rank}}};
  for (const auto& [other, channels] : others) {
    const ChannelProgress* const progress = Find(channels, channel);
    const CollectiveMark* const issued =
        progress == nullptr ? nullptr : Issued(*progress, call.number);
    if (issued != nullptr) ranks[issued->signature].push_back(other);
  }
  if (ranks.size() == 1) return "";
  using Kind = std::pair<const std::string, std::vector<int>>;
  const auto before = [](const Kind& a, const Kind& b) {
    return a.second.size() != b.second.size()
               ? a.second.size() > b.second.size()
               : *std::min_element(a.second.begin(), a.second.end()) <
                     *std::min_element(b.second.begin(), b.second.end());
  };
  const Kind& common = *std::min_element(ranks.begin(), ranks.end(), before);
  const Kind& rare = *std::max_element(ranks.begin(), ranks.end(), before);
  const int one = *std::min_element(common.second.begin(), common.second.end());
  const int other = *std::min_element(rare.second.begin(), rare.second.end());
  return absl::StrCat("rank ", other, " differs from rank ", one, " at #",
                      call.number, " of channel \"", channel, "\": rank ",
                      other, " is in ", rare.first, ", rank ", one, " in ",
                      common.first);
}

// Where a rank is that has not come to `call`, or that has gone on; empty: it
// waits in it as well.
std::string Whereabouts(const ChannelProgress* progress,
                        const CollectiveMark& call, bool* is_late) {
  *is_late = true;
  if (progress == nullptr || progress->issued.number == 0) {
    return " issued nothing here";
  }
  if (progress->issued.number < call.number) {
    return absl::StrCat(" issued ", progress->issued.Text(), " last");
  }
  const CollectiveMark& inside = progress->inside;
  if (progress->finished.number < call.number && inside.number < call.number) {
    return absl::StrCat(" issued it, but its stream ",
                        inside.number == 0
                            ? "has not come to it"
                            : absl::StrCat("is in ", inside.Text()));
  }
  *is_late = false;
  if (progress->finished.number < call.number) return "";
  return absl::StrCat(" has finished it",
                      inside.number == 0
                          ? std::string()
                          : absl::StrCat(" and is in ", inside.Text()));
}

// "; it is in #7 of channel "gather", ..." for all channels but `here`.
std::string Elsewhere(const std::vector<ChannelProgress>& channels,
                      const std::string& here) {
  std::string text;
  for (const ChannelProgress& one : channels) {
    if (one.channel == here || one.inside.number == 0) continue;
    absl::StrAppend(&text, text.empty() ? "; it is in #" : " and #",
                    one.inside.number, " of channel \"", one.channel, "\", ",
                    one.inside.signature);
  }
  return text;
}

bool IsInside(const std::vector<ChannelProgress>& channels) {
  for (const ChannelProgress& one : channels) {
    if (one.inside.number > 0) return true;
  }
  return false;
}

}  // namespace

std::string CollectiveMark::Text() const {
  return absl::StrCat("#", number, ", ", signature);
}

std::string ProgressText(const std::vector<ChannelProgress>& channels) {
  std::string text;
  for (const ChannelProgress& one : channels) {
    text += one.channel;
    for (const CollectiveMark* mark :
         {&one.issued, &one.inside, &one.finished}) {
      absl::StrAppend(&text, "\t", mark->number, "\t", mark->signature);
    }
    text += '\n';
  }
  return text;
}

std::vector<ChannelProgress> ParseProgress(const std::string& text) {
  std::vector<ChannelProgress> channels;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, '\t');
    if (parts.size() != 7) continue;
    ChannelProgress one{.channel = parts[0]};
    bool ok = true;
    size_t place = 1;
    for (CollectiveMark* mark : {&one.issued, &one.inside, &one.finished}) {
      ok = ok && absl::SimpleAtoi(parts[place], &mark->number);
      mark->signature = parts[place + 1];
      place += 2;
    }
    if (ok) channels.push_back(std::move(one));
  }
  return channels;
}

Diagnosis Diagnose(int rank, const std::string& channel,
                   const CollectiveMark& call,
                   const std::map<int, std::vector<ChannelProgress>>& others) {
  Diagnosis diagnosis;
  diagnosis.mismatch = Mismatch(rank, channel, call, others);
  if (!diagnosis.mismatch.empty()) return diagnosis;
  constexpr int kMostNamed = 4;
  int num_named = 0;
  for (const auto& [other, channels] : others) {
    bool is_late = false;
    const std::string where =
        Whereabouts(Find(channels, channel), call, &is_late);
    if (is_late && !IsInside(channels)) diagnosis.missing.push_back(other);
    if (where.empty() || ++num_named > kMostNamed) continue;
    absl::StrAppend(&diagnosis.late, diagnosis.late.empty() ? "" : "; ",
                    "rank ", other, where, Elsewhere(channels, channel));
  }
  if (num_named > kMostNamed) {
    absl::StrAppend(&diagnosis.late, "; and ", num_named - kMostNamed,
                    " other ranks");
  }
  if (num_named == 0) {
    diagnosis.late = "all ranks have begun it, and it does not end";
  }
  return diagnosis;
}

}  // namespace zero
