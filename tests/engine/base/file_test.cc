#include "engine/base/file.h"

#include <errno.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FileTest, WhatIsWrittenIsRead) {
  TempDir dir;
  const std::string contents("a\0b\n\xff", 5);
  ASSERT_TRUE(WriteFileAtomically(dir.File("f"), contents).ok());
  EXPECT_EQ(ReadFile(dir.File("f")).value(), contents);
  EXPECT_EQ(dir.Count(), 1);
}

TEST(FileTest, AMissingFileIsNotFoundAndNamed) {
  TempDir dir;
  const absl::Status status = ReadFile(dir.File("nope.txt")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("nope.txt"));
}

TEST(FileTest, AMissingFolderIsNamed) {
  TempDir dir;
  const absl::Status status = ReadFile(dir.File("a/b/c.txt")).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the folder '" + dir.File("a/b") + "' does not exist"));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("what exists: '" + dir.path() + "'"));
}

TEST(FileTest, AFolderIsNotAFile) {
  TempDir dir;
  for (const absl::Status& status :
       {ReadFile(dir.path()).status(), MappedFile::Open(dir.path()).status(),
        WriteFileAtomically(dir.path(), "x")}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("folder"));
  }
}

TEST(FileTest, APipeIsRefusedInsteadOfWaitedFor) {
  TempDir dir;
  ASSERT_EQ(::mkfifo(dir.File("pipe").c_str(), 0600), 0);
  const absl::Status status = MappedFile::Open(dir.File("pipe")).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("regular file"));
}

TEST(FileTest, EachErrnoHasItsCodeAndRemedy) {
  EXPECT_EQ(FileError("cannot write", "f", ENOSPC).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(FileError("cannot write", "f", ENOSPC).message()),
              HasSubstr("cannot write 'f': no space left on device; free"));
  EXPECT_EQ(FileError("cannot write", "f", EACCES).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(FileError("cannot write", "f", EROFS).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(FileError("cannot read", "f", EIO).code(),
            absl::StatusCode::kDataLoss);
}

TEST(AtomicFileTest, TheOldFileStaysUntilCommit) {
  TempDir dir;
  dir.Write("f", "old");
  auto file = AtomicFile::Create(dir.File("f")).value();
  ASSERT_TRUE(file->Append("new", 3).ok());
  EXPECT_EQ(dir.Read("f"), "old");
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(dir.Read("f"), "new");
  EXPECT_EQ(dir.Count(), 1);
}

TEST(AtomicFileTest, WithoutCommitNothingIsLeftBehind) {
  TempDir dir;
  {
    auto file = AtomicFile::Create(dir.File("f")).value();
    ASSERT_TRUE(file->Append("new", 3).ok());
  }
  EXPECT_EQ(dir.Count(), 0);
}

TEST(AtomicFileTest, WriteAtReachesBytesThatWereAppended) {
  TempDir dir;
  auto file = AtomicFile::Create(dir.File("f")).value();
  const std::string large(3 << 20, 'x');
  ASSERT_TRUE(file->Append("....", 4).ok());
  ASSERT_TRUE(file->Append(large.data(), large.size()).ok());
  ASSERT_TRUE(file->Append("end", 3).ok());
  ASSERT_TRUE(file->WriteAt(0, "head", 4).ok());
  ASSERT_TRUE(file->Append("!", 1).ok());
  EXPECT_EQ(file->size(), static_cast<int64_t>(large.size()) + 8);
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(dir.Read("f"), "head" + large + "end!");
}

// A full disk as the system reports it: the write fails, the old file stays,
// the temporary one is gone. (A file size limit stands in for the disk; it
// takes the same path with another errno.)
TEST(AtomicFileTest, AWriteThatFailsLosesNothing) {
  TempDir dir;
  dir.Write("f", "old");
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string large(4 << 20, 'x');
    const absl::Status status = WriteFileAtomically(dir.File("f"), large);
    const bool named =
        std::string(status.message()).find(dir.File("f")) != std::string::npos;
    ::_exit(status.code() == absl::StatusCode::kResourceExhausted && named ? 7
                                                                           : 1);
  }
  int result = 0;
  ::waitpid(child, &result, 0);
  ASSERT_TRUE(WIFEXITED(result));
  EXPECT_EQ(WEXITSTATUS(result), 7);
  EXPECT_EQ(dir.Read("f"), "old");
  EXPECT_EQ(dir.Count(), 1);
}

TEST(MappedFileTest, MapsTheBytesAndAnEmptyFile) {
  TempDir dir;
  dir.Write("f", "hello");
  dir.Write("empty", "");
  auto file = MappedFile::Open(dir.File("f")).value();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(file.data()),
                        static_cast<size_t>(file.size())),
            "hello");
  MappedFile moved = std::move(file);
  EXPECT_EQ(moved.size(), 5);
  EXPECT_EQ(MappedFile::Open(dir.File("empty")).value().size(), 0);
}

TEST(FolderTest, MakesParentsAndIsRepeatable) {
  TempDir dir;
  EXPECT_TRUE(MakeFolders(dir.File("a/b/c")).ok());
  EXPECT_TRUE(MakeFolders(dir.File("a/b/c")).ok());
  EXPECT_TRUE(IsFolder(dir.File("a/b/c")));
  dir.Write("file", "");
  EXPECT_THAT(std::string(MakeFolders(dir.File("file")).message()),
              HasSubstr("a file of that name exists"));
}

TEST(FolderTest, KnowsWhatADiskHasRoomFor) {
  const TempDir dir;
  EXPECT_GT(FreeDiskBytes(dir.path()), 0);
  EXPECT_EQ(FreeDiskBytes(dir.path() + "/none"), -1);
  EXPECT_EQ(FreeDiskBytes("/proc"), -1);  // no disk
}

TEST(FolderTest, FolderOfCutsTheLastPart) {
  EXPECT_EQ(FolderOf("a/b/c.bin"), "a/b");
  EXPECT_EQ(FolderOf("c.bin"), ".");
  EXPECT_EQ(FolderOf("/c"), "/");
  EXPECT_EQ(FolderOf("/"), "/");
  EXPECT_EQ(FolderOf("a/b/"), "a");
  EXPECT_EQ(FolderOf("a//b"), "a");
  EXPECT_EQ(FolderOf(""), ".");
}

TEST(FolderTest, ListsSortedNames) {
  TempDir dir;
  dir.Write("b", "");
  dir.Write("a", "");
  dir.Write("C", "");
  EXPECT_THAT(ListFolder(dir.path()).value(), ElementsAre("C", "a", "b"));
}

}  // namespace
}  // namespace zero
