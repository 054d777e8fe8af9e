#include "engine/comm/fault.h"

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device.h"

namespace zero {
namespace {

using ::testing::HasSubstr;

TEST(FaultTest, RankStepAndKindAreRead) {
  const auto fault = ParseFault("1:30:stop", 2);
  ASSERT_TRUE(fault.ok()) << fault.status();
  EXPECT_EQ(fault->rank, 1);
  EXPECT_EQ(fault->step, 30);
  EXPECT_EQ(fault->kind, FaultKind::kStop);
  EXPECT_EQ(ParseFault("0:1:throw", 2)->kind, FaultKind::kThrow);
  EXPECT_EQ(ParseFault("0:1:mismatch", 2)->kind, FaultKind::kMismatch);
  const auto slow = ParseFault("1:3:slow=2.5", 2);
  ASSERT_TRUE(slow.ok()) << slow.status();
  EXPECT_EQ(slow->kind, FaultKind::kSlow);
  EXPECT_EQ(slow->factor, 2.5);
}

TEST(FaultTest, AWrongFaultNamesTheReasonAndAnExample) {
  const struct {
    const char* text;
    int world;
    const char* words;
  } kCases[] = {
      {"1:3", 2, "wants 3 parts with colons between them, not 2"},
      {"2:3:stop", 2, "rank \"2\" is not in [0, 2)"},
      {"-1:3:stop", 2, "rank \"-1\" is not in [0, 2)"},
      {"1:0:stop", 2, "step \"0\" is not a number >= 1"},
      {"1:x:stop", 2, "step \"x\" is not a number >= 1"},
      {"1:31:stop", 2, "step \"31\" is not in [1, 30]"},
      {"1:3:explode", 2, "\"explode\" is not a kind"},
      {"0:3:stop", 1, "with one rank no other rank"},
      {"1:3:slow", 2, "\"slow\" is not a kind"},
      {"1:3:slow=1", 2, "factor \"1\" is not in (1, 1000]"},
      {"1:3:slow=x", 2, "factor \"x\" is not in (1, 1000]"},
      {"1:3:slow=nan", 2, "factor \"nan\" is not in (1, 1000]"},
  };
  for (const auto& c : kCases) {
    const absl::Status status =
        ParseFault(c.text, c.world, /*num_steps=*/30).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.words));
    EXPECT_THAT(std::string(status.message()), HasSubstr("such as 1:3:stop"));
  }
}

// An end that keeps the names of what arrives.
class Recorder final : public Communicator {
 public:
  Recorder(int rank, std::vector<std::string>* names)
      : Communicator(rank, 2), names_(names) {}
  void Run(Stream&, Collective collective) override {
    names_->push_back(collective.name);
  }
  void Abort(const absl::Status&) override {}
  absl::Status status() const override { return absl::OkStatus(); }

 private:
  std::vector<std::string>* const names_;
};

// Three steps of two reductions each; "end" ends a step.
std::vector<std::string> ThreeSteps(FaultInjector& injector, int rank) {
  std::vector<std::string> names;
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const auto wrap = [&](const char* channel) {
    return injector.Wrap(rank, channel,
                         std::make_unique<Recorder>(rank, &names));
  };
  const auto gather = wrap("gather"), reduce = wrap("reduce"),
             scalar = wrap("scalar");
  for (int step = 1; step <= 3; ++step) {
    gather->Barrier(*stream, "gather");
    reduce->Barrier(*stream, "first");
    reduce->Barrier(*stream, "second");
    scalar->Barrier(*stream, "end");
  }
  return names;
}

TEST(FaultTest, ItComesAtTheFirstReductionOfTheStepOfTheRank) {
  FaultInjector injector({.rank = 1, .step = 2, .kind = FaultKind::kMismatch},
                         "end");
  const std::vector<std::string> step = {"gather", "first", "second", "end"};
  std::vector<std::string> want;
  for (int i = 0; i < 3; ++i) want.insert(want.end(), step.begin(), step.end());
  EXPECT_EQ(ThreeSteps(injector, 0), want);
  EXPECT_FALSE(injector.happened());
  want[5] = "injected fault";
  EXPECT_EQ(ThreeSteps(injector, 1), want);
  EXPECT_TRUE(injector.happened());
}

TEST(FaultTest, WhoThrowsNamesStepAndCollective) {
  FaultInjector injector({.rank = 0, .step = 3, .kind = FaultKind::kThrow},
                         "end");
  try {
    ThreeSteps(injector, 0);
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_STREQ(error.what(),
                 "injected fault in step 3 at barrier \"first\" of channel "
                 "\"reduce\"");
  }
}

TEST(FaultTest, ASlowRankSleepsForWhatItHasComputedAndChangesNothing) {
  // The thread computes 10 ms before every reduction, after 5 s at the start.
  absl::Duration computed = absl::Seconds(5);
  std::vector<absl::Duration> slept;
  FaultInjector injector(
      {.rank = 1, .step = 2, .kind = FaultKind::kSlow, .factor = 3}, "end",
      {.computed = [&] { return computed += absl::Milliseconds(10); },
       .sleep = [&](absl::Duration time) { slept.push_back(time); }});
  const std::vector<std::string> want = ThreeSteps(injector, 0);
  EXPECT_TRUE(slept.empty());
  EXPECT_EQ(ThreeSteps(injector, 1), want);
  // Two reductions in each of two steps.
  EXPECT_EQ(slept, std::vector<absl::Duration>(4, 2 * absl::Milliseconds(10)));
  EXPECT_TRUE(injector.happened());
}

TEST(FaultTest, ASlowFirstStepDoesNotRepeatTheStart) {
  absl::Duration computed = absl::Seconds(5);
  std::vector<absl::Duration> slept;
  FaultInjector injector(
      {.rank = 1, .step = 1, .kind = FaultKind::kSlow, .factor = 2}, "end",
      {.computed = [&] { return computed += absl::Milliseconds(10); },
       .sleep = [&](absl::Duration time) { slept.push_back(time); }});
  ThreeSteps(injector, 1);
  ASSERT_EQ(slept.size(), 6u);
  EXPECT_EQ(slept[0], absl::ZeroDuration());
  EXPECT_EQ(slept[1], absl::Milliseconds(10));
}

}  // namespace
}  // namespace zero
