#include "engine/comm/progress.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/comm/channel.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::json;
using Ranks = std::map<int, ChannelProgress>;

// A rank's collective `number`, if known; else null.
const CollectiveMark* Issued(const ChannelProgress& progress, int64_t number) {
  for (const CollectiveMark* mark :
       {&progress.inside, &progress.finished, &progress.issued}) {
    if (mark->number == number) return mark;
  }
  return nullptr;
}

// "rank 1 differs from rank 0 at #3 ..." if not all issued the same; the rarer
// kind is the one that differs.
std::string Mismatch(const LateCollective& late, const Ranks& here) {
  std::map<std::string, std::vector<int>> ranks;
  for (const auto& [rank, progress] : here) {
    const CollectiveMark* const issued = Issued(progress, late.call.number);
    if (issued != nullptr) ranks[issued->signature].push_back(rank);
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

// Whether others wait in `call` for a rank at this point.
bool IsAwaited(const ChannelProgress& there, const CollectiveMark& call) {
  if (there.finished.number >= call.number) return false;
  return there.inside.number < call.number || there.works;
}

// The ranks of a channel that a rank at this point waits for.
std::vector<int> AwaitedBy(const ChannelProgress& own, const Ranks& ranks) {
  std::vector<int> awaited;
  if (own.inside.number == 0 || own.works) return awaited;
  for (const auto& [rank, there] : ranks) {
    if (IsAwaited(there, own.inside)) awaited.push_back(rank);
  }
  return awaited;
}

// Reachable from `awaited`: the ranks that wait for none; `awaited` if all wait
// in a cycle.
std::vector<int> Missing(const std::vector<int>& awaited,
                         const RanksProgress& told) {
  std::set<int> seen(awaited.begin(), awaited.end()), missing;
  for (std::vector<int> next = awaited; !next.empty();) {
    const int rank = next.back();
    next.pop_back();
    bool waits = false;
    for (const auto& [channel, ranks] : told) {
      const auto own = ranks.find(rank);
      if (own == ranks.end()) continue;
      waits = waits || (own->second.inside.number > 0 && !own->second.works);
      for (const int other : AwaitedBy(own->second, ranks)) {
        if (seen.insert(other).second) next.push_back(other);
      }
    }
    if (!waits) missing.insert(rank);
  }
  if (missing.empty()) return awaited;
  return {missing.begin(), missing.end()};
}

// The position of a rank that others wait for in `call`, or that has passed it;
// empty: it waits in it as well.
std::string Whereabouts(const ChannelProgress& there,
                        const CollectiveMark& call) {
  const auto& [channel, issued, inside, finished, works] = there;
  if (issued.number == 0) return " issued nothing here";
  const std::string is_in =
      inside.number == 0 ? "" : absl::StrCat("is in ", inside.Text());
  if (finished.number >= call.number) {
    return absl::StrCat(" has finished it", is_in.empty() ? "" : " and ",
                        is_in);
  }
  if (inside.number >= call.number) {
    return works ? " is doing its share" : "";
  }
  std::string text = issued.number < call.number
                         ? absl::StrCat(" issued ", issued.Text(), " last")
                         : " issued it";
  if (finished.number < issued.number) {
    absl::StrAppend(&text, ", but its stream ",
                    is_in.empty() ? "has not reached it" : is_in);
  }
  return text;
}

// "; it is in #7 of channel "gather", ..., and waits for rank 2" for all
// channels but `here`.
std::string Elsewhere(int rank, const std::string& here,
                      const RanksProgress& told) {
  std::string text;
  for (const auto& [channel, ranks] : told) {
    const auto one = ranks.find(rank);
    if (channel == here || one == ranks.end()) continue;
    if (one->second.inside.number == 0) continue;
    absl::StrAppend(&text, text.empty() ? "; it is in " : " and ",
                    one->second.inside.TextIn(channel));
    const std::vector<int> awaited = AwaitedBy(one->second, ranks);
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

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveMark, number, signature)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ChannelProgress, channel, issued, inside,
                                   finished)

std::string ProgressText(const std::vector<ChannelProgress>& channels) {
  std::string text;
  for (const ChannelProgress& one : channels) {
    text += Json(one).dump(-1, ' ', false, Json::error_handler_t::replace);
    text += '\n';
  }
  return text;
}

std::vector<ChannelProgress> ParseProgress(const std::string& text) {
  std::vector<ChannelProgress> channels;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    try {
      channels.push_back(json);
    } catch (const Json::exception&) {  // not what ProgressText writes
    }
  }
  return channels;
}

Diagnosis Diagnose(const LateCollective& late, RanksProgress told) {
  Ranks& here = told[late.channel];
  for (const int member : late.members)
    here[member];  // may have reported nothing
  here[late.rank].inside = late.call;
  const std::string mismatch = Mismatch(late, here);
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
  for (const auto& [rank, there] : here) {
    if (rank == late.rank) continue;
    if (IsAwaited(there, late.call)) {
      awaited.push_back(rank);
      all_begun = all_begun && there.works;
    }
    const std::string one = Whereabouts(there, late.call);
    if (one.empty() || ++num_named > kMostNamed) continue;
    absl::StrAppend(&where, "; rank ", rank, one,
                    Elsewhere(rank, late.channel, told));
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
                           awaited.empty() ? " have begun, but did not finish "
                           : all_begun     ? " did not finish "
                                           : " did not arrive at ",
                           late.call.TextIn(late.channel), " within ",
                           absl::FormatDuration(late.timeout), where,
                           "; if a rank was only slow, raise "
                           "communication.timeout_seconds")),
          Missing(awaited, told)};
}

}  // namespace zero
