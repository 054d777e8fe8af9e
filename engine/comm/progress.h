// Where every rank is in its collectives, as ranks report it to each other, and
// the diagnosis of a collective that hangs.
#ifndef ZERO_ENGINE_COMM_PROGRESS_H_
#define ZERO_ENGINE_COMM_PROGRESS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace zero {

// One collective of a channel. Number 0: no collective.
struct CollectiveMark {
  int64_t number = 0;     // of its channel, from 1
  std::string signature;  // Signature

  // "#7, all_gather ...".
  std::string Text() const;
  // "#7 of channel "gather", all_gather ...".
  std::string TextIn(const std::string& channel) const;
};

// The position of one rank in one channel.
struct ChannelProgress {
  std::string channel;    // with its members, as ChannelText has it
  CollectiveMark issued;  // the last one
  CollectiveMark inside;  // the one its stream is in, else the one it launches
  CollectiveMark finished;  // the last one
  // The rank is doing its share of `inside`, and the others wait for it; false
  // if unknown.
  bool works = false;
};

// The ranks' reports, by channel and rank.
using RanksProgress = std::map<std::string, std::map<int, ChannelProgress>>;

// Writes the channels of one rank as a text, and reads it back. Malformed text
// is skipped; `works` is not in the text.
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

// Why a collective does not end, and who is to blame.
struct Diagnosis {
  // FailedPrecondition  "rank 1 differs from rank 0 at #3 of ...": they issued
  //                     different collectives; waiting is no help
  // DeadlineExceeded    else: which ranks are missing, and where they are
  absl::Status status;
  // The ranks that all others ultimately wait for: those that wait for nobody,
  // or, in a cycle, the late ones.
  std::vector<int> missing;
};
Diagnosis Diagnose(const LateCollective& late, RanksProgress told);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_PROGRESS_H_
