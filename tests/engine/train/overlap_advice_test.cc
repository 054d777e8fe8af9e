#include "engine/train/overlap_advice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(OverlapAdviceTest, WhatCostsNothingComesFirst) {
  Config config;
  config.zero_optimization.stage = 3;
  config.zero_optimization.overlap_comm = false;
  config.zero_optimization.stage3_prefetch_bucket_size = 0;
  EXPECT_EQ(OverlapAdvice(config),
            "set zero_optimization.overlap_comm to true, or leave "
            "zero_optimization.stage3_prefetch_bucket_size out");
}

TEST(OverlapAdviceTest, NamesOnlyWhatTheRunDoesNotDoYet) {
  Config config;
  config.zero_optimization.stage = 3;
  EXPECT_THAT(OverlapAdvice(config), HasSubstr("stage3_max_live_parameters"));
  config.zero_optimization.stage3_max_live_parameters = 1'000'000'000;
  EXPECT_THAT(OverlapAdvice(config),
              Not(HasSubstr("stage3_max_live_parameters")));
  config.gradient_accumulation_steps = 4;
  EXPECT_THAT(OverlapAdvice(config),
              StartsWith("set zero_optimization.stage to 1 (reduces once per "
                         "step instead of 4 times"));
  config.zero_optimization.stage = 0;
  EXPECT_THAT(OverlapAdvice(config), HasSubstr("communication_data_type"));
  config.communication.algorithm = CommunicationAlgorithm::kParameterServer;
  EXPECT_THAT(OverlapAdvice(config),
              StartsWith("set communication.algorithm to \"direct\""));
  config.communication.algorithm = CommunicationAlgorithm::kDirect;
  config.communication_data_type = DType::kBF16;
  EXPECT_EQ(OverlapAdvice(config),
            "raise gradient_accumulation_steps (a larger batch per "
            "reduction)");
}

}  // namespace
}  // namespace zero
