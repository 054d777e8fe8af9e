#include "engine/zero/host_wire.h"

#include <algorithm>
#include <limits>
#include <set>

#include "engine/comm/channel.h"
#include "engine/comm/rounds.h"

namespace zero {
namespace {

Channel ChannelOf(const Action& action) {
  switch (action.kind) {
    case ActionKind::kReduce:
      return Channel::kReduce;
    case ActionKind::kReduceAcross:
      return Channel::kAcross;
    default:
      return Channel::kGather;
  }
}

Collective CollectiveOf(const Transfer& transfer, BulkAlgorithm algorithm) {
  const bool sums = transfer.kind == Transfer::Kind::kSum;
  const bool even = transfer.partition.even();
  return {.kind = sums   ? even ? CollectiveKind::kReduceScatter
                                : CollectiveKind::kReduce
                  : even ? CollectiveKind::kAllGather
                         : CollectiveKind::kBroadcast,
          .name = "",
          .dtype = transfer.codec.dtype,
          .segments = {{nullptr, nullptr, transfer.elems}},
          .algorithm = algorithm};
}

class Counter {
 public:
  Counter(const Plan& plan, const HostsOptions& options)
      : world_(static_cast<int>(plan.world)),
        shards_(static_cast<int>(plan.shard.size)),
        ranks_(static_cast<int>(plan.world / options.num_hosts)),
        summed_together_(options.ranks_per_host > 0
                             ? static_cast<int>(options.ranks_per_host)
                             : ranks_),
        algorithm_(options.algorithm) {}

  // The bytes that `host` sends for a transfer on a channel, on which its ranks
  // may be in several groups.
  int64_t SentBy(int host, Channel channel, const Transfer& transfer) const {
    int64_t bytes = 0;
    std::set<int> counted;
    for (int rank = host * ranks_; rank < (host + 1) * ranks_; ++rank) {
      const std::vector<int> members =
          MembersOf(channel, rank, world_, shards_);
      if (!counted.insert(members.front()).second) continue;
      bytes += SentAmong(members, host, transfer);
    }
    return bytes;
  }

 private:
  int64_t SentAmong(const std::vector<int>& members, int host,
                    const Transfer& transfer) const {
    std::vector<int> processes, hosts;
    for (const int member : members) {
      processes.push_back(member / ranks_);
      hosts.push_back(member / summed_together_);
    }
    if (processes.front() == processes.back()) return 0;
    return Rounds(CollectiveOf(transfer, algorithm_), processes, host, hosts,
                  std::numeric_limits<int64_t>::max())
        .sent_bytes();
  }

  const int world_, shards_, ranks_, summed_together_;
  const BulkAlgorithm algorithm_;
};

}  // namespace

std::vector<HostWire> CountHostWire(const Plan& plan,
                                    const std::vector<Action>& actions,
                                    const HostsOptions& options) {
  const Counter counter(plan, options);
  const int64_t hosts = options.num_hosts;
  std::vector<HostWire> wires(hosts);
  for (int host = 0; host < hosts; ++host) {
    HostWire& wire = wires[host];
    for (const Action& action : actions) {
      for (const Transfer& transfer : TransfersOf(action, plan)) {
        (transfer.kind == Transfer::Kind::kSum ? wire.summed : wire.gathered) +=
            counter.SentBy(host, ChannelOf(action), transfer);
      }
    }
    // A rank's numbers go to each other rank in NumbersWire, and here once to
    // each other host.
    if (hosts > 1) {
      wire.numbers = NumbersWire(plan, options.tensor_norms) /
                     (plan.world - 1) * (plan.world / hosts) * (hosts - 1);
    }
  }
  return wires;
}

}  // namespace zero
