#include "engine/train/overlap_advice.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zero {
namespace {

// What comes over a channel, and why a rank waits there.
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
  }
  return "?";
}

void AdviseOnGathers(const Config& config, const OverlapSituation& situation,
                     std::vector<std::string>* advice) {
  const ZeroConfig& zero = config.zero_optimization;
  if (zero.stage < 3) {
    if (zero.allgather_bucket_size < ZeroConfig().allgather_bucket_size) {
      advice->push_back(
          "raise zero_optimization.allgather_bucket_size (fewer, larger "
          "gathers)");
    }
    advice->push_back(
        "raise gradient_accumulation_steps (a larger batch per gather)");
    return;
  }
  if (zero.stage3_prefetch_bucket_size == 0) {
    advice->push_back(
        "leave zero_optimization.stage3_prefetch_bucket_size out");
  }
  if (situation.gathers > situation.fewest_gathers) {
    advice->push_back(absl::StrFormat(
        "raise zero_optimization.stage3_max_live_parameters (units stay for "
        "their next use: down to %.3g gathers per step instead of %.3g, more "
        "memory)",
        situation.fewest_gathers, situation.gathers));
  }
  if (config.gradient_accumulation_steps > 1 && situation.gathers > 1) {
    advice->push_back(absl::StrFormat(
        "set zero_optimization.stage to 2 (gathers once per step instead of "
        "%.3g times, more memory)",
        situation.gathers));
  }
  advice->push_back(
      "raise train_micro_batch_size_per_gpu (more computation per gather, more "
      "activations)");
}

void AdviseOnReductions(const Config& config,
                        std::vector<std::string>* advice) {
  const ZeroConfig& zero = config.zero_optimization;
  if (zero.reduce_bucket_size < ZeroConfig().reduce_bucket_size) {
    advice->push_back(
        "raise zero_optimization.reduce_bucket_size (fewer, larger "
        "reductions)");
  }
  if (zero.stage >= 2 && config.gradient_accumulation_steps > 1) {
    advice->push_back(absl::StrCat(
        "set zero_optimization.stage to 1 (reduces once per step instead of ",
        config.gradient_accumulation_steps, " times, more memory)"));
  }
  if (config.communication_data_type == DType::kF32) {
    advice->push_back(
        "set communication_data_type to \"bf16\" (half the bytes of "
        "gradients, rounded)");
  }
  advice->push_back(
      zero.stage >= 2
          ? "raise train_micro_batch_size_per_gpu (more computation per "
            "reduction, more activations)"
          : "raise gradient_accumulation_steps (a larger batch per reduction)");
}

void AdviseOnGroups(const Config& config, std::vector<std::string>* advice) {
  if (config.communication_data_type == DType::kF32) {
    advice->push_back(
        "set communication_data_type to \"bf16\" (half the bytes of "
        "gradients, rounded)");
  }
  advice->push_back(
      "raise gradient_accumulation_steps (groups add up once per step)");
  advice->push_back(
      "raise zero_optimization.mics_shard_size (fewer groups, larger ones)");
}

}  // namespace

std::string OverlapAdvice(const Config& config,
                          const OverlapSituation& situation) {
  const WaitTimes& waited = situation.waited;
  if (situation.link.empty() && situation.ranks > situation.cores) {
    return absl::StrFormat(
        "run at most %d ranks: %d ranks on %d cores wait for each other",
        situation.cores, situation.ranks, situation.cores);
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
  switch (channel) {
    case Channel::kGather:
      AdviseOnGathers(config, situation, &advice);
      break;
    case Channel::kReduce:
      AdviseOnReductions(config, &advice);
      break;
    case Channel::kAcross:
      AdviseOnGroups(config, &advice);
      break;
    case Channel::kScalar:
      advice.push_back(
          "raise gradient_accumulation_steps (a larger batch per agreement)");
      break;
  }
  if (advice.size() > 2) advice.resize(2);
  return absl::StrFormat(
      "%.0f %% is where %s%s: %s", 100 * waited[channel] / waited.total(),
      Awaited(channel),
      situation.link.empty() ? "" : ", over a link of " + situation.link,
      absl::StrJoin(advice, ", or "));
}

}  // namespace zero
