#include "tools/cli/plan_hosts.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;
using TableLines = std::vector<std::pair<std::string, std::string>>;

// Adds one row for neighbouring hosts with equal bytes.
void AddRows(const char* how, const std::vector<HostWire>& wires,
             TableLines* rows) {
  for (size_t first = 0; first < wires.size();) {
    size_t end = first + 1;
    while (end < wires.size() && wires[end] == wires[first]) ++end;
    const HostWire& wire = wires[first];
    const bool one = end == first + 1;
    rows->push_back(
        {absl::StrCat(how, ", host ", first,
                      one ? "" : absl::StrCat(" to ", end - 1)),
         absl::StrFormat(
             "%s bytes%s: %s to be summed, %s gathered, %s of norm and "
             "agreements",
             WithCommas(wire.sent()), one ? "" : " each",
             WithCommas(wire.summed), WithCommas(wire.gathered),
             WithCommas(wire.numbers))});
    first = end;
  }
}

Json AsJson(const std::vector<HostWire>& wires) {
  Json hosts = Json::array();
  for (const HostWire& wire : wires) {
    hosts.push_back({{"sent", wire.sent()},
                     {"summed", wire.summed},
                     {"gathered", wire.gathered},
                     {"numbers", wire.numbers}});
  }
  return hosts;
}

}  // namespace

HostWires::HostWires(const Plan& plan, const std::vector<Action>& actions,
                     int64_t num_hosts, const Config& config, bool tensor_norms)
    : ranks_per_host_(plan.world / num_hosts) {
  HostsOptions options{.num_hosts = num_hosts, .tensor_norms = tensor_norms};
  flat_ = CountHostWire(plan, actions, options);
  if (!plan.owners.even()) return;  // a server sums everything alone
  options.algorithm = BulkAlgorithm::kHierarchical;
  options.ranks_per_host = config.communication.ranks_per_host;
  by_hosts_ = CountHostWire(plan, actions, options);
}

void HostWires::Print(Console* console) const {
  TableLines rows;
  AddRows("flat", flat_, &rows);
  AddRows("hierarchical", by_hosts_, &rows);
  if (by_hosts_.empty()) {
    rows.push_back({"formula",
                    "the server's host sends the parameters to every other "
                    "host, which sends the gradients of each of its ranks"});
  } else {
    rows.push_back(
        {"formula, flat",
         "of n ranks a host with k sends k (n - k) / n of the bytes to be "
         "summed, and to every other host k / n of those to be gathered"});
    rows.push_back({"hierarchical", "(n - k) / n of the bytes to be summed"});
  }
  console->Table(
      absl::StrFormat("bytes sent between %s per step, each one process of %s",
                      Counted(static_cast<int64_t>(flat_.size()), "host"),
                      Counted(ranks_per_host_, "rank")),
      rows);
}

Json HostWires::ToJson() const {
  Json json = {{"flat", AsJson(flat_)}};
  if (!by_hosts_.empty()) json["hierarchical"] = AsJson(by_hosts_);
  return json;
}

}  // namespace zero
