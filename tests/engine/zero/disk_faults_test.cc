// A disk with states that fails: all ranks end with an error that names the
// file, none hangs, and no file is left.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

class DiskFaultsTest : public testing::Test {
 protected:
  DiskFaultsTest() {
    job_.options = AtStage(job_.options, 3);
    job_.options.plan.homes = {Home::kNvme, Home::kNvme};
    job_.options.swap.path = dir_.path();
  }

  std::string Path(int rank) const {
    return absl::StrCat(dir_.path(), "/zero_swap/rank_", rank);
  }

  // Runs the job: the first error, which is then one of all ranks.
  absl::Status Run() {
    std::atomic<int> num_failed = 0;
    const absl::Status status = RunLocalRanks(
        job_.world, RanksOf(job_), OneThread,
        [&](const Rank& rank) -> absl::Status {
          const Job planned = Planned(job_);
          const int64_t rows = job_.batch / job_.world;
          MemoryLedger ledger, host_ledger;
          const std::unique_ptr<Model> model = planned.Make();
          auto executor = Executor::Make(
              rank, *model, PlanOf(job_), planned.options,
              Rehearse(planned, rank, rows), &ledger, &host_ledger);
          absl::Status own = executor.status();
          if (own.ok()) {
            (*executor)->states().Initialize(1);
            own = rank.status();
          }
          const TokenBatch batch = GlobalBatch(rows, 0);
          const HostBatch all = batch.All();
          for (int step = 0; step < 4 && own.ok(); ++step) {
            own = (*executor)
                      ->Step({.micro_batches = {&all, 1},
                              .num_valid_targets = 1,
                              .lr = 1e-3f,
                              .optimizer_step = step + 1})
                      .status();
          }
          if (own.ok()) own = (*executor)->states().Hash().status();
          num_failed += !own.ok();
          return own;
        });
    EXPECT_EQ(num_failed, status.ok() ? 0 : job_.world);
    EXPECT_FALSE(std::filesystem::exists(dir_.path() + "/zero_swap"));
    return status;
  }
  absl::Status Failure() {
    const absl::Status status = Run();
    EXPECT_FALSE(status.ok());
    return status;
  }
  // At the 60th read the file of rank 1 is cut off, or becomes zeros.
  void ChangeFile(bool cut) {
    auto calls = std::make_shared<std::atomic<int>>(0);
    job_.options.swap.io.fault = [=, path = Path(1)](DiskCall call, int64_t,
                                                     int64_t, int64_t result) {
      if (call != DiskCall::kRead || ++*calls != 60) return result;
      if (cut) {
        EXPECT_EQ(::truncate(path.c_str(), kBlockAlignment), 0);
      } else {
        const int fd = ::open(path.c_str(), O_WRONLY);
        const std::string zeros(1 << 20, '\0');
        EXPECT_GT(::pwrite(fd, zeros.data(), zeros.size(), kBlockAlignment), 0);
        ::close(fd);
      }
      return result;
    };
  }
  // Makes the call number `at` (from 1; 0: every one) of a kind fail, of all
  // ranks together.
  void Fail(DiskCall failing, int at, int error) {
    auto calls = std::make_shared<std::atomic<int>>(0);
    job_.options.swap.io.fault = [=](DiskCall call, int64_t, int64_t,
                                     int64_t result) -> int64_t {
      return call == failing && (at == 0 || ++*calls == at) ? -error : result;
    };
  }

  TempDir dir_;
  Job job_;
};

