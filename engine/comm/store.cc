#include "engine/comm/store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"

namespace zero {
namespace {

constexpr char kFailureKey[] = "failure";
constexpr char kRefusalKey[] = "refusal";

std::string MeetingKey(const std::string& name, int rank) {
  return absl::StrCat(name, "/", rank);
}

// What StoreFailure writes: the code, the missing ranks, the message, a line
// each.
struct Failure {
  std::string code, missing, message;

  explicit Failure(const std::string& text) {
    const std::vector<std::string> parts =
        absl::StrSplit(text, absl::MaxSplits('\n', 2));
    if (parts.size() != 3) return;
    code = parts[0];
    missing = parts[1];
    message = parts[2];
  }
};

}  // namespace

absl::StatusOr<std::string> Await(Store& store, const std::string& key,
                                  const std::string& what,
                                  absl::Duration timeout,
                                  const Patience& patience) {
  const absl::Time deadline = absl::Now() + timeout;
  // Short at first: ranks of one machine come within milliseconds.
  absl::Duration pause = absl::Milliseconds(1);
  while (true) {
    ZERO_ASSIGN_OR_RETURN(absl::optional<std::string> value, store.Get(key));
    if (value.has_value()) return *std::move(value);
    ZERO_RETURN_IF_ERROR(StoredFailure(store));
    if (patience.ends()) {
      return absl::CancelledError(
          absl::StrCat(what, " did not come before a signal ended the wait"));
    }
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          what, " did not come within ", absl::FormatDuration(timeout)));
    }
    absl::SleepFor(std::min(pause, left));
    pause = std::min(2 * pause, absl::Milliseconds(50));
  }
}

absl::Status MeetInStore(Store& store, const std::string& name, int rank,
                         int world, absl::Duration timeout) {
  return ExchangeInStore(store, name, rank, world, "", timeout).status();
}

absl::StatusOr<std::vector<std::string>> ExchangeInStore(
    Store& store, const std::string& name, int rank, int world,
    const std::string& text, absl::Duration timeout) {
  ZERO_RETURN_IF_ERROR(store.Put(MeetingKey(name, rank), text));
  std::vector<std::string> texts;
  const absl::Time deadline = absl::Now() + timeout;
  for (int other = 0; other < world; ++other) {
    const absl::Duration left =
        std::max(deadline - absl::Now(), absl::ZeroDuration());
    absl::StatusOr<std::string> met =
        Await(store, MeetingKey(name, other), "", left);
    if (met.ok()) {
      texts.push_back(*std::move(met));
      continue;
    }
    if (!absl::IsDeadlineExceeded(met.status())) return met.status();
    ZERO_ASSIGN_OR_RETURN(const std::vector<int> missing,
                          MissingInStore(store, name, world));
    return absl::DeadlineExceededError(
        absl::StrCat(missing.empty() ? "a rank" : RankNames(missing),
                     " did not come to \"", name, "\" within ",
                     absl::FormatDuration(timeout), StoredRefusal(store)));
  }
  return texts;
}

absl::StatusOr<std::vector<int>> MissingInStore(Store& store,
                                                const std::string& name,
                                                int world) {
  std::vector<int> missing;
  for (int rank = 0; rank < world; ++rank) {
    ZERO_ASSIGN_OR_RETURN(const auto come, store.Get(MeetingKey(name, rank)));
    if (!come.has_value()) missing.push_back(rank);
  }
  return missing;
}

absl::Status StoreFailure(Store& store, const absl::Status& failure,
                          const std::vector<int>& missing) {
  const absl::StatusOr<std::string> first = store.PutFirst(
      kFailureKey,
      absl::StrCat(static_cast<int>(failure.code()), "\n",
                   absl::StrJoin(missing, ","), "\n", failure.message()));
  // Nobody hears it: this rank's own words are all there is.
  return first.ok() ? StoredFailure(store) : failure;
}

absl::Status StoredFailure(Store& store) {
  ZERO_ASSIGN_OR_RETURN(const auto text, store.Get(kFailureKey));
  if (!text.has_value()) return absl::OkStatus();
  const Failure failure(*text);
  int code = 0;
  if (!absl::SimpleAtoi(failure.code, &code) || code == 0) {
    return absl::InternalError(absl::StrCat("the run failed: ", *text));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), failure.message);
}

std::vector<int> StoredMissing(Store& store) {
  std::vector<int> ranks;
  const auto text = store.Get(kFailureKey);
  if (!text.ok() || !text->has_value()) return ranks;
  for (const absl::string_view one :
       absl::StrSplit(Failure(**text).missing, ',', absl::SkipEmpty())) {
    int rank = 0;
    if (absl::SimpleAtoi(one, &rank)) ranks.push_back(rank);
  }
  return ranks;
}

void StoreRefusal(Store& store, const std::string& reason) {
  store.Put(kRefusalKey, reason).IgnoreError();
}

std::string StoredRefusal(Store& store) {
  const auto reason = store.Get(kRefusalKey);
  if (!reason.ok() || !reason->has_value()) return "";
  return absl::StrCat("; refused: ", **reason);
}

absl::Status MemoryStore::Put(const std::string& key,
                              const std::string& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  values_[key] = value;
  return absl::OkStatus();
}

absl::StatusOr<std::string> MemoryStore::PutFirst(const std::string& key,
                                                  const std::string& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  return values_.emplace(key, value).first->second;
}

absl::StatusOr<absl::optional<std::string>> MemoryStore::Get(
    const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = values_.find(key);
  if (it == values_.end()) return absl::optional<std::string>();
  return absl::optional<std::string>(it->second);
}

}  // namespace zero
