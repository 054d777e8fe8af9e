// Where every rank is in its collectives, as ranks tell each other, and what
// that says about a collective that does not end.
#ifndef ZERO_ENGINE_COMM_PROGRESS_H_
#define ZERO_ENGINE_COMM_PROGRESS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zero {

// A collective of one channel. Number 0: none.
struct CollectiveMark {
  int64_t number = 0;     // of its channel, from 1
  std::string signature;  // Signature

  // "#7, all_reduce ...".
  std::string Text() const;
};

// One rank in one channel.
struct ChannelProgress {
  std::string channel;
  CollectiveMark issued;    // the last one
  CollectiveMark inside;    // what its stream is in, else what it launches
  CollectiveMark finished;  // the last one
};

// The channels of one rank as a text, and back. What is no such text is left
// out.
std::string ProgressText(const std::vector<ChannelProgress>& channels);
std::vector<ChannelProgress> ParseProgress(const std::string& text);

// Why a collective does not end.
struct Diagnosis {
  // "rank 1 differs from rank 0 at #3 of ...": they issued other collectives,
  // and no patience helps. Empty: as far as is known they did not.
  std::string mismatch;
  // Else who has not come to it, and where these are instead.
  std::string late;
  // The late ones that are in no collective themselves: for which, in the end,
  // everybody waits.
  std::vector<int> missing;
};

// `rank` waits in `call` of `channel`; `others`: what the other members told.
Diagnosis Diagnose(int rank, const std::string& channel,
                   const CollectiveMark& call,
                   const std::map<int, std::vector<ChannelProgress>>& others);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_PROGRESS_H_
