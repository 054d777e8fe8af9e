#include "engine/train/overlap_advice.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::AllOf;
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
      EndsWith("slowest: train with a larger batch: raise "
               "gradient_accumulation_steps and train_batch_size (fewer "
               "agreements per token; changes results)"));
  EXPECT_THAT(Advice(config, Channel::kAcross), HasSubstr("overlap_comm"));
}

TEST(OverlapAdviceTest, NamesOnlyWhatTheRunDoesNotDoYet) {
  Config config;
  config.zero_optimization.stage = 3;
  // All units stay in place: no split of the batch gathers less.
  const OverlapSituation units_stay = {.waited = MostlyFor(Channel::kGather),
                                       .gathers = 1};
  for (const int64_t micro_steps : {1, 4}) {
    config.gradient_accumulation_steps = micro_steps;
    EXPECT_THAT(
        OverlapAdvice(config, units_stay),
        EndsWith("gathered: train with a larger batch: raise "
                 "gradient_accumulation_steps and train_batch_size (fewer "
                 "gathers per token; changes results)"));
  }
  config.gradient_accumulation_steps = 1;
  EXPECT_THAT(Advice(config, Channel::kGather),
              EndsWith(", or train with a larger batch: raise "
                       "train_micro_batch_size_per_gpu and train_batch_size "
                       "(more computation per gather, more activations; "
                       "changes results)"));
  config.zero_optimization.stage = 1;
  EXPECT_THAT(Advice(config, Channel::kGather),
              EndsWith(": train with a larger batch: raise "
                       "gradient_accumulation_steps and train_batch_size "
                       "(fewer gathers per token; changes results)"));
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
              EndsWith(": train with a larger batch: raise "
                       "gradient_accumulation_steps and train_batch_size "
                       "(fewer reductions per token; changes results)"));
  config.zero_optimization.reduce_bucket_size = 1000;
  EXPECT_THAT(Advice(config, Channel::kReduce),
              HasSubstr("raise zero_optimization.reduce_bucket_size"));
}

constexpr char kFetchLess[] =
    ": raise train_micro_batch_size_per_gpu, and lower "
    "gradient_accumulation_steps by the same factor (more computation per "
    "fetch, more activations), or leave zero_optimization.offload_param out "
    "(parameters on the device, more of its memory)";

// Every micro-step fetches the parameters, but only the last updates.
TEST(OverlapAdviceTest, ParametersOfTheHostAreFetchedInEveryMicroStep) {
  Config config;
  config.zero_optimization.stage = 3;
  config.gradient_accumulation_steps = 4;
  config.zero_optimization.set_offload(Offload::kAll);
  EXPECT_THAT(Advice(config, Channel::kHost), EndsWith(kFetchLess));
  // Units that stay in place are fetched once.
  EXPECT_THAT(OverlapAdvice(
                  config, {.waited = MostlyFor(Channel::kHost), .gathers = 1}),
              AllOf(HasSubstr(": leave zero_optimization.offload_param out"),
                    EndsWith("(fewer updates per token; changes results)")));
  config.zero_optimization.set_offload(Offload::kOptimizer);
  EXPECT_THAT(
      Advice(config, Channel::kHost),
      AllOf(HasSubstr("(fewer updates per token; changes results), or "),
            HasSubstr("leave zero_optimization.offload_optimizer out"),
            Not(HasSubstr("micro_batch"))));
}

TEST(OverlapAdviceTest, ParametersOfTheDiskAreReadInEveryMicroStep) {
  Config config;
  config.zero_optimization.stage = 3;
  config.gradient_accumulation_steps = 4;
  config.zero_optimization.offload_optimizer = OffloadDevice::kNvme;
  config.zero_optimization.offload_param = OffloadDevice::kNvme;
  EXPECT_THAT(Advice(config, Channel::kDisk), EndsWith(kFetchLess));
  // The disk has only the optimizer's states.
  config.zero_optimization.offload_param = OffloadDevice::kCpu;
  EXPECT_THAT(
      Advice(config, Channel::kDisk),
      AllOf(HasSubstr("(fewer updates per token; changes results), or "),
            HasSubstr("offload_optimizer.device to \"cpu\""),
            Not(HasSubstr("micro_batch"))));
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
