#include "engine/train/overlap_advice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// Three quarters on one channel, the rest on all of them alike.
WaitTimes MostlyFor(Channel channel) {
  WaitTimes waited;
  for (const Channel each : kChannels) waited[each] = 50;
  waited[channel] += 400;
  return waited;
}

std::string Advice(const Config& config, Channel channel) {
  return OverlapAdvice(
      config,
      {.waited = MostlyFor(channel), .ranks = 2, .cores = 2, .gathers = 8});
}

TEST(OverlapAdviceTest, ItNamesTheChannelAndItsShare) {
  Config config;
  config.zero_optimization.stage = 3;
  EXPECT_THAT(Advice(config, Channel::kGather),
              StartsWith("75 % is where parameters are gathered: "));
  EXPECT_THAT(Advice(config, Channel::kReduce),
              StartsWith("75 % is where gradients are reduced: "));
  EXPECT_THAT(Advice(config, Channel::kAcross),
              StartsWith("75 % is where gradients are added up across"));
  EXPECT_THAT(Advice(config, Channel::kScalar),
              StartsWith("75 % is where ranks agree on a few numbers"));
}

TEST(OverlapAdviceTest, WhatCostsNothingComesFirst) {
  Config config;
  config.zero_optimization.stage = 3;
  config.zero_optimization.overlap_comm = false;
  config.zero_optimization.stage3_prefetch_bucket_size = 0;
  EXPECT_THAT(Advice(config, Channel::kGather),
              EndsWith(": set zero_optimization.overlap_comm to true, or leave "
                       "zero_optimization.stage3_prefetch_bucket_size out"));
}

TEST(OverlapAdviceTest, TheKeyIsOneOfTheChannelThatWasWaitedFor) {
  Config config;
  config.zero_optimization.stage = 3;
  config.gradient_accumulation_steps = 4;
  const std::string gather = Advice(config, Channel::kGather);
  EXPECT_THAT(gather, HasSubstr("stage3_max_live_parameters (units stay for "
                                "their next use: down to one gather per step "
                                "instead of 8, more memory)"));
  EXPECT_THAT(gather, HasSubstr("stage to 2 (gathers once per step instead of "
                                "8 times"));
  EXPECT_THAT(gather, Not(HasSubstr("communication_data_type")));
  const std::string reduce = Advice(config, Channel::kReduce);
  EXPECT_THAT(reduce, Not(HasSubstr("stage3_")));
  EXPECT_THAT(reduce, HasSubstr("stage to 1 (reduces once per step instead of "
                                "4 times"));
  EXPECT_THAT(reduce, HasSubstr("communication_data_type to \"bf16\""));
  // No overlap hides an agreement, and it moves no bytes to speak of.
  config.zero_optimization.overlap_comm = false;
  EXPECT_THAT(
      Advice(config, Channel::kScalar),
      EndsWith("slowest: raise gradient_accumulation_steps, and with it "
               "train_batch_size, which changes training (a larger "
               "batch per agreement)"));
  EXPECT_THAT(Advice(config, Channel::kAcross), HasSubstr("overlap_comm"));
}

TEST(OverlapAdviceTest, NamesOnlyWhatTheRunDoesNotDoYet) {
  Config config;
  config.zero_optimization.stage = 3;
  // All units stay in place.
  config.gradient_accumulation_steps = 4;
  EXPECT_THAT(OverlapAdvice(config, {.waited = MostlyFor(Channel::kGather),
                                     .gathers = 1}),
              EndsWith(": raise train_micro_batch_size_per_gpu, and lower "
                       "gradient_accumulation_steps by the same factor (more "
                       "computation per "
                       "gather, more activations)"));
  config.gradient_accumulation_steps = 1;
  EXPECT_THAT(
      OverlapAdvice(config,
                    {.waited = MostlyFor(Channel::kGather), .gathers = 1}),
      EndsWith(": raise train_micro_batch_size_per_gpu, and with it "
               "train_batch_size, which changes training (more computation "
               "per gather, more activations)"));
  config.zero_optimization.stage = 1;
  EXPECT_THAT(Advice(config, Channel::kGather),
              EndsWith(": raise gradient_accumulation_steps, and with it "
                       "train_batch_size, which changes training (a larger "
                       "batch per gather)"));
  config.zero_optimization.allgather_bucket_size = 1000;
  EXPECT_THAT(Advice(config, Channel::kGather),
              HasSubstr("raise zero_optimization.allgather_bucket_size"));
  config.zero_optimization.stage = 0;
  config.communication.algorithm = CommunicationAlgorithm::kParameterServer;
  EXPECT_THAT(Advice(config, Channel::kReduce),
              HasSubstr(": set communication.algorithm to \"direct\""));
  config.communication.algorithm = CommunicationAlgorithm::kDirect;
  config.communication_data_type = DType::kBF16;
  EXPECT_THAT(Advice(config, Channel::kReduce),
              EndsWith(": raise gradient_accumulation_steps, and with it "
                       "train_batch_size, which changes training (a larger "
                       "batch per reduction)"));
  config.zero_optimization.reduce_bucket_size = 1000;
  EXPECT_THAT(Advice(config, Channel::kReduce),
              HasSubstr("raise zero_optimization.reduce_bucket_size"));
}

TEST(OverlapAdviceTest, RanksThatShareCoresAreTheCauseUnlessALinkIsSlow) {
  OverlapSituation situation = {
      .waited = MostlyFor(Channel::kReduce), .ranks = 3, .cores = 2};
  EXPECT_EQ(
      OverlapAdvice(Config(), situation),
      "run no more ranks than there are cores: 3 on 2 wait for each other");
  situation.link = "1MB/s,1ms";
  EXPECT_THAT(OverlapAdvice(Config(), situation),
              StartsWith("75 % is where gradients are reduced, over a link of "
                         "1MB/s,1ms: set communication_data_type"));
}

}  // namespace
}  // namespace zero
