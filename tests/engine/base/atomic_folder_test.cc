#include "engine/base/atomic_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A folder of two files with equal contents, so that a mixture shows.
void Fill(const std::string& dir, const std::string& text) {
  ASSERT_TRUE(MakeFolders(dir).ok());
  ASSERT_TRUE(WriteFileAtomically(dir + "/a", text).ok());
  ASSERT_TRUE(WriteFileAtomically(dir + "/b", text).ok());
}

// The contents of both files of `dir`; "mixed" if they differ.
std::string TextOf(const std::string& dir) {
  const auto a = ReadFile(dir + "/a"), b = ReadFile(dir + "/b");
  return a.ok() && b.ok() && *a == *b ? *a : "mixed";
}

std::unique_ptr<AtomicFolder> Begin(const std::string& path) {
  auto folder = AtomicFolder::Create(path);
  EXPECT_TRUE(folder.ok()) << folder.status();
  return *std::move(folder);
}

TEST(AtomicFolderTest, TheOldFolderStaysWholeUntilCommit) {
  for (const bool can_exchange : {true, false}) {
    TempDir dir;
    Fill(dir.File("final"), "old");
    dir.Write("final/c", "only the old one has this");
    auto folder = Begin(dir.File("final"));
    folder->set_can_exchange(can_exchange);
    Fill(folder->temp_path(), "new");
    EXPECT_EQ(TextOf(dir.File("final")), "old");
    const absl::Status status = folder->Commit();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(TextOf(dir.File("final")), "new");
    EXPECT_FALSE(PathExists(dir.File("final/c")));
    EXPECT_EQ(dir.Count(), 1);
  }
}

TEST(AtomicFolderTest, TheFirstFolderAppearsWithItsParents) {
  TempDir dir;
  auto folder = Begin(dir.File("x/y/final"));
  Fill(folder->temp_path(), "new");
  EXPECT_FALSE(PathExists(dir.File("x/y/final")));
  ASSERT_TRUE(folder->Commit().ok());
  EXPECT_EQ(TextOf(dir.File("x/y/final")), "new");
  EXPECT_THAT(ListFolder(dir.File("x/y")).value(), ElementsAre("final"));
}

TEST(AtomicFolderTest, WithoutCommitNothingIsLeftBehind) {
  TempDir dir;
  Fill(dir.File("final"), "old");
  Fill(Begin(dir.File("final"))->temp_path(), "new");
  EXPECT_EQ(TextOf(dir.File("final")), "old");
  EXPECT_EQ(dir.Count(), 1);
}

TEST(AtomicFolderTest, AFileOfThatNameIsRefused) {
  TempDir dir;
  dir.Write("final", "a file");
  const auto folder = AtomicFolder::Create(dir.File("final"));
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr("final"));
  EXPECT_EQ(dir.Read("final"), "a file");
}

// Commits "new" over "old" in another process that exits abruptly after `steps`
// steps; returns false if Commit had fewer and completed.
bool CrashAfter(int steps, bool can_exchange, const std::string& path) {
  const pid_t child = ::fork();
  if (child == 0) {
    auto folder = AtomicFolder::Create(path);
    if (!folder.ok()) ::_exit(1);
    Fill((*folder)->temp_path(), "new");
    (*folder)->set_can_exchange(can_exchange);
    (*folder)->set_step_hook([&steps] {
      if (--steps == 0) ::_exit(7);
    });
    if (steps == 0) ::_exit(7);  // written, but no step done
    ::_exit((*folder)->Commit().ok() ? 0 : 1);
  }
  int result = 0;
  ::waitpid(child, &result, 0);
  EXPECT_TRUE(WIFEXITED(result));
  EXPECT_THAT(WEXITSTATUS(result), ::testing::AnyOf(0, 7));
  return WEXITSTATUS(result) == 7;
}

TEST(AtomicFolderTest, ACrashAfterAnyStepLosesNothing) {
  for (const bool can_exchange : {true, false}) {
    int steps = 0;
    for (bool crashed = true; crashed; ++steps) {
      SCOPED_TRACE(absl::StrCat("exchange ", can_exchange, ", step ", steps));
      TempDir dir;
      const std::string path = dir.File("final");
      Fill(path, "old");
      crashed = CrashAfter(steps, can_exchange, path);
      if (can_exchange) {
        // At no moment is there less than a whole folder.
        EXPECT_THAT(TextOf(path), ::testing::AnyOf("old", "new"));
      }
      const std::string before = PathExists(path) ? TextOf(path) : "old";
      ASSERT_TRUE(RemoveStaleFiles(dir.path(), {"final"}).ok());
      EXPECT_EQ(TextOf(path), before);
      EXPECT_THAT(ListFolder(dir.path()).value(), ElementsAre("final"));
    }
    EXPECT_EQ(steps, can_exchange ? 5 : 6);  // 3 or 4 steps, none, and all
  }
}

