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

// The texts of all processes, in order: called by all.
// REQUIRES: `text` has at most kMaxTextBytes.
// Errors: those of the network, here and below.
inline constexpr size_t kMaxTextBytes = 1024;
absl::StatusOr<std::vector<std::string>> ExchangeTexts(Network& network,
                                                       const std::string& text,
                                                       absl::Duration timeout);

// One way between two processes.
struct LinkSpeed {
  int from = 0, to = 0;
  absl::Duration latency;       // of a message of 8 bytes
  double bytes_per_second = 0;  // of a large one
};

// The pairs worth measuring: two processes of each host that has two, and the
// first processes of every two hosts; with many hosts, of neighbours only.
// `hosts`: of each process.
std::vector<std::pair<int, int>> LinksToMeasure(
    const std::vector<std::string>& hosts);

// Measures these pairs, without other traffic: called by all with the same
// pairs. Process 0 gets the result; the others get none.
absl::StatusOr<std::vector<LinkSpeed>> MeasureLinks(
    Network& network, const std::vector<std::pair<int, int>>& pairs,
    absl::Duration timeout);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LINKS_H_
