#include "engine/comm/local_ranks.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/comm/channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<Device>> OneThread(int) {
  return MakeCpuDevice(1);
}

// Waits for all ranks, or for the failure of one.
absl::Status Meet(const Rank& rank) {
  const auto stream = rank.device->MakeStream(StreamRole::kCompute);
  rank.scalar->Barrier(*stream, "meeting");
  stream->Synchronize();
  return rank.status();
}

TEST(LocalRanksTest, WhatARankThrowsIsTheErrorOfAll) {
  const struct {
    std::function<void()> raise;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {[] { throw std::runtime_error("torn cable"); },
       absl::StatusCode::kInternal, "torn cable"},
      {[] { throw std::bad_alloc(); }, absl::StatusCode::kResourceExhausted,
       "the system refused memory"},
  };
  for (const auto& c : kCases) {
    std::atomic<int> num_told{0};
    const absl::Status status =
        RunLocalRanks(3, {}, OneThread, [&](const Rank& rank) -> absl::Status {
          if (rank.rank() == 2) c.raise();
          const absl::Status met = Meet(rank);
          EXPECT_EQ(met.code(), c.code);
          EXPECT_THAT(std::string(met.message()),
                      HasSubstr(std::string("local: rank 2 aborted the run: ") +
                                c.words));
          ++num_told;
          return met;
        });
    EXPECT_EQ(status.code(), c.code);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string("rank 2 aborted the run: ") + c.words));
    EXPECT_EQ(num_told, 2);
  }
}

// Which rank fails first is chance.
TEST(LocalRanksTest, AnErrorOfAllRanksNamesNone) {
  for (int i = 0; i < 50; ++i) {
    const absl::Status status =
        RunLocalRanks(2, {}, OneThread, [](const Rank&) {
          return absl::InvalidArgumentError("a seed of another run");
        });
    EXPECT_EQ(status.message(), "a seed of another run");
  }
  // Of one rank alone, the same is named.
  const absl::Status status =
      RunLocalRanks(2, {}, OneThread, [](const Rank& rank) -> absl::Status {
        if (rank.rank() == 0) return absl::InvalidArgumentError("no disk");
        return absl::OkStatus();
      });
  EXPECT_EQ(status.message(), "rank 0: no disk");
}

// Makes the ranks of a test hang, and releases them.
class Gate {
 public:
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// How `world` ranks ended if some hang, and on_hang's argument before it
// released them.
struct Hang {
  absl::Status status, told;
};
Hang RunUntilTheyHang(
    int world,
    const std::function<absl::Status(const Rank& rank, Gate& gate)>& body) {
  Gate gate;
  Hang hang;
  LocalRanksOptions options;
  options.local.timeout = absl::Milliseconds(300);
  options.on_hang = [&](const absl::Status& error) {
    hang.told = error;
    gate.Open();
  };
  hang.status = RunLocalRanks(world, options, OneThread, [&](const Rank& rank) {
    return body(rank, gate);
  });
  return hang;
}

TEST(LocalRanksTest, RanksThatHangAreNamedAndLeftToTheCaller) {
  for (const int hanging : {0, 1}) {
    const Hang hang = RunUntilTheyHang(3, [&](const Rank& rank, Gate& gate) {
      if (rank.rank() == hanging) gate.Wait();
      return Meet(rank);
    });
    EXPECT_EQ(hang.status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(hang.told.code(), absl::StatusCode::kDeadlineExceeded);
    const std::string name = absl::StrCat("rank ", hanging);
    EXPECT_THAT(std::string(hang.told.message()),
                AllOf(HasSubstr(name + " did not arrive at #1 of channel "
                                       "\"scalar\", barrier \"meeting\""),
                      HasSubstr("; " + name + " hangs and is abandoned")));
  }
}

// Rank 1 fails at once; rank 0 is not involved, and hangs.
TEST(LocalRanksTest, ARankThatDoesNotComeBackAfterAnErrorHangs) {
  const Hang hang =
      RunUntilTheyHang(2, [](const Rank& rank, Gate& gate) -> absl::Status {
        if (rank.rank() == 1) return absl::DataLossError("disk on fire");
        gate.Wait();
        return absl::OkStatus();
      });
  EXPECT_EQ(hang.told.message(),
            "rank 1: disk on fire; rank 0 hangs and is abandoned");
}

TEST(LocalRanksTest, SeveralRanksThatHangAreNamedInASentence) {
  EXPECT_EQ(RankNames({0}), "rank 0");
  EXPECT_EQ(RankNames({0, 1}), "rank 0 and rank 1");
  EXPECT_EQ(RankNames({0, 1, 3}), "rank 0, rank 1 and rank 3");
  const Hang hang = RunUntilTheyHang(4, [](const Rank& rank, Gate& gate) {
    if (rank.rank() != 2) gate.Wait();
    return Meet(rank);
  });
  EXPECT_THAT(
      std::string(hang.told.message()),
      AllOf(HasSubstr("rank 0, rank 1 and rank 3 did not arrive at"),
            HasSubstr(
                "if a rank was only slow, raise communication.timeout_seconds; "
                "rank 0, rank 1 and rank 3 hang and are abandoned")));
}

TEST(LocalRanksTest, ARankThatTakesItsTimeDoesNotHang) {
  LocalRanksOptions options;
  options.on_hang = [](const absl::Status& error) { FAIL() << error; };
  const absl::Status status = RunLocalRanks(
      3, options, OneThread, [&](const Rank& rank) -> absl::Status {
        if (rank.rank() == 1) return absl::DataLossError("disk on fire");
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return Meet(rank);
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace zero