TEST(AtomicFolderTest, AFailedRenameLeavesTheOldFolderWhereItWas) {
  for (const bool can_exchange : {true, false}) {
    TempDir dir;
    Fill(dir.File("final"), "old");
    auto folder = Begin(dir.File("final"));
    folder->set_can_exchange(can_exchange);
    // The new folder is removed between the two renames.
    folder->set_step_hook(
        [&] { std::filesystem::remove_all(folder->temp_path()); });
    const absl::Status status = folder->Commit();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_EQ(TextOf(dir.File("final")), "old");
    folder.reset();
    EXPECT_EQ(dir.Count(), 1);
  }
}

// The result of a power cut is unknown, so both folders stay.
TEST(AtomicFolderTest, WhereOnlyTheLastSyncFailsTheNewFolderIsInItsPlace) {
  for (const bool can_exchange : {true, false}) {
    TempDir dir;
    Fill(dir.File("run/final"), "old");
    auto folder = Begin(dir.File("run/final"));
    Fill(folder->temp_path(), "new");
    folder->set_can_exchange(can_exchange);
    int steps = can_exchange ? 2 : 3;  // the new folder is in its place
    folder->set_step_hook([&] {
      if (--steps == 0) {
        std::filesystem::rename(dir.File("run"), dir.File("moved"));
      }
    });
    const absl::Status status = folder->Commit();
    folder.reset();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("is written, but might not survive a power cut"));
    EXPECT_EQ(TextOf(dir.File("moved/final")), "new");
    const auto names = ListFolder(dir.File("moved")).value();
    ASSERT_EQ(names.size(), 2u);
    EXPECT_EQ(TextOf(dir.File("moved/" + names[1])), "old");
  }
}

// The id of a dead process.
int DeadProcess() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return child;
}

TEST(RemoveStaleFilesTest, TakesWhatTheDeadLeftAndNothingElse) {
  TempDir dir;
  const int dead = DeadProcess();
  dir.Write(absl::StrCat("summary.json.zero-tmp.", dead, ".0"), "half");
  dir.Write(absl::StrCat("final.zero-tmp.", dead, ".1/model.safetensors"),
            "half");
  dir.Write(absl::StrCat("final.zero-old.", dead, ".2/config.json"), "older");
  dir.Write("final/config.json", "kept");
  dir.Write(absl::StrCat("final.zero-tmp.", ::getppid(), ".0"),
            "being written");
  const std::string theirs[] = {"notes.tmp",
                                "report.tmp.2024.11",
                                "final.tmp.2024.11",
                                "final.zero-tmp.b.c",
                                "final.zero-tmp.0.1",
                                "final.zero-new.1.2",
                                absl::StrCat("report.zero-tmp.", dead, ".3")};
  for (const std::string& name : theirs) dir.Write(name + "/x", "a user's");
  ASSERT_TRUE(RemoveStaleFiles(dir.path(), {"summary.json", "final"}).ok());
  std::vector<std::string> want(std::begin(theirs), std::end(theirs));
  want.push_back("final");
  want.push_back(absl::StrCat("final.zero-tmp.", ::getppid(), ".0"));
  EXPECT_THAT(ListFolder(dir.path()).value(),
              ::testing::UnorderedElementsAreArray(want));
  EXPECT_EQ(dir.Read("final/config.json"), "kept");
}

TEST(RemoveStaleFilesTest, AFolderThatWasMovedAwayComesBack) {
  TempDir dir;
  const int dead = DeadProcess();
  Fill(dir.File(absl::StrCat("final.zero-old.", dead, ".4")), "old");
  Fill(dir.File(absl::StrCat("final.zero-tmp.", dead, ".3")), "new");
  ASSERT_TRUE(RemoveStaleFiles(dir.path(), {"final"}).ok());
  EXPECT_THAT(ListFolder(dir.path()).value(), ElementsAre("final"));
  EXPECT_EQ(TextOf(dir.File("final")), "old");
}

TEST(RemoveStaleFilesTest, AMissingFolderIsNotFound) {
  TempDir dir;
  EXPECT_EQ(RemoveStaleFiles(dir.File("nope"), {}).code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(RemoveStaleFiles(dir.path(), {"final"}).ok());
  EXPECT_THAT(ListFolder(dir.path()).value(), IsEmpty());
}

}  // namespace
}  // namespace zero
