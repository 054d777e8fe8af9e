#include "engine/train/overlap_advice.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zero {
namespace {

// A channel's content, and why a rank waits there.
const char* Awaited(Channel channel) {
  switch (channel) {
    case Channel::kGather:
      return "parameters are gathered";
    case Channel::kReduce:
      return "gradients are reduced";
    case Channel::kAcross:
      return "gradients are added up across groups";
    case Channel::kScalar:
      return "ranks agree on a few numbers and the fastest waits for the "
             "slowest";
    case Channel::kHost:
      return "states come from the host's memory and are updated there";
    case Channel::kDisk:
      return "states come from the disk (nvme_path) and go back";
  }
  return "?";
}

// A setting that helps if a run waits for a channel.
struct Rule {
  Channel channel;
  bool applies;
  std::string text;
};

// The rules for a run's longest wait, the best first.
std::vector<Rule> RulesFor(const Config& config,
                           const OverlapSituation& situation) {
  const ZeroConfig& zero = config.zero_optimization;
  const int64_t micro_steps = config.gradient_accumulation_steps;
  const bool fp32 = config.communication_data_type == DType::kF32;
  const bool fetches = zero.offload_param != OffloadDevice::kNone;
  const bool reads = zero.offload_param == OffloadDevice::kNvme;
  // Such units are gathered and fetched once per step, whatever the
  // micro-batch.
  const bool units_stay = situation.gathers == 1;
  const auto larger_batch = [](const std::string& fewer) {
    return absl::StrCat(
        "train with a larger batch: raise gradient_accumulation_steps and "
        "train_batch_size (fewer ",
        fewer, " per token; changes results)");
  };
  const auto larger_micro_batch = [&](const std::string& per) {
    const std::string more =
        absl::StrCat("more computation per ", per, ", more activations");
    return micro_steps > 1
               ? absl::StrCat(
                     "raise train_micro_batch_size_per_gpu, and lower "
                     "gradient_accumulation_steps by the same factor (",
                     more, ")")
               : absl::StrCat(
                     "train with a larger batch: raise "
                     "train_micro_batch_size_per_gpu and train_batch_size (",
                     more, "; changes results)");
  };
  const std::string without_offload_param =
      "leave zero_optimization.offload_param out (parameters on the device, "
      "more of its memory)";
  const std::string bf16 =
      "set communication_data_type to \"bf16\" (half the bytes of gradients, "
      "rounded)";
  return {
      {Channel::kGather,
       zero.stage < 3 &&
           zero.allgather_bucket_size < ZeroConfig().allgather_bucket_size,
       "raise zero_optimization.allgather_bucket_size (fewer, larger gathers)"},
      {Channel::kGather, zero.stage < 3, larger_batch("gathers")},
      {Channel::kGather,
       zero.stage == 3 && zero.stage3_prefetch_bucket_size == 0,
       "leave zero_optimization.stage3_prefetch_bucket_size out"},
      {Channel::kGather, zero.stage == 3 && situation.gathers > 1,
       absl::StrFormat(
           "raise zero_optimization.stage3_max_live_parameters (units stay for "
           "their next use: down to one gather per step instead of %.3g, more "
           "memory)",
           situation.gathers)},
      {Channel::kGather,
       zero.stage == 3 && micro_steps > 1 && situation.gathers > 1,
       absl::StrFormat("set zero_optimization.stage to 2 (gathers once per "
                       "step instead of %.3g times, more memory)",
                       situation.gathers)},
      {Channel::kGather, zero.stage == 3 && !units_stay,
       larger_micro_batch("gather")},
      {Channel::kGather, zero.stage == 3, larger_batch("gathers")},
      {Channel::kReduce,
       zero.reduce_bucket_size < ZeroConfig().reduce_bucket_size,
       "raise zero_optimization.reduce_bucket_size (fewer, larger reductions)"},
      {Channel::kReduce, zero.stage >= 2 && micro_steps > 1,
       absl::StrCat("set zero_optimization.stage to 1 (reduces once per step "
                    "instead of ",
                    micro_steps, " times, more memory)")},
      {Channel::kReduce, fp32, bf16},
      {Channel::kReduce, zero.stage >= 2, larger_micro_batch("reduction")},
      {Channel::kReduce, zero.stage < 2, larger_batch("reductions")},
      {Channel::kAcross, fp32, bf16},
      {Channel::kAcross, true, larger_batch("sums over groups")},
      {Channel::kAcross, true,
       "raise zero_optimization.mics_shard_size (fewer groups, larger ones)"},
      {Channel::kHost, fetches && !units_stay, larger_micro_batch("fetch")},
      {Channel::kHost, fetches, without_offload_param},
      {Channel::kHost, true, larger_batch("updates")},
      {Channel::kHost, true,
       "leave zero_optimization.offload_optimizer out (all on the device, more "
       "of its memory)"},
      {Channel::kDisk, reads && !units_stay, larger_micro_batch("fetch")},
      {Channel::kDisk, reads, without_offload_param},
      {Channel::kDisk, true, larger_batch("updates")},
      {Channel::kDisk, true,
       "set zero_optimization.offload_optimizer.device to \"cpu\" (more of the "
       "host's memory)"},
      {Channel::kScalar, true, larger_batch("agreements")},
  };
}

}  // namespace

std::string OverlapAdvice(const Config& config,
                          const OverlapSituation& situation) {
  const WaitTimes& waited = situation.waited;
  if (situation.link.empty() && situation.ranks > situation.cores) {
    return absl::StrFormat(
        "run no more ranks than there are cores: %d on %d wait for each other",
        situation.ranks, situation.cores);
  }
  const Channel channel = waited.longest();
  std::vector<std::string> advice;
  if (channel != Channel::kScalar) {
    if (config.communication.algorithm ==
        CommunicationAlgorithm::kParameterServer) {
      advice.push_back(
          "set communication.algorithm to \"direct\" (all ranks send and "
          "update alike)");
    }
    if (!config.zero_optimization.overlap_comm) {
      advice.push_back("set zero_optimization.overlap_comm to true");
    }
  }
  for (Rule& rule : RulesFor(config, situation)) {
    if (rule.channel == channel && rule.applies) advice.push_back(rule.text);
  }
  if (advice.size() > 2) advice.resize(2);
  return absl::StrFormat(
      "%.0f %% is where %s%s: %s", 100 * waited[channel] / waited.total(),
      Awaited(channel),
      situation.link.empty() ? "" : ", over a link of " + situation.link,
      absl::StrJoin(advice, ", or "));
}

}  // namespace zero
