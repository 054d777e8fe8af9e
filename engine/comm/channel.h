// The channels between the ranks of a run: which ranks are on each, and how
// long computation waited for it.
#ifndef ZERO_ENGINE_COMM_CHANNEL_H_
#define ZERO_ENGINE_COMM_CHANNEL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

namespace zero {

// The four channels of a Rank (rank.h); the link between a device and its host,
// which carries copies and stands for the host's computation; and the disk.
enum class Channel { kGather, kReduce, kAcross, kScalar, kHost, kDisk };
inline constexpr Channel kChannels[] = {Channel::kGather, Channel::kReduce,
                                        Channel::kAcross, Channel::kScalar};
// The channels that computation may wait for.
inline constexpr Channel kWaits[] = {Channel::kGather, Channel::kReduce,
                                     Channel::kAcross, Channel::kScalar,
                                     Channel::kHost,   Channel::kDisk};

// "gather", "reduce", "across", "scalar", "host", "disk".
constexpr const char* ChannelName(Channel channel) {
  constexpr const char* kNames[] = {"gather", "reduce", "across",
                                    "scalar", "host",   "disk"};
  return kNames[static_cast<size_t>(channel)];
}

// The ranks on a channel of `rank`, including `rank`, ascending: its group
// (gather, reduce), its place in every group (across), all ranks (scalar).
// REQUIRES: `shards`, the ranks of a group, divides `world`.
std::vector<int> MembersOf(Channel channel, int rank, int world, int shards);

// "reduce"; "reduce of ranks 2, 3" if not all of `world` ranks are on it.
std::string ChannelText(const std::string& channel,
                        const std::vector<int>& members, int world);

// "rank 0", "rank 0 and rank 2", "rank 0, rank 1 and rank 3".
std::string RankNames(const std::vector<int>& ranks);

// "on 2 GPUs".
std::string OnGpus(int num_gpus);

// Milliseconds that computation waited, per channel: for communication and host
// work that were not hidden, and for late ranks.
struct WaitTimes {
  std::array<double, std::size(kWaits)> ms = {};

  double& operator[](Channel channel) {
    return ms[static_cast<size_t>(channel)];
  }
  double operator[](Channel channel) const {
    return ms[static_cast<size_t>(channel)];
  }
  double total() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }
  // The channel with the longest wait; the first of equals.
  Channel longest() const {
    return kWaits[std::max_element(ms.begin(), ms.end()) - ms.begin()];
  }

  WaitTimes& operator+=(const WaitTimes& other) {
    for (size_t i = 0; i < ms.size(); ++i) ms[i] += other.ms[i];
    return *this;
  }
  WaitTimes operator-(const WaitTimes& other) const {
    WaitTimes difference = *this;
    for (size_t i = 0; i < ms.size(); ++i) difference.ms[i] -= other.ms[i];
    return difference;
  }
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_CHANNEL_H_
