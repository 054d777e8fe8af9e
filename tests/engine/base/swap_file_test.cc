#include "engine/base/swap_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// Aligned memory.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(bytes),
        data_(static_cast<char*>(::aligned_alloc(kBlockAlignment, bytes))) {}
  ~Memory() { ::free(data_); }
  Memory(const Memory&) = delete;
  char* data() { return data_; }
  int64_t bytes() const { return bytes_; }
  absl::Span<char> span() { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  int64_t bytes_;
  char* data_;
};

void FillWithNoise(Memory& memory, uint32_t state) {
  for (int64_t i = 0; i < memory.bytes(); ++i) {
    state = state * 1664525 + 1013904223;
    memory.data()[i] = static_cast<char>(state >> 24);
  }
}

struct Way {
  const char* folder;
  bool uring;
};

// On an ordinary disk and in memory, through io_uring and by threads.
class SwapFileTest : public testing::TestWithParam<Way> {
 protected:
  SwapFileTest()
      : folder_(std::string(GetParam().folder) + "/zero_swap_XXXXXX") {
    made_ = ::mkdtemp(folder_.data()) != nullptr;
    options_ = {.folder = folder_, .block_bytes = 64 << 10};
    options_.uring = GetParam().uring;
  }
  ~SwapFileTest() override {
    if (made_) RemoveTree(folder_).IgnoreError();
  }
  void SetUp() override { ASSERT_TRUE(made_) << folder_; }

  std::string Path(int number = 0) const {
    return folder_ + "/zero_swap/rank_" + std::to_string(number);
  }
  bool Empty() const { return ListFolder(folder_)->empty(); }
  absl::Status Try(absl::Span<const int64_t> pieces = {4096}) const {
    return SwapFile::Create(options_, pieces, {}).status();
  }

  std::string folder_;
  bool made_;
  SwapFileOptions options_;
};

TEST_P(SwapFileTest, PiecesComeBackAsTheyWereWritten) {
  const std::vector<int64_t> pieces = {1, 4096, 100001, 400008, 0};
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<absl::Span<char>> spans;
  for (const int64_t bytes : pieces) {
    memory.push_back(
        std::make_unique<Memory>(SwapFile::PaddedBytes(bytes) + 4096));
    FillWithNoise(*memory.back(), memory.size());
    spans.push_back(memory.back()->span());
  }
  for (int bits = 0; bits < 16; ++bits) {
    options_.io.single_submit = bits & 1;
    options_.io.overlap_events = bits & 2;
    options_.io.threads = bits & 4 ? 3 : 1;
    options_.checksums = bits & 8;
    const auto registered = bits & 1 ? absl::MakeConstSpan(spans)
                                     : absl::Span<const absl::Span<char>>();
    auto file = SwapFile::Create(options_, pieces, registered).value();
    struct stat info;
    ASSERT_EQ(::stat(file->path().c_str(), &info), 0);
    EXPECT_EQ(info.st_size, SwapFile::FileBytes(pieces));
    // No holes.
    EXPECT_GE(info.st_blocks * 512, info.st_size);
    for (int i : {3, 0, 4, 2, 1}) {
      ASSERT_TRUE(file->Write(i, memory[i]->data()).ok());
    }
    Memory back(kMiB / 2);
    for (int i = 0; i < 5; ++i) {
      FillWithNoise(back, 77);
      ASSERT_TRUE(file->Read(i, back.data()).ok());
      EXPECT_EQ(std::memcmp(back.data(), memory[i]->data(), pieces[i]), 0);
    }
    file.reset();
    EXPECT_TRUE(Empty());
  }
}

