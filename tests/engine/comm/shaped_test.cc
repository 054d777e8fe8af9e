#include "engine/comm/shaped.h"

#include <chrono>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/comm/comm_testing.h"

namespace zero {
namespace {

using ::testing::HasSubstr;

TEST(LinkTest, ReadsRatesAndLatencies) {
  const struct {
    const char* text;
    double bytes_per_second;
    absl::Duration latency;
  } kCases[] = {
      {"1GB/s,50us", 1e9, absl::Microseconds(50)},
      {"2.5MB/s,1.5ms", 2.5e6, absl::Microseconds(1500)},
      {"800KB/s,0", 8e5, absl::ZeroDuration()},
      {"512B/s,1s", 512, absl::Seconds(1)},
      {"100Gbit/s,900ns", 12.5e9, absl::Nanoseconds(900)},
      {"10Mbit/s,20ms", 1.25e6, absl::Milliseconds(20)},
      {"64kbit/s,1ms", 8e3, absl::Milliseconds(1)},
  };
  for (const auto& one : kCases) {
    const auto link = ParseLink(one.text);
    ASSERT_TRUE(link.ok()) << link.status();
    EXPECT_DOUBLE_EQ(link->bytes_per_second, one.bytes_per_second) << one.text;
    EXPECT_EQ(link->latency, one.latency) << one.text;
  }
}

TEST(LinkTest, ACopyLastsItsLatencyAndItsBytes) {
  const Link link{.bytes_per_second = 1e6, .latency = absl::Milliseconds(2)};
  EXPECT_EQ(LinkTime(link, 3000), absl::Milliseconds(5));
  EXPECT_EQ(LinkTime(link, 0), absl::Milliseconds(2));
}

TEST(LinkTest, SaysWhatIsWrong) {
  const struct {
    const char* text;
    const char* reason;
  } kCases[] = {
      {"", "wants 2 parts with a comma between them, not 1"},
      {"1GB/s", "wants 2 parts"},
      {"1GB/s,1us,2", "not 3"},
      {"1,50us", "the rate \"1\" does not end in"},
      {"1Gb/s,50us", "the rate \"1Gb/s\" does not end in"},
      {"fastGB/s,50us", "not a positive number of GB/s"},
      {"GB/s,50us", "not a positive number of GB/s"},
      {"0GB/s,50us", "not a positive number of GB/s"},
      {"-1MB/s,50us", "not a positive number of MB/s"},
      {"infMB/s,50us", "not a positive number of MB/s"},
      {"nanB/s,50us", "not a positive number of B/s"},
      {"1GB/s,50", "the latency \"50\" is neither 0 nor a number of ns"},
      {"1GB/s,-50us", "the latency \"-50us\""},
      {"1e-300GB/s,0", "the rate \"1e-300GB/s\" is below 100 B/s"},
      {"1GB/s,1000000h", "the latency \"1000000h\""},
      {"1GB/s,inf", "the latency \"inf\""},
      {"1GB/s,", "the latency \"\""},
  };
  for (const auto& one : kCases) {
    const auto link = ParseLink(one.text);
    ASSERT_FALSE(link.ok()) << one.text;
    EXPECT_EQ(link.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(link.status().message());
    EXPECT_THAT(message, HasSubstr(std::string("link \"") + one.text + "\": "));
    EXPECT_THAT(message, HasSubstr(one.reason));
    EXPECT_THAT(message, HasSubstr("such as 1GB/s,50us"));
  }
}

// Microseconds that a 1 GB/s link of 100 us takes for 8000 floats.
TEST(LinkTest, TimeIsAlphaPlusBeta) {
  const Link link{1e9, absl::Microseconds(100)};
  Collective gather{CollectiveKind::kAllGather};
  gather.segments = {{nullptr, nullptr, 8000}};
  EXPECT_EQ(LinkTime(link, gather, 1), absl::ZeroDuration());
  EXPECT_EQ(LinkTime(link, gather, 2), absl::Microseconds(100 + 16));
  EXPECT_EQ(LinkTime(link, gather, 4), absl::Microseconds(300 + 24));
  // A root sends to, or receives from, all ranks through its one link.
  for (const auto kind :
       {CollectiveKind::kBroadcast, CollectiveKind::kReduce}) {
    Collective rooted = gather;
    rooted.kind = kind;
    EXPECT_EQ(LinkTime(link, rooted, 1), absl::ZeroDuration());
    EXPECT_EQ(LinkTime(link, rooted, 4), absl::Microseconds(300 + 3 * 32));
  }
  Collective barrier{CollectiveKind::kBarrier};
  EXPECT_EQ(LinkTime(link, barrier, 4), absl::Microseconds(300));
}

// 2 ms of latency and 10 ms of bytes, four times, and the data is right.
TEST(ShapedTest, ACollectiveLastsAtLeastItsLinkTime) {
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kGather}) {
    const auto group = LocalGroup::Make(2);
    const absl::Status status = RunRanks(2, [&](int rank) {
      const auto device = MakeCpuDevice(1);
      ShapedCommunicator comm(group->Connect(rank, "gather"),
                              {1e6, absl::Milliseconds(2)});
      const auto stream = device->MakeStream(role);
      std::vector<float> full(5000);
      full[2500 * rank] = static_cast<float>(rank + 1);
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 4; ++i) {
        comm.AllGather(*stream, "unit", DType::kF32,
                       {{full.data() + 2500 * rank, full.data(), 5000}});
      }
      stream->Synchronize();
      EXPECT_GE(std::chrono::steady_clock::now() - begin,
                std::chrono::milliseconds(4 * 12));
      EXPECT_EQ(full[0], 1);
      EXPECT_EQ(full[2500], 2);
      return comm.status();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// An hour of link time: the test ends because the sleep does.
TEST(ShapedTest, AFailureEndsTheSleep) {
  const auto group = LocalGroup::Make(2);
  const absl::Status status = RunRanks(2, [&](int rank) {
    const auto device = MakeCpuDevice(1);
    ShapedCommunicator comm(group->Connect(rank, "gather"),
                            {1e9, absl::Hours(1)});
    const auto stream = device->MakeStream(StreamRole::kGather);
    comm.Barrier(*stream, "step");
    if (rank == 0) comm.Abort(absl::CancelledError("stop"));
    stream->Synchronize();
    return comm.status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

}  // namespace
}  // namespace zero
