// Where every rank is in its collectives, as ranks tell each other, and what
// that says about a collective that does not end.
#ifndef ZERO_ENGINE_COMM_PROGRESS_H_
#define ZERO_ENGINE_COMM_PROGRESS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace zero {

// A collective of one channel. Number 0: none.
struct CollectiveMark {
  int64_t number = 0;     // of its channel, from 1
  std::string signature;  // Signature

  // "#7, all_gather ...".
  std::string Text() const;
  // "#7 of channel "gather", all_gather ...".
  std::string TextIn(const std::string& channel) const;
};

// One rank in one channel.
struct ChannelProgress {
  std::string channel;      // with its members, as ChannelText has it
  CollectiveMark issued;    // the last one
  CollectiveMark inside;    // what its stream is in, else what it launches
  CollectiveMark finished;  // the last one
  // It does its share of `inside`, and the others wait for that; false where
  // nobody knows.
  bool works = false;
};

// By channel and rank: what the ranks on it have told.
using RanksProgress = std::map<std::string, std::map<int, ChannelProgress>>;

// The channels of one rank as a text, and back. What is no such text is left
// out; `works` is not in it.
std::string ProgressText(const std::vector<ChannelProgress>& channels);
std::vector<ChannelProgress> ParseProgress(const std::string& text);

// A rank that has waited in a collective for too long.
struct LateCollective {
  std::string backend;  // "nccl", for the message
  int rank = 0;
  std::string channel;
  std::vector<int> members;  // of the channel
  CollectiveMark call;
  absl::Duration timeout;
};

// Why a collective does not end.
struct Diagnosis {
  // FailedPrecondition  "rank 1 differs from rank 0 at #3 of ...": they issued
  //                     other collectives, and no patience helps
  // DeadlineExceeded    else: who has not come to it, and where these are
  absl::Status status;
  // For whom everybody waits in the end: those that wait for nobody themselves;
  // in a circle, the late ones.
  std::vector<int> missing;
};
Diagnosis Diagnose(const LateCollective& late, RanksProgress told);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_PROGRESS_H_
