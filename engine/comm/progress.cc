#include "engine/comm/progress.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/comm/channel.h"

namespace zero {
namespace {

// Null: `rank` has told nothing of it.
const ChannelProgress* Find(const RanksProgress& told, int rank,
                            const std::string& channel) {
  const auto channels = told.find(rank);
  if (channels == told.end()) return nullptr;
  for (const ChannelProgress& one : channels->second) {
    if (one.channel == channel) return &one;
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
std::string Mismatch(const LateCollective& late, const RanksProgress& told) {
  std::map<std::string, std::vector<int>> ranks;
  for (const int member : late.members) {
    const ChannelProgress* const progress = Find(told, member, late.channel);
    const CollectiveMark* const issued =
        member == late.rank   ? &late.call
        : progress == nullptr ? nullptr
                              : Issued(*progress, late.call.number);
    if (issued != nullptr) ranks[issued->signature].push_back(member);
  }
  if (ranks.size() == 1) return "";
  using Kind = std::pair<const std::string, std::vector<int>>;
  const auto before = [](const Kind& a, const Kind& b) {
    return a.second.size() != b.second.size()
               ? a.second.size() > b.second.size()
               : a.second.front() < b.second.front();
  };
  const auto [common, rare] =
      std::minmax_element(ranks.begin(), ranks.end(), before);
  const int one = common->second.front(), other = rare->second.front();
  return absl::StrCat("rank ", other, " differs from rank ", one, " at #",
                      late.call.number, " of channel \"", late.channel,
                      "\": rank ", other, " is in ", rare->first, ", rank ",
                      one, " in ", common->first);
}

// Whether others wait in `call` for a rank that is here.
bool IsAwaited(const ChannelProgress* progress, const CollectiveMark& call) {
  if (progress == nullptr) return true;
  if (progress->finished.number >= call.number) return false;
  return progress->inside.number < call.number || progress->works;
}

// The ranks for whom `rank` waits in a channel.
std::vector<int> AwaitedIn(int rank, const ChannelProgress& own,
                           const RanksProgress& told) {
  std::vector<int> awaited;
  if (own.inside.number == 0 || own.works) return awaited;
  for (const auto& [other, channels] : told) {
    const ChannelProgress* const there = Find(told, other, own.channel);
    if (other == rank || there == nullptr) continue;
    if (IsAwaited(there, own.inside)) awaited.push_back(other);
  }
  return awaited;
}

// Behind `awaited`, who waits for nobody; `awaited` where all wait in a circle.
std::vector<int> Missing(const std::vector<int>& awaited,
                         const RanksProgress& told) {
  std::set<int> seen(awaited.begin(), awaited.end()), missing;
  for (std::vector<int> next = awaited; !next.empty();) {
    const int rank = next.back();
    next.pop_back();
    bool waits = false;
    const auto channels = told.find(rank);
    if (channels == told.end()) {
      missing.insert(rank);
      continue;
    }
    for (const ChannelProgress& own : channels->second) {
      waits = waits || (own.inside.number > 0 && !own.works);
      for (const int other : AwaitedIn(rank, own, told)) {
        if (seen.insert(other).second) next.push_back(other);
      }
    }
    if (!waits) missing.insert(rank);
  }
  if (missing.empty()) return awaited;
  return {missing.begin(), missing.end()};
}

// Where a rank is that others wait for in `call`, or that has gone on; empty:
// it waits in it as well.
std::string Whereabouts(const ChannelProgress* progress,
                        const CollectiveMark& call) {
  if (progress == nullptr || progress->issued.number == 0) {
    return " issued nothing here";
  }
  const CollectiveMark &issued = progress->issued, &inside = progress->inside,
                       &finished = progress->finished;
  const std::string is_in =
      inside.number == 0 ? "" : absl::StrCat("is in ", inside.Text());
  if (finished.number >= call.number) {
    return absl::StrCat(" has finished it", is_in.empty() ? "" : " and ",
                        is_in);
  }
  if (inside.number >= call.number) {
    return progress->works ? " is doing its share" : "";
  }
  std::string text = issued.number < call.number
                         ? absl::StrCat(" issued ", issued.Text(), " last")
                         : " issued it";
  if (finished.number < issued.number) {
    absl::StrAppend(&text, ", but its stream ",
                    is_in.empty() ? "has not come to it" : is_in);
  }
  return text;
}

// "; it is in #7 of channel "gather", ..., and waits for rank 2" for all
// channels but `here`.
std::string Elsewhere(int rank, const std::string& here,
                      const RanksProgress& told) {
  std::string text;
  const auto channels = told.find(rank);
  if (channels == told.end()) return text;
  for (const ChannelProgress& one : channels->second) {
    if (one.channel == here || one.inside.number == 0) continue;
    absl::StrAppend(&text, text.empty() ? "; it is in " : " and ",
                    one.inside.TextIn(one.channel));
    const std::vector<int> awaited = AwaitedIn(rank, one, told);
    if (awaited.empty()) continue;
    absl::StrAppend(&text, ", and waits for ", RankNames(awaited));
  }
  return text;
}

}  // namespace

std::string CollectiveMark::Text() const {
  return absl::StrCat("#", number, ", ", signature);
}

std::string CollectiveMark::TextIn(const std::string& channel) const {
  return absl::StrCat("#", number, " of channel \"", channel, "\", ",
                      signature);
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

Diagnosis Diagnose(const LateCollective& late, const RanksProgress& told) {
  const std::string mismatch = Mismatch(late, told);
  if (!mismatch.empty()) {
    return {absl::FailedPreconditionError(
                absl::StrCat(late.backend, ": ", mismatch)),
            {}};
  }
  constexpr size_t kMostNamed = 4;
  size_t num_named = 0;
  bool all_begun = true;
  std::vector<int> awaited;
  std::string where;
  for (const int member : late.members) {
    if (member == late.rank) continue;
    const ChannelProgress* const there = Find(told, member, late.channel);
    if (IsAwaited(there, late.call)) {
      awaited.push_back(member);
      all_begun = all_begun && there != nullptr && there->works;
    }
    const std::string one = Whereabouts(there, late.call);
    if (one.empty() || ++num_named > kMostNamed) continue;
    absl::StrAppend(&where, "; rank ", member, one,
                    Elsewhere(member, late.channel, told));
  }
  if (num_named > kMostNamed) {
    absl::StrAppend(&where, "; and ", num_named - kMostNamed, " other ranks");
  }
  const std::string who = awaited.empty() ? "all ranks"
                          : awaited.size() <= kMostNamed
                              ? RankNames(awaited)
                              : absl::StrCat(awaited.size(), " ranks");
  return {absl::DeadlineExceededError(
              absl::StrCat(late.backend, ": ", who,
                           awaited.empty() ? " have begun, and did not finish "
                           : all_begun     ? " did not finish "
                                           : " did not arrive at ",
                           late.call.TextIn(late.channel), " within ",
                           absl::FormatDuration(late.timeout), where,
                           "; if a rank was only slow, raise "
                           "communication.timeout_seconds")),
          Missing(awaited, told)};
}

}  // namespace zero