TEST_F(DiskFaultsTest, AnErrorOfAnyCallEndsAllRanks) {
  std::atomic<int> reads = 0, writes = 0;
  job_.options.swap.io.fault = [&](DiskCall call, int64_t, int64_t,
                                   int64_t result) {
    if (call == DiskCall::kRead) ++reads;
    if (call == DiskCall::kWrite) ++writes;
    return result;
  };
  ASSERT_TRUE(Run().ok());
  ASSERT_GT(reads, 50);
  ASSERT_GT(writes, 50);
  for (const DiskCall failing : {DiskCall::kRead, DiskCall::kWrite}) {
    const int total = failing == DiskCall::kRead ? reads : writes;
    constexpr int kTimes = 16;
    for (int i = 0; i < kTimes; ++i) {
      const int at = 1 + i * (total - 1) / (kTimes - 1);
      SCOPED_TRACE(absl::StrCat(at, " of ", total));
      const int error = i % 2 == 0 ? EIO : ENOSPC;
      Fail(failing, at, error);
      EXPECT_THAT(std::string(Failure().message()),
                  AllOf(HasSubstr(failing == DiskCall::kRead ? "cannot read "
                                                             : "cannot write "),
                        HasSubstr(" bytes at offset "), HasSubstr(dir_.path()),
                        HasSubstr(error == EIO ? "input/output error"
                                               : "no space left on device")));
    }
  }
}

// Of all ranks, or of one alone.
TEST_F(DiskFaultsTest, AFullDiskIsAnErrorAtTheStart) {
  for (const int at : {0, 1, 2}) {
    SCOPED_TRACE(at);
    Fail(DiskCall::kAllocate, at, ENOSPC);
    const absl::Status status = Failure();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("cannot reserve "), HasSubstr(" are free"),
                      HasSubstr(dir_.path())));
  }
}

// A run of more ranks was killed. Its files go before any rank asks for space,
// and no rank makes a file while another may take that for a dead run's.
TEST_F(DiskFaultsTest, FilesOfAKilledRunGoBeforeAnyRankMakesOne) {
  const std::string stale = Path(7);
  dir_.Write("zero_swap/rank_7", "zero swap file\n");
  std::atomic<int> num_beside = 0;
  job_.options.swap.io.fault = [&](DiskCall call, int64_t, int64_t,
                                   int64_t result) {
    num_beside += call == DiskCall::kAllocate && PathExists(stale);
    return result;
  };
  job_.wrap = [&](int rank, const std::string&, auto end) {
    if (rank == 0) {  // comes late
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_FALSE(PathExists(Path(1)));
    }
    return end;
  };
  Train(job_);
  EXPECT_EQ(num_beside, 0);
  EXPECT_FALSE(PathExists(stale));
}

// The file of one rank, in the third step, as by another program.
TEST_F(DiskFaultsTest, AFileThatIsCutOffOrChangedEndsAllRanks) {
  for (const bool cut : {true, false}) {
    ChangeFile(cut);
    const absl::Status status = Failure();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    // A write in flight makes the truncated file long again, with zeros in it,
    // which only the checksum detects.
    testing::Matcher<std::string> names = HasSubstr("checksum");
    if (cut) names = AnyOf(names, HasSubstr("the file ends before"));
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(Path(1)), names));
  }
}

TEST_F(DiskFaultsTest, TwoRunsDoNotShareAFolder) {
  auto other =
      SwapFile::Create({.folder = dir_.path(), .number = 1}, {4096}, {});
  ASSERT_TRUE(other.ok());
  const absl::Status status = RunLocalRanks(
      2, RanksOf(job_), OneThread, [&](const Rank& rank) -> absl::Status {
        MemoryLedger ledger, host_ledger;
        const Job planned = Planned(job_);
        const std::unique_ptr<Model> model = planned.Make();
        return Executor::Make(rank, *model, PlanOf(job_), planned.options,
                              Rehearse(planned, rank, 6), &ledger, &host_ledger)
            .status();
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1"), HasSubstr(Path(1)),
                    HasSubstr("nvme_path of its own")));
  EXPECT_TRUE(std::filesystem::exists(Path(1)));
  EXPECT_FALSE(std::filesystem::exists(Path(0)));
}

TEST_F(DiskFaultsTest, WithoutChecksumsWhatTheDiskGivesIsTaken) {
  job_.options.swap.checksums = false;
  job_.options.swap.uring = false;
  job_.options.swap.io.threads = 2;
  Job in_memory = job_;
  in_memory.options.plan.homes = {};
  const Outcome want = Train(in_memory);
  EXPECT_EQ(Train(job_), want);
  ChangeFile(/*cut=*/false);
  EXPECT_NE(Train(job_).parameters, want.parameters);
}

}  // namespace
}  // namespace zero