TEST_P(SwapFileTest, ReadsAndWritesGoOnBesideEachOther) {
  constexpr int kPieces = 16;
  const std::vector<int64_t> pieces(kPieces, kMiB);
  auto file = SwapFile::Create(options_, pieces, {}).value();
  Memory all(kPieces * kMiB);
  FillWithNoise(all, 5);
  std::atomic<int> written = 0;
  std::thread writer([&] {
    for (int i = 0; i < kPieces; ++i) {
      EXPECT_TRUE(file->Write(i, all.data() + i * kMiB).ok());
      written = i + 1;
      written.notify_one();
    }
  });
  Memory back(kMiB);
  for (int i = 0; i < kPieces; ++i) {
    for (int n = written; n <= i; n = written) written.wait(n);
    ASSERT_TRUE(file->Read(i, back.data()).ok());
    EXPECT_EQ(std::memcmp(back.data(), all.data() + i * kMiB, kMiB), 0);
  }
  writer.join();
}

TEST_P(SwapFileTest, ShortAndInterruptedCallsGoOn) {
  std::atomic<int> calls = 0;
  options_.io.fault = [&](DiskCall, int64_t, int64_t bytes, int64_t result) {
    switch (calls++ % 4) {
      case 0:
        return result > 0 ? int64_t{-EINTR} : result;
      case 1:
        return result > 0 ? int64_t{-EAGAIN} : result;
      case 2:  // not a whole block more than half
        return std::min(result, bytes / 2 + 100);
      default:
        return result;
    }
  };
  auto file = SwapFile::Create(options_, {kMiB}, {}).value();
  Memory memory(kMiB), back(kMiB);
  FillWithNoise(memory, 9);
  ASSERT_TRUE(file->Write(0, memory.data()).ok());
  ASSERT_TRUE(file->Read(0, back.data()).ok());
  EXPECT_EQ(std::memcmp(back.data(), memory.data(), kMiB), 0);
  EXPECT_GT(calls, 32);
}

TEST_P(SwapFileTest, ADiskThatIsAlwaysBusyIsAnError) {
  options_.io.fault = [](DiskCall call, int64_t, int64_t, int64_t result) {
    return call == DiskCall::kWrite ? int64_t{-EINTR} : result;
  };
  auto file = SwapFile::Create(options_, {4096}, {}).value();
  Memory memory(4096);
  FillWithNoise(memory, 1);
  const absl::Status status = file->Write(0, memory.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("4096 bytes at offset 4096"), HasSubstr(Path()),
                    HasSubstr("1000 times in a row")));
}

// Every request of a piece in turn.
TEST_P(SwapFileTest, AnErrorNamesFileOffsetAndBytes) {
  Memory memory(kMiB);
  FillWithNoise(memory, 3);
  for (const DiskCall failing : {DiskCall::kWrite, DiskCall::kRead}) {
    for (const auto& [error, words] :
         {std::pair(EIO, "input/output error; the disk reported"),
          std::pair(ENOSPC, "no space left on device; free some space")}) {
      for (int64_t at = 4096; at < kMiB; at += 5 * options_.block_bytes) {
        options_.io.fault = [failing, at, error = error](
                                DiskCall call, int64_t offset, int64_t,
                                int64_t result) {
          return call == failing && offset == at ? int64_t{-error} : result;
        };
        auto file = SwapFile::Create(options_, {kMiB}, {}).value();
        absl::Status status = file->Write(0, memory.data());
        if (failing == DiskCall::kRead) {
          ASSERT_TRUE(status.ok()) << status;
          status = file->Read(0, memory.data());
        }
        EXPECT_FALSE(status.ok());
        EXPECT_THAT(
            std::string(status.message()),
            AllOf(HasSubstr(failing == DiskCall::kRead
                                ? "cannot read 65536 bytes at offset "
                                : "cannot write 65536 bytes at offset "),
                  HasSubstr(std::to_string(at)), HasSubstr(Path()),
                  HasSubstr(words)));
        file.reset();
        EXPECT_TRUE(Empty());
      }
    }
  }
}

