#include "engine/comm/channel.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace zero {

std::vector<int> MembersOf(Channel channel, int rank, int world, int shards) {
  std::vector<int> members;
  for (int other = 0; other < world; ++other) {
    const bool is_member =
        channel == Channel::kScalar ||
        (channel == Channel::kAcross ? other % shards == rank % shards
                                     : other / shards == rank / shards);
    if (is_member) members.push_back(other);
  }
  return members;
}

std::string ChannelText(const std::string& channel,
                        const std::vector<int>& members, int world) {
  const size_t size = members.size();
  if (size == static_cast<size_t>(world)) return channel;
  if (size <= 8) {
    return absl::StrCat(channel, " of ranks ", absl::StrJoin(members, ", "));
  }
  return absl::StrCat(channel, " of ranks ", members[0], ", ", members[1],
                      ", ..., ", members.back());
}

std::string RankNames(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const char* before = i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ";
    absl::StrAppend(&text, before, "rank ", ranks[i]);
  }
  return text;
}

std::string OnGpus(int num_gpus) {
  return absl::StrCat("on ", num_gpus, num_gpus == 1 ? " GPU" : " GPUs");
}

}  // namespace zero
