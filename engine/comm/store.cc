#include "engine/comm/store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/channel.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::json;

constexpr char kFailureKey[] = "failure";
constexpr char kRefusalKey[] = "refusal";

std::string MeetingKey(const std::string& name, int rank) {
  return absl::StrCat(name, "/", rank);
}

struct Failure {
  absl::Status status;
  std::vector<int> missing;
};

// Reads what StoreFailure writes. Errors of the store also count as failures.
Failure ReadFailure(Store& store) {
  const auto text = store.Get(kFailureKey);
  if (!text.ok()) return {text.status(), {}};
  if (!text->has_value()) return {absl::OkStatus(), {}};
  const Json json = Json::parse(**text, nullptr, /*allow_exceptions=*/false);
  try {
    return {absl::Status(json.at("code").get<absl::StatusCode>(),
                         json.at("message").get<std::string>()),
            json.at("missing")};
  } catch (const Json::exception&) {  // of another program
    return {absl::InternalError(absl::StrCat("the run failed: ", **text)), {}};
  }
}

}  // namespace

absl::StatusOr<std::string> Await(Store& store, const std::string& key,
                                  const std::string& what,
                                  absl::Duration timeout,
                                  const Patience& patience) {
  const absl::Time deadline = absl::Now() + timeout;
  // Short at first: ranks of one machine arrive within milliseconds.
  absl::Duration pause = absl::Milliseconds(1);
  while (true) {
    ZERO_ASSIGN_OR_RETURN(absl::optional<std::string> value, store.Get(key));
    if (value.has_value()) return *std::move(value);
    ZERO_RETURN_IF_ERROR(StoredFailure(store));
    if (patience.ends()) {
      return absl::CancelledError(
          absl::StrCat(what, " did not arrive before a signal ended the wait"));
    }
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          what, " did not arrive within ", absl::FormatDuration(timeout)));
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
                     " did not arrive at \"", name, "\" within ",
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

absl::Status MatchInStore(Store& store, const std::string& who, int index,
                          const std::vector<std::string>& own,
                          absl::Duration timeout, const Patience& patience) {
  constexpr char kKey[] = "must match";
  if (index == 0) return store.Put(kKey, absl::StrJoin(own, "\n"));
  const std::string name = absl::StrCat(who, " ", index);
  const absl::StatusOr<std::string> text =
      Await(store, kKey, absl::StrCat(name, ": the config of rank 0"), timeout,
            patience);
  if (absl::IsCancelled(text.status())) {
    return StoreFailure(store, text.status());
  }
  ZERO_RETURN_IF_ERROR(text.status());
  const std::vector<std::string> wanted = absl::StrSplit(*text, '\n');
  for (size_t i = 0; i < std::max(own.size(), wanted.size()); ++i) {
    const std::string has = i < own.size() ? own[i] : "";
    const std::string want = i < wanted.size() ? wanted[i] : "";
    if (has == want) continue;
    return StoreFailure(
        store,
        absl::InvalidArgumentError(absl::StrCat(
            name, " differs from rank 0: it has \"", has, "\", rank 0 \"", want,
            "\"; start all ranks of the same program with the same "
            "config")));
  }
  return absl::OkStatus();
}

absl::Status StoreFailure(Store& store, const absl::Status& failure,
                          const std::vector<int>& missing) {
  const absl::StatusOr<std::string> first = store.PutFirst(
      kFailureKey, Json{{"code", failure.code()},
                        {"missing", missing},
                        {"message", std::string(failure.message())}}
                       .dump(-1, ' ', false, Json::error_handler_t::replace));
  // No one receives it: only this rank's own message remains.
  return first.ok() ? StoredFailure(store) : failure;
}

absl::Status StoredFailure(Store& store) { return ReadFailure(store).status; }

std::vector<int> StoredMissing(Store& store) {
  return ReadFailure(store).missing;
}

void StoreRefusal(Store& store, const std::string& reason) {
  store.Put(kRefusalKey, reason).IgnoreError();
}

std::string StoredRefusal(Store& store) {
  const auto reason = store.Get(kRefusalKey);
  if (!reason.ok() || !reason->has_value()) return "";
  return absl::StrCat("; refused: ", **reason);
}

absl::StatusOr<std::string> Store::PutFirst(const std::string& key,
                                            const std::string& value) {
  ZERO_ASSIGN_OR_RETURN(absl::optional<std::string> has,
                        Do(StoreCall::kPutFirst, key, value));
  return has.value_or("");
}

absl::StatusOr<absl::optional<std::string>> MemoryStore::Do(
    StoreCall call, const std::string& key, const std::string& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call == StoreCall::kPut) values_[key] = value;
  if (call == StoreCall::kPutFirst) values_.emplace(key, value);
  const auto it = values_.find(key);
  if (call == StoreCall::kPut || it == values_.end()) return absl::nullopt;
  return absl::make_optional(it->second);
}

}  // namespace zero