TEST_P(SwapFileTest, WhatIsCutOffOrChangedIsNotRead) {
  for (const bool cut : {true, false}) {
    auto file = SwapFile::Create(options_, {kMiB}, {}).value();
    Memory memory(kMiB);
    FillWithNoise(memory, 3);
    ASSERT_TRUE(file->Write(0, memory.data()).ok());
    const int64_t at = 4096 + 3 * options_.block_bytes;
    if (cut) {
      ASSERT_EQ(::truncate(Path().c_str(), at), 0);
    } else {
      // One bit, past the page cache, as another machine or the disk might.
      Memory block(4096);
      const int fd = ::open(Path().c_str(), O_RDWR | O_DIRECT);
      ASSERT_GE(fd, 0);
      ASSERT_EQ(::pread(fd, block.data(), 4096, at), 4096);
      block.data()[77] ^= 4;
      ASSERT_EQ(::pwrite(fd, block.data(), 4096, at), 4096);
      ::close(fd);
    }
    const absl::Status status = file->Read(0, memory.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("65536 bytes at offset " + std::to_string(at)),
                      HasSubstr(Path()),
                      HasSubstr(cut ? "the file ends before" : "checksum")));
  }
}

TEST_P(SwapFileTest, WithoutSpaceItSaysHowMuchIsWanted) {
  options_.io.fault = [](DiskCall call, int64_t, int64_t, int64_t result) {
    return call == DiskCall::kAllocate ? int64_t{-ENOSPC} : result;
  };
  const absl::Status status = Try({3 * kMiB});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("cannot reserve 3149824 bytes, where "),
                    HasSubstr(" are free, for '" + Path()),
                    HasSubstr("no space left on device")));
  EXPECT_TRUE(Empty());
}

// A real limit: the system's answer, not an injected one.
TEST_P(SwapFileTest, AnAllocationThatTheSystemRefusesIsAnError) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status = Try({3 * kMiB});
    const bool named =
        status.code() == absl::StatusCode::kResourceExhausted &&
        status.message().find("ulimit -f") != absl::string_view::npos;
    ::_exit(named && Empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_P(SwapFileTest, TwoRunsDoNotShareAFile) {
  auto first = SwapFile::Create(options_, {4096}, {}).value();
  const absl::Status status = Try();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(Path()), HasSubstr("another run"),
                    HasSubstr("nvme_path of its own")));
  Memory memory(4096);
  FillWithNoise(memory, 1);
  // It lost nothing.
  EXPECT_TRUE(first->Write(0, memory.data()).ok());
  EXPECT_TRUE(first->Read(0, memory.data()).ok());
  first.reset();
  EXPECT_TRUE(Try().ok());
  EXPECT_TRUE(Empty());
}

// This process gets `error` of that system call from now on.
void RefuseCall(int number, int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K,
               SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {std::size(filter), filter};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    ::_exit(2);
  }
}

// Some network file systems: two runs could not tell each other's files.
TEST_P(SwapFileTest, WithoutLocksNoFileIsTakenOrLeft) {
  auto first = SwapFile::Create(options_, {kMiB}, {}).value();
  struct stat info;
  for (const int error : {ENOLCK, EOPNOTSUPP, 0}) {
    if (error == 0) {  // once more, without the other's file
      ASSERT_EQ(::stat(Path().c_str(), &info), 0);
      EXPECT_EQ(info.st_size, SwapFile::FileBytes({kMiB}));
      first.reset();
    }
    const pid_t child = ::fork();
    if (child == 0) {
      RefuseCall(SYS_flock, error == 0 ? ENOLCK : error);
      const absl::Status status = Try();
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("cannot lock '" + Path()),
                        HasSubstr("an nvme_path on a local disk")));
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_NE(::stat(Path().c_str(), &info), 0);
}

