// How fast the processes of a run reach each other, one pair at a time.
#ifndef ZERO_ENGINE_COMM_LINKS_H_
#define ZERO_ENGINE_COMM_LINKS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/network.h"

namespace zero {

// Exchanges one text per process: returns all of them, in order. All processes
// call it.
// REQUIRES: `text` has at most kMaxTextBytes.
// Errors: those of the network, as for MeasureLinks.
inline constexpr size_t kMaxTextBytes = 1024;
absl::StatusOr<std::vector<std::string>> ExchangeTexts(Network& network,
                                                       const std::string& text,
                                                       absl::Duration timeout);

// One connection between two processes.
struct LinkSpeed {
  int from = 0, to = 0;
  absl::Duration latency;       // of a message of 8 bytes
  double bytes_per_second = 0;  // of a large one
};

// The pairs worth measuring: two processes of each host that has two, and the
// first processes of every two hosts; with many hosts, of neighbours only.
// `hosts`: the host of each process.
std::vector<std::pair<int, int>> LinksToMeasure(
    const std::vector<std::string>& hosts);

// Measures these pairs, without other traffic. All processes call it with the
// same pairs; process 0 gets the result, the others get an empty list.
absl::StatusOr<std::vector<LinkSpeed>> MeasureLinks(
    Network& network, const std::vector<std::pair<int, int>>& pairs,
    absl::Duration timeout);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LINKS_H_
