// Bytes that a host sends to the others in a step, if each is one process with
// the same number of consecutive ranks: a pure function of the plan and the
// schedule.
#ifndef ZERO_ENGINE_ZERO_HOST_WIRE_H_
#define ZERO_ENGINE_ZERO_HOST_WIRE_H_

#include <cstdint>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/zero/plan.h"
#include "engine/zero/schedule.h"

namespace zero {

// The bytes that one host sends, for the collectives of StepWire.
struct HostWire {
  int64_t summed = 0;    // on their way to a sum: gradients, looked-up rows
  int64_t gathered = 0;  // parameters, rows, and sums on their way to all
  int64_t numbers = 0;   // NumbersWire

  int64_t sent() const { return summed + gathered + numbers; }
  bool operator==(const HostWire&) const = default;
};

struct HostsOptions {
  int64_t num_hosts = 1;  // divides the world
  // kHierarchical: sums are formed first over this many consecutive ranks.
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  int64_t ranks_per_host = 0;  // 0: those of a host
  bool tensor_norms = false;   // see NumbersWire
};

// One entry per host, in order. For a sum of S bytes over n ranks, k of them
// here, a host sends k (n - k) / n S directly and (n - k) / n S hierarchically.
// For S bytes gathered, it sends k / n S to each other host with some of the n
// ranks. A server's host sends everything to each other host, and those send it
// their ranks' gradients.
std::vector<HostWire> CountHostWire(const Plan& plan,
                                    const std::vector<Action>& actions,
                                    const HostsOptions& options);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_HOST_WIRE_H_
