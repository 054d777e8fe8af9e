#include "engine/base/direct_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zero {
namespace {

constexpr int64_t kWriteWindow = DirectWriter::kWindowBytes;

// Bytes that differ from those of any window's distance.
std::string Noise(int64_t bytes) {
  std::string noise(bytes, '\0');
  uint32_t state = 1;
  for (char& c : noise) {
    state = state * 1664525 + 1013904223;
    c = static_cast<char>(state >> 24);
  }
  return noise;
}

// The folders to test in: an ordinary disk, and a file system that may refuse
// O_DIRECT.
class DirectFileTest : public ::testing::TestWithParam<const char*> {
 protected:
  DirectFileTest() : path_(std::string(GetParam()) + "/zero_direct_XXXXXX") {
    made_ = ::mkdtemp(path_.data()) != nullptr;
  }
  ~DirectFileTest() override {
    if (made_) RemoveTree(path_).IgnoreError();
  }
  void SetUp() override {
    if (!made_) GTEST_SKIP() << "nothing can be made in " << GetParam();
  }
  std::string File() const { return path_ + "/f"; }
  size_t Count() const { return ListFolder(path_)->size(); }

  std::string path_;
  bool made_;
};

TEST_P(DirectFileTest, PiecesOfAnySizeBecomeOneFile) {
  const std::string all = Noise(3 * kWriteWindow + 4096 + 77);
  const std::vector<int64_t> sizes = {8, 1, 4095, 4096, 100001, kWriteWindow};
  auto file = DirectWriter::Create(File()).value();
  int64_t at = 0;
  for (size_t i = 0; at < static_cast<int64_t>(all.size()); ++i) {
    const int64_t n = std::min<int64_t>(sizes[i % sizes.size()],
                                        static_cast<int64_t>(all.size()) - at);
    ASSERT_TRUE(file->WriteAt(at, &all[at], n).ok());
    at += n;
  }
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_TRUE(*ReadFile(File()) == all);
  EXPECT_EQ(Count(), 1u);
}

// Two tensors that are written in turns, the second one first: pieces begin and
// end within blocks that others fill.
TEST_P(DirectFileTest, PiecesInAnyOrderBecomeOneFile) {
  const std::string all = Noise(2 * kWriteWindow + 999);
  const int64_t half = kWriteWindow + 333;
  constexpr int64_t kPiece = 70001;
  auto file = DirectWriter::Create(File()).value();
  for (int64_t at = 0; at < half; at += kPiece) {
    for (const int64_t begin : {half, int64_t{0}}) {
      const int64_t end = begin == 0 ? half : static_cast<int64_t>(all.size());
      const int64_t n = std::min(kPiece, end - begin - at);
      if (n <= 0) continue;
      ASSERT_TRUE(file->WriteAt(begin + at, &all[begin + at], n).ok());
    }
  }
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_TRUE(*ReadFile(File()) == all);
}

TEST_P(DirectFileTest, TheOldFileStaysUntilCommit) {
  ASSERT_TRUE(WriteFileAtomically(File(), "old").ok());
  {
    auto file = DirectWriter::Create(File()).value();
    ASSERT_TRUE(file->WriteAt(0, "new", 3).ok());
  }
  EXPECT_EQ(*ReadFile(File()), "old");
  EXPECT_EQ(Count(), 1u);
}

// A file size limit stands in for a full disk. The error is another thread's,
// so it comes with a later call.
TEST_P(DirectFileTest, AWriteThatFailsLosesNothing) {
  ASSERT_TRUE(WriteFileAtomically(File(), "old").ok());
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string large = Noise(3 * kWriteWindow);
    auto file = DirectWriter::Create(File()).value();
    absl::Status status = file->WriteAt(0, large.data(), large.size());
    if (status.ok()) status = file->Commit();
    const bool named =
        std::string(status.message()).find(File()) != std::string::npos;
    ::_exit(status.code() == absl::StatusCode::kResourceExhausted && named ? 7
                                                                           : 1);
  }
  int result = 0;
  ::waitpid(child, &result, 0);
  ASSERT_TRUE(WIFEXITED(result));
  EXPECT_EQ(WEXITSTATUS(result), 7);
  EXPECT_EQ(*ReadFile(File()), "old");
  EXPECT_EQ(Count(), 1u);
}

TEST_P(DirectFileTest, AnyRangeIsReadAndLittleMore) {
  const std::string all = Noise((1 << 20) + 4097);
  ASSERT_TRUE(WriteFileAtomically(File(), all).ok());
  const auto file = DirectReader::Open(File()).value();
  const int64_t size = static_cast<int64_t>(all.size());
  AlignedMemory memory;
  for (const int64_t at : {int64_t{0}, int64_t{5}, int64_t{4096}, size - 9}) {
    for (const int64_t n : {int64_t{1}, int64_t{9}, int64_t{4096}, size}) {
      const int64_t bytes = std::min(n, size - at);
      int64_t read_bytes = 0;
      const auto data = file->Read(at, bytes, &memory, &read_bytes);
      ASSERT_TRUE(data.ok()) << data.status();
      EXPECT_EQ(absl::string_view(*data, bytes), all.substr(at, bytes)) << at;
      EXPECT_GE(read_bytes, bytes);
      EXPECT_LE(read_bytes, bytes + 2 * 4096);
    }
  }
}

TEST_P(DirectFileTest, TheEndOfTheFileIsAnError) {
  const std::string all = Noise(8200);
  ASSERT_TRUE(WriteFileAtomically(File(), all).ok());
  const auto file = DirectReader::Open(File()).value();
  ASSERT_EQ(::truncate(File().c_str(), 8195), 0);
  AlignedMemory memory;
  int64_t read_bytes = 0;
  EXPECT_EQ(file->Read(8190, 10, &memory, &read_bytes).status().code(),
            absl::StatusCode::kDataLoss);
  const auto data = file->Read(8175, 20, &memory, &read_bytes);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(absl::string_view(*data, 20), all.substr(8175, 20));
}

INSTANTIATE_TEST_SUITE_P(Folders, DirectFileTest,
                         ::testing::Values("/tmp", "/dev/shm"));

}  // namespace
}  // namespace zero
