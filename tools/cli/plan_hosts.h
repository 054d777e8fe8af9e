// The part of `zero plan` about bytes between hosts.
#ifndef ZERO_TOOLS_CLI_PLAN_HOSTS_H_
#define ZERO_TOOLS_CLI_PLAN_HOSTS_H_

#include <cstdint>
#include <vector>

#include "engine/config/config.h"
#include "engine/train/console.h"
#include "engine/zero/host_wire.h"
#include "nlohmann/json_fwd.hpp"

namespace zero {

// Bytes of a step between hosts of one process each: with direct sums, and with
// sums by host first.
class HostWires {
 public:
  HostWires() = default;
  // REQUIRES: num_hosts divides the plan's world.
  HostWires(const Plan& plan, const std::vector<Action>& actions,
            int64_t num_hosts, const Config& config, bool tensor_norms);

  void Print(Console* console) const;
  // {"flat": [of each host], "hierarchical": [...]}
  nlohmann::ordered_json ToJson() const;

 private:
  int64_t ranks_per_host_ = 0;
  std::vector<HostWire> flat_, by_hosts_;  // by host
};

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_PLAN_HOSTS_H_