TEST_P(SwapFileTest, WhatAKilledRunLeftIsRemovedOrReplaced) {
  for (const int number : {0, 1, 2}) {
    const pid_t child = ::fork();
    if (child == 0) {
      options_.number = number;
      auto file = SwapFile::Create(options_, {kMiB}, {});
      ::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(PathExists(Path(number)));
  }
  auto file = SwapFile::Create(options_, {4096}, {}).value();
  SwapFile::RemoveStale(folder_);
  EXPECT_TRUE(PathExists(Path(0)));
  EXPECT_FALSE(PathExists(Path(1)));
  EXPECT_FALSE(PathExists(Path(2)));
  file.reset();
  EXPECT_TRUE(Empty());
}

TEST_P(SwapFileTest, AForeignFileStays) {
  ASSERT_TRUE(MakeFolders(FolderOf(Path())).ok());
  ASSERT_TRUE(WriteFileAtomically(Path(0), "my thesis").ok());
  ASSERT_TRUE(WriteFileAtomically(Path(5), "my thesis").ok());
  const absl::Status status = Try();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(Path()), HasSubstr("was not written by zero")));
  EXPECT_EQ(*ReadFile(Path()), "my thesis");
  SwapFile::RemoveStale(folder_);
  EXPECT_EQ(*ReadFile(Path()), "my thesis");
  ASSERT_TRUE(RemoveFile(Path(0)).ok());
  EXPECT_TRUE(Try().ok());
  EXPECT_EQ(*ReadFile(Path(5)), "my thesis");
  // Nor is a link followed.
  ASSERT_EQ(::symlink(Path(5).c_str(), Path(0).c_str()), 0);
  EXPECT_FALSE(Try().ok());
  EXPECT_EQ(*ReadFile(Path(5)), "my thesis");
}

TEST_P(SwapFileTest, AFolderThatCannotBeMadeIsNamed) {
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/file", "").ok());
  options_.folder = folder_ + "/file";
  const absl::Status status = Try();
  EXPECT_THAT(std::string(status.message()), HasSubstr(folder_ + "/file"));
}

// A ring is a file: without room for one more the system refuses it.
// Whether a file works after `prepare` took something away, with one note,
// which contains `note`; in a child process.
bool WorksWithANote(const std::function<void()>& prepare,
                    const std::string& note) {
  std::string folder = "/tmp/zero_swap_XXXXXX";
  EXPECT_NE(::mkdtemp(folder.data()), nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    prepare();
    Memory memory(4096);
    FillWithNoise(memory, 1);
    const absl::Span<char> span = memory.span();
    auto file = SwapFile::Create({.folder = folder}, {4096}, {&span, 1});
    const bool right = file.ok() && (*file)->notes().size() == 1 &&
                       (*file)->notes()[0].find(note) != std::string::npos &&
                       (*file)->Write(0, memory.data()).ok() &&
                       (*file)->Read(0, memory.data()).ok();
    file = absl::UnknownError("");
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  RemoveTree(folder).IgnoreError();
  return status == 0;
}

TEST(SwapFileNotesTest, WhereNoRingIsToBeHadThreadsWorkAndANoteSaysSo) {
  EXPECT_TRUE(WorksWithANote(
      [] {
        const int next = ::dup(0);  // the lowest free number
        ::close(next);
        // The file twice.
        const rlimit limit{static_cast<rlim_t>(next) + 2,
                           static_cast<rlim_t>(next) + 2};
        ::setrlimit(RLIMIT_NOFILE, &limit);
      },
      "does not permit io_uring: Too many open files"));
}

// As beyond ulimit -l, which root does not have.
TEST(SwapFileNotesTest, WhereMemoryIsNotRegisteredANoteSaysSo) {
  EXPECT_TRUE(WorksWithANote([] { RefuseCall(SYS_io_uring_register, ENOMEM); },
                             "ulimit -l"));
}

std::string NameOfWay(const testing::TestParamInfo<Way>& info) {
  return std::string(info.param.folder == std::string("/tmp") ? "Disk"
                                                              : "Memory") +
         (info.param.uring ? "Uring" : "Threads");
}
INSTANTIATE_TEST_SUITE_P(Ways, SwapFileTest,
                         testing::Values(Way{"/tmp", true}, Way{"/tmp", false},
                                         Way{"/dev/shm", true},
                                         Way{"/dev/shm", false}),
                         NameOfWay);

}  // namespace
}  // namespace zero
