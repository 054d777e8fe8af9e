#include "engine/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

// A state of a parameter: its bytes say which element of which save they are.
struct Whole {
  std::string state, parameter;
  int64_t elems;
  DType dtype;

  int64_t item() const { return static_cast<int64_t>(DTypeBytes(dtype)); }
  std::string Bytes(int64_t step) const {
    std::mt19937 random(static_cast<unsigned>(
        std::hash<std::string>()(state + parameter) + step));
    std::string bytes(elems * item(), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
  }
};

using Model = std::vector<Whole>;

Model SmallModel() {
  return {
      {"weight", "a", 6, DType::kF32},   {"weight", "b.w", 35, DType::kBF16},
      {"exp_avg", "a", 6, DType::kF32},  {"exp_avg", "b.w", 35, DType::kF32},
      {"low_bits", "a", 6, DType::kU16}, {"half", "b.w", 35, DType::kF16}};
}

// More than two blocks, the last of which is not full.
Model LargeModel() {
  return {
      {"weight", "a", 1, DType::kF32},
      {"weight", "big", (kCheckpointBlockBytes * 5 / 2) / 4 + 3, DType::kF32},
      {"low_bits", "big", (kCheckpointBlockBytes * 5 / 2) / 4 + 3,
       DType::kU16}};
}

CheckpointManifest ManifestOf(const Model& model, int64_t parts, int64_t step) {
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.samples = step * 8;
  manifest.parts = parts;
  manifest.run = "the run";
  manifest.save = absl::StrCat("save ", step);
  for (const Whole& whole : model) {
    manifest.parameters[whole.parameter] = {whole.elems};
  }
  manifest.progress = {{"lr", 1e-3}, {"epoch", 2}};
  manifest.config = {{"model", {{"xxh3_128", "not a hash"}}}};
  return manifest;
}

// Each state cut at random places into ranges, each given to a random part.
std::vector<std::vector<CheckpointRange>> Cut(const Model& model, int parts,
                                              unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<CheckpointRange>> ranges(parts);
  for (const Whole& whole : model) {
    for (int64_t begin = 0; begin < whole.elems;) {
      const int64_t most = std::max<int64_t>(whole.elems / 3, 2);
      const int64_t elems = std::min<int64_t>(
          1 + static_cast<int64_t>(random() % most), whole.elems - begin);
      ranges[random() % parts].push_back(
          {whole.state, whole.parameter, begin, elems, whole.dtype});
      begin += elems;
    }
  }
  return ranges;
}

const Whole& Of(const Model& model, const CheckpointRange& range) {
  return *std::find_if(model.begin(), model.end(), [&](const Whole& whole) {
    return whole.state == range.state && whole.parameter == range.parameter;
  });
}

absl::Status WritePart(const std::string& folder, int64_t part,
                       const Model& model, int64_t step,
                       const std::vector<CheckpointRange>& ranges,
                       int64_t piece_elems = int64_t{1} << 18) {
  auto writer = CheckpointPartWriter::Create(
      folder, part, absl::StrCat("save ", step), ranges);
  if (!writer.ok()) return writer.status();
  // Ranges interleaved, the last one first.
  bool wrote = true;
  for (int64_t first = 0; wrote; first += piece_elems) {
    wrote = false;
    for (size_t r = ranges.size(); r-- > 0;) {
      if (first >= ranges[r].elems) continue;
      const Whole& whole = Of(model, ranges[r]);
      const int64_t n = std::min(piece_elems, ranges[r].elems - first);
      const std::string bytes = whole.Bytes(step).substr(
          (ranges[r].begin + first) * whole.item(), n * whole.item());
      const absl::Status status = (*writer)->Write(r, first, bytes.data(), n);
      if (!status.ok()) return status;
      wrote = true;
    }
  }
  return (*writer)->Commit();
}

// Writes step-N in `checkpoints` as `parts` parts.
absl::Status Save(const std::string& checkpoints, const Model& model,
                  int64_t step, int parts = 2, unsigned seed = 1,
                  const std::function<void()>& hook = {}) {
  absl::Status status = BeginCheckpoint(checkpoints, step);
  const auto ranges = Cut(model, parts, seed);
  for (int part = 0; part < parts && status.ok(); ++part) {
    status = WritePart(PartialFolder(checkpoints, step), part, model, step,
                       ranges[part]);
  }
  return status.ok() ? CommitCheckpoint(checkpoints,
                                        ManifestOf(model, parts, step), hook)
                     : status;
}

// What `folder` has of all states is what step `step` wrote; else why not.
absl::Status Load(const std::string& folder, const Model& model, int64_t step) {
  const auto reader = CheckpointReader::Open(folder);
  if (!reader.ok()) return reader.status();
  if ((*reader)->manifest().step != step) {
    return absl::InternalError("another step");
  }
  for (const Whole& whole : model) {
    std::string bytes(whole.elems * whole.item(), '\0');
    const absl::Status status = (*reader)->Read(whole.state, whole.parameter, 0,
                                                whole.elems, bytes.data());
    if (!status.ok()) return status;
    if (bytes != whole.Bytes(step)) return absl::InternalError("wrong bytes");
  }
  return absl::OkStatus();
}

// A checkpoint that must not load: an error that names a file, and never the
// wrong bytes.
std::string ErrorOf(const std::string& folder, const Model& model,
                    int64_t step) {
  const absl::Status status = Load(folder, model, step);
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(absl::IsInternal(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("step-"));
  return std::string(status.message());
}

class CheckpointTest : public ::testing::Test {
 protected:
  std::string Step(int64_t step) const {
    return absl::StrCat(checkpoints_, "/step-0000000", step);
  }
  TempDir dir_;
  const std::string checkpoints_ = dir_.File("run/checkpoints");
};

TEST_F(CheckpointTest, WhatIsWrittenInPartsIsReadAtOtherCuts) {
  for (const Model& model : {SmallModel(), LargeModel()}) {
    for (const int parts : {1, 2, 5}) {
      SCOPED_TRACE(absl::StrCat(model.size(), " states, ", parts, " parts"));
      ASSERT_TRUE(Save(checkpoints_, model, 3, parts, parts).ok());
      const auto reader = CheckpointReader::Open(Step(3) + "/");
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_TRUE((*reader)->Verify().ok());
      EXPECT_THAT((*reader)->parts(), SizeIs(parts));
      std::mt19937 random(7);
      for (const Whole& whole : model) {
        EXPECT_EQ((*reader)->dtype(whole.state, whole.parameter), whole.dtype);
        const std::string want = whole.Bytes(3);
        for (int i = 0; i < 50; ++i) {
          const int64_t begin =
              static_cast<int64_t>(random()) % (whole.elems + 1);
          const int64_t elems =
              static_cast<int64_t>(random()) % (whole.elems - begin + 1);
          std::string got(elems * whole.item(), '\0');
          const absl::Status status = (*reader)->Read(
              whole.state, whole.parameter, begin, elems, got.data());
          ASSERT_TRUE(status.ok()) << status;
          ASSERT_EQ(got,
                    want.substr(begin * whole.item(), elems * whole.item()));
        }
      }
    }
  }
}

TEST_F(CheckpointTest, TheManifestComesBack) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
  const auto reader = CheckpointReader::Open(Step(3));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const CheckpointManifest& manifest = (*reader)->manifest();
  EXPECT_EQ(manifest.step, 3);
  EXPECT_EQ(manifest.samples, 24);
  EXPECT_EQ(manifest.parts, 2);
  EXPECT_EQ(manifest.run, "the run");
  EXPECT_EQ(manifest.save, "save 3");
  EXPECT_THAT(manifest.date, HasSubstr("Z"));
  EXPECT_THAT(manifest.parameters,
              ElementsAre(std::pair("a", std::vector<int64_t>{6}),
                          std::pair("b.w", std::vector<int64_t>{35})));
  EXPECT_EQ(manifest.progress.dump(), R"({"lr":0.001,"epoch":2})");
  EXPECT_EQ(manifest.config.dump(), R"({"model":{"xxh3_128":"not a hash"}})");
  EXPECT_THAT((*reader)->states(),
              ElementsAre("exp_avg", "half", "low_bits", "weight"));
  EXPECT_TRUE((*reader)->Has("low_bits", "a"));
  EXPECT_FALSE((*reader)->Has("low_bits", "b.w"));
  EXPECT_EQ(dir_.Read("run/checkpoints/latest"), "step-00000003\n");
  float value;
  EXPECT_EQ((*reader)->Read("low_bits", "b.w", 0, 1, &value).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ((*reader)->Read("weight", "a", 5, 2, &value).code(),
            absl::StatusCode::kOutOfRange);
}

TEST_F(CheckpointTest, ManyThreadsReadAtOnce) {
  const Model model = LargeModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3, 3).ok());
  const auto reader = CheckpointReader::Open(Step(3));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const Whole& big = model[1];
  const std::string want = big.Bytes(3);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      constexpr int64_t kElems = 100003;
      std::string got(kElems * 4, '\0');
      for (int64_t at = t; at + kElems <= big.elems; at += kElems) {
        const absl::Status status =
            (*reader)->Read("weight", "big", at, kElems, got.data());
        wrong[t] += !status.ok() || got != want.substr(at * 4, kElems * 4);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, ElementsAre(0, 0, 0, 0));
}

TEST_F(CheckpointTest, AMissingFileIsAnError) {
  for (const char* name :
       {"checkpoint.json", "states-00001.json", "states-00001.safetensors"}) {
    ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
    fs::remove(Step(3) + "/" + name);
    const std::string error = ErrorOf(Step(3), SmallModel(), 3);
    EXPECT_THAT(error, HasSubstr(name));
    EXPECT_THAT(error, HasSubstr("; "));
  }
}

}  // namespace
}  // namespace zero
