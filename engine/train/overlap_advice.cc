#include "engine/train/overlap_advice.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/zero/schedule.h"

namespace zero {

std::string OverlapAdvice(const Config& config) {
  const ZeroConfig& zero = config.zero_optimization;
  std::vector<std::string> advice;
  if (config.communication.algorithm ==
      CommunicationAlgorithm::kParameterServer) {
    advice.push_back(
        "set communication.algorithm to \"direct\" (all ranks send and update "
        "alike)");
  }
  if (!zero.overlap_comm) {
    advice.push_back("set zero_optimization.overlap_comm to true");
  }
  if (zero.stage == 3 && zero.stage3_prefetch_bucket_size == 0) {
    advice.push_back("leave zero_optimization.stage3_prefetch_bucket_size out");
  }
  if (zero.stage == 3 &&
      zero.stage3_max_live_parameters == GatherPolicy::kAuto) {
    advice.push_back(
        "raise zero_optimization.stage3_max_live_parameters (units stay from "
        "forward to backward: fewer gathers, more memory)");
  }
  if (zero.stage >= 2 && config.gradient_accumulation_steps > 1) {
    advice.push_back(absl::StrCat(
        "set zero_optimization.stage to 1 (reduces once per step instead of ",
        config.gradient_accumulation_steps, " times, more memory)"));
  }
  if (config.communication_data_type == DType::kF32) {
    advice.push_back(
        "set communication_data_type to \"bf16\" (half the bytes of "
        "gradients, rounded)");
  }
  advice.push_back(
      zero.stage >= 2
          ? "raise train_micro_batch_size_per_gpu (more computation per byte, "
            "more activations)"
          : "raise gradient_accumulation_steps (a larger batch per reduction)");
  if (advice.size() > 2) advice.resize(2);
  return absl::StrJoin(advice, ", or ");
}

}  // namespace zero
