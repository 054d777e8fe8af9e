#include "engine/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "engine/base/file.h"
#include "engine/base/hash.h"
#include "engine/checkpoint/checkpoint_reads.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
namespace fs = std::filesystem;

// A state of a parameter: its bytes identify the element and the save.
struct Whole {
  std::string state, parameter;
  int64_t elems;
  DType dtype;

  int64_t item() const { return static_cast<int64_t>(DTypeBytes(dtype)); }
  const std::string& Bytes(int64_t step) const {
    static std::map<std::string, std::string> made;
    std::string& bytes =
        made[absl::StrCat(state, " ", parameter, " ", elems, " ", step)];
    if (bytes.empty()) {
      std::mt19937 random(static_cast<unsigned>(made.size()));
      bytes.resize(elems * item());
      for (char& byte : bytes) byte = static_cast<char>(random());
    }
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
  if (status.ok()) {
    status =
        CommitCheckpoint(checkpoints, ManifestOf(model, parts, step), hook);
  }
  if (status.ok()) status = WriteLatest(checkpoints, step);
  if (status.ok() && hook) hook();
  return status;
}

// The same by reads that are known in advance, in pieces.
absl::Status LoadAhead(const CheckpointReader& reader, const Model& model,
                       int64_t step) {
  std::vector<CheckpointRange> ranges;
  for (const Whole& whole : model) {
    constexpr int64_t kPiece = 300'007;
    for (int64_t begin = 0; begin < whole.elems; begin += kPiece) {
      ranges.push_back({whole.state, whole.parameter, begin,
                        std::min(kPiece, whole.elems - begin), whole.dtype});
    }
  }
  const auto reads = CheckpointReads::Open(reader, ranges);
  if (!reads.ok()) return reads.status();
  for (const CheckpointRange& range : ranges) {
    const Whole& whole = Of(model, range);
    std::string bytes(range.elems * whole.item(), '\0');
    const absl::Status status = (*reads)->Next(bytes.data());
    if (!status.ok()) return status;
    if (whole.Bytes(step).compare(range.begin * whole.item(), bytes.size(),
                                  bytes) != 0) {
      return absl::InternalError("wrong bytes");
    }
  }
  return absl::OkStatus();
}

absl::Status LoadWhole(const CheckpointReader& reader, const Model& model,
                       int64_t step) {
  for (const Whole& whole : model) {
    std::string bytes(whole.elems * whole.item(), '\0');
    const absl::Status status =
        reader.Read(whole.state, whole.parameter, 0, whole.elems, bytes.data());
    if (!status.ok()) return status;
    if (bytes != whole.Bytes(step)) return absl::InternalError("wrong bytes");
  }
  return absl::OkStatus();
}

// Checks that all states in `folder` are those written by step `step`; else why
// not.
absl::Status Load(const std::string& folder, const Model& model, int64_t step) {
  const auto reader = CheckpointReader::Open(folder);
  if (!reader.ok()) return reader.status();
  if ((*reader)->manifest().step != step) {
    return absl::InternalError("another step");
  }
  const absl::Status whole = LoadWhole(**reader, model, step);
  const absl::Status ahead = LoadAhead(**reader, model, step);
  EXPECT_EQ(whole.code(), ahead.code()) << whole << " " << ahead;
  return whole;
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

// The first damage in any part.
absl::Status Verify(const CheckpointReader& reader) {
  absl::Status status;
  for (size_t part = 0; part < reader.parts().size(); ++part) {
    status.Update(reader.VerifyPart(part));
  }
  return status;
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
      EXPECT_TRUE(Verify(**reader).ok());
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

void Overwrite(const std::string& path, const std::string& contents) {
  // A new file: ext4 flushes one that is truncated and written again.
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << contents;
}

// The text of a JSON file of a checkpoint with the checksum that fits it.
std::string Resealed(std::string text) {
  const std::string key = "\"xxh3_128\": \"";
  const size_t at = text.find(key) + key.size();
  if (at < key.size() || at + 32 > text.size()) return text;
  text.replace(at, 32, std::string(32, '0'));
  return text.replace(at, 32, HashOf(text));
}

// Lets an index know the header that its data file now has.
void RenewIndex(const std::string& stem) {
  const std::string data = ReadFile(stem + ".safetensors").value();
  auto index = nlohmann::ordered_json::parse(ReadFile(stem + ".json").value());
  index["file_bytes"] = data.size();
  index["header_xxh3_128"] =
      HashOf(data.substr(0, index["header_bytes"].get<size_t>()));
  Overwrite(stem + ".json", Resealed(index.dump(1) + "\n"));
}

constexpr const char* kFiles[] = {"checkpoint.json", "states-00000.json",
                                  "states-00000.safetensors"};

TEST_F(CheckpointTest, EveryByteThatChangesIsFound) {
  const Model model = SmallModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3).ok());
  for (const char* name : kFiles) {
    const std::string path = Step(3) + "/" + name;
    const std::string whole = ReadFile(path).value();
    for (size_t i = 0; i < whole.size(); ++i) {
      std::string flipped = whole;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
      Overwrite(path, flipped);
      ASSERT_THAT(ErrorOf(Step(3), model, 3), HasSubstr(name))
          << "byte " << i << " of " << whole.size();
    }
    Overwrite(path, whole);
  }
  EXPECT_TRUE(Load(Step(3), model, 3).ok());
}

TEST_F(CheckpointTest, EveryLengthThatAFileIsCutToIsFound) {
  const Model model = SmallModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3).ok());
  for (const char* name : kFiles) {
    const std::string path = Step(3) + "/" + name;
    const std::string whole = ReadFile(path).value();
    for (size_t size = 0; size < whole.size(); size += 7) {
      Overwrite(path, whole.substr(0, size));
      ASSERT_THAT(ErrorOf(Step(3), model, 3), HasSubstr(name)) << size;
    }
    Overwrite(path, whole + "\n");
    EXPECT_THAT(ErrorOf(Step(3), model, 3), HasSubstr(name));
    Overwrite(path, whole);
  }
}

// Half of them with matching checksums, to test the checks after them.
TEST_F(CheckpointTest, TenThousandMutationsNeitherCrashNorLoadWrongBytes) {
  const Model model = SmallModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3).ok());
  ASSERT_TRUE(Save(checkpoints_, model, 4, 2, 9).ok());
  std::map<std::string, std::string> whole;
  for (const char* name : kFiles) {
    whole[name] = ReadFile(Step(3) + "/" + name).value();
  }
  const std::string header = whole["states-00000.safetensors"];
  uint64_t header_bytes;
  memcpy(&header_bytes, header.data(), sizeof(header_bytes));
  const std::string often = "{}[]\",:0123456789-eFIBUabnullw \\";
  std::mt19937 random(4);
  int num_right = 0, num_swapped = 0, num_renewed = 0;
  for (int i = 0; i < 10000; ++i) {
    const std::string name = kFiles[random() % 3];
    const bool is_data = absl::EndsWith(name, ".safetensors");
    const std::string path = Step(3) + "/" + name;
    std::string mutated = whole[name];
    const bool renew = random() % 2 == 0;
    if (random() % 50 == 0) {
      mutated = ReadFile(Step(4) + "/" + name).value();
      ++num_swapped;
    }
    for (size_t c = random() % 4; c > 0; --c) {
      const size_t end = is_data ? 8 + header_bytes : mutated.size();
      const size_t at = random() % std::min(end, mutated.size());
      switch (random() % 4) {
        case 0:
          mutated[at] = static_cast<char>(mutated[at] ^ (1 << random() % 8));
          break;
        case 1:
          mutated[at] = often[random() % often.size()];
          break;
        case 2:
          mutated.insert(at, 1, often[random() % often.size()]);
          break;
        case 3:
          mutated.erase(at, random() % 4);
          break;
      }
      if (random() % 16 == 0) mutated.resize(random() % mutated.size() + 1);
    }
    Overwrite(path, renew && !is_data ? Resealed(mutated) : mutated);
    if (renew && is_data) RenewIndex(Step(3) + "/states-00000");
    const absl::Status status = Load(Step(3), model, 3);
    ASSERT_FALSE(absl::IsInternal(status)) << status << "\n" << mutated;
    num_right += status.ok();
    num_renewed += renew;
    if (status.ok() && !renew) {
      ASSERT_EQ(mutated, whole[name]);
    }
    Overwrite(path, whole[name]);
    if (renew && is_data) {
      Overwrite(Step(3) + "/states-00000.json", whole["states-00000.json"]);
    }
  }
  EXPECT_GT(num_right, 1000);
  EXPECT_LT(num_right, 5000);
  EXPECT_GT(num_swapped, 100);
  EXPECT_GT(num_renewed, 4000);
}

TEST_F(CheckpointTest, AFileThatIsCutOffWhileItIsReadIsAnError) {
  const Model model = LargeModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3, 1).ok());
  const auto reader = CheckpointReader::Open(Step(3));
  ASSERT_TRUE(reader.ok()) << reader.status();
  fs::resize_file(Step(3) + "/states-00000.safetensors", 5000);
  std::string bytes(model[1].elems * 4, '\0');
  const absl::Status status =
      (*reader)->Read("weight", "big", 0, model[1].elems, bytes.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("truncated"));
  EXPECT_EQ(Verify(**reader).code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, DamageIsNamedByFileTensorAndBytes) {
  const Model model = LargeModel();
  ASSERT_TRUE(Save(checkpoints_, model, 3, 1).ok());
  const std::string path = Step(3) + "/states-00000.safetensors";
  std::string contents = ReadFile(path).value();
  contents.back() = static_cast<char>(contents.back() ^ 4);
  Overwrite(path, contents);
  const auto reader = CheckpointReader::Open(Step(3));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const std::string error(Verify(**reader).message());
  EXPECT_THAT(error, HasSubstr(path));
  EXPECT_THAT(error, HasSubstr("low_bits/big["));
  EXPECT_THAT(error, HasSubstr(absl::StrCat("to ", contents.size())));
  EXPECT_THAT(error, HasSubstr("; use another checkpoint"));
  // Undamaged data can be read.
  float value;
  EXPECT_TRUE((*reader)->Read("weight", "a", 0, 1, &value).ok());
}

TEST_F(CheckpointTest, ANewerFormatIsRefusedWithWhatToDo) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 2).ok());
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
  for (const char* name : {"checkpoint.json", "states-00000.json"}) {
    const std::string path = Step(3) + "/" + name;
    const std::string whole = ReadFile(path).value();
    Overwrite(path, Resealed(absl::StrReplaceAll(
                        whole, {{"\"version\": 1", "\"version\": 2"}})));
    EXPECT_THAT(ErrorOf(Step(3), SmallModel(), 3),
                HasSubstr("use the newer zero that wrote it"));
    // It is not damaged, so an older one does not replace it.
    EXPECT_EQ(FindNewestCheckpoint(checkpoints_).status().code(),
              absl::StatusCode::kFailedPrecondition);
    Overwrite(path, whole);
  }
}

TEST_F(CheckpointTest, AFolderUnderAnotherStepsNameIsRefused) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
  fs::rename(Step(3), Step(5));
  EXPECT_THAT(ErrorOf(Step(5), SmallModel(), 3), HasSubstr("step 3"));
  fs::rename(Step(5), dir_.File("best"));
  EXPECT_TRUE(Load(dir_.File("best"), SmallModel(), 3).ok());
}

// CommitCheckpoint's result for parts with these ranges of SmallModel.
class CommitTest : public CheckpointTest {
 protected:
  std::string ErrorWith(const std::vector<std::vector<CheckpointRange>>& ranges,
                        const Model& model = SmallModel()) {
    EXPECT_TRUE(BeginCheckpoint(checkpoints_, 3).ok());
    for (size_t part = 0; part < ranges.size(); ++part) {
      const absl::Status status =
          WritePart(PartialFolder(checkpoints_, 3), static_cast<int64_t>(part),
                    model, 3, ranges[part]);
      EXPECT_TRUE(status.ok()) << status;
    }
    return Error();
  }
  std::string Error() {
    const absl::Status status =
        CommitCheckpoint(checkpoints_, ManifestOf(SmallModel(), 2, 3));
    EXPECT_FALSE(status.ok());
    // Nothing is left of it.
    EXPECT_THAT(ListFolder(checkpoints_).value(), IsEmpty());
    return std::string(status.message());
  }
};

TEST_F(CommitTest, EveryElementMustBeInOnePart) {
  const auto ranges = Cut(SmallModel(), 2, 1);
  for (size_t part = 0; part < 2; ++part) {
    for (size_t r = 0; r < ranges[part].size(); ++r) {
      auto changed = ranges;
      changed[part].erase(changed[part].begin() + r);
      EXPECT_THAT(ErrorWith(changed),
                  testing::AnyOf(HasSubstr("is in no part"),
                                 HasSubstr("no part has the weight of")));
      changed = ranges;
      changed[1 - part].push_back(ranges[part][r]);
      EXPECT_THAT(ErrorWith(changed), HasSubstr("is in two parts"));
    }
  }
}

TEST_F(CommitTest, RangesMustFitTheParameters) {
  auto ranges = Cut(SmallModel(), 2, 1);
  Model model = SmallModel();
  model.push_back({"exp_avg", "c", 4, DType::kF32});
  ranges[0].push_back({"exp_avg", "c", 0, 4, DType::kF32});
  EXPECT_THAT(ErrorWith(ranges, model), HasSubstr("has no parameter 'c'"));
  ranges[0].pop_back();
  model.pop_back();
  model[0].elems = 8;
  ranges[0].push_back({"weight", "a", 6, 2, DType::kF32});
  EXPECT_THAT(
      ErrorWith(ranges, model),
      HasSubstr("element 6 of weight of 'a' (6 elements) is there all"));
  ranges[0].back() = {"exp_avg_sq", "a", 0, 3, DType::kF32};
  ranges[1].push_back({"exp_avg_sq", "a", 3, 3, DType::kBF16});
  model.push_back({"exp_avg_sq", "a", 6, DType::kF32});
  EXPECT_TRUE(BeginCheckpoint(checkpoints_, 3).ok());
  const std::string folder = PartialFolder(checkpoints_, 3);
  ASSERT_TRUE(WritePart(folder, 0, model, 3, ranges[0]).ok());
  model.back().dtype = DType::kBF16;
  ASSERT_TRUE(WritePart(folder, 1, model, 3, ranges[1]).ok());
  EXPECT_THAT(Error(), HasSubstr("is bf16, other elements are fp32"));
}

TEST_F(CommitTest, APartOfAnotherSaveIsNotTaken) {
  const auto ranges = Cut(SmallModel(), 2, 1);
  const std::string folder = PartialFolder(checkpoints_, 3);
  for (const int64_t step : {3, 4}) {
    ASSERT_TRUE(BeginCheckpoint(checkpoints_, 3).ok());
    ASSERT_TRUE(WritePart(folder, 0, SmallModel(), 3, ranges[0]).ok());
    ASSERT_TRUE(WritePart(folder, 1, SmallModel(), step, ranges[1]).ok());
    if (step == 3) {  // the right one as another part
      fs::rename(folder + "/states-00000.json", folder + "/states-00001.json");
      ASSERT_TRUE(WritePart(folder, 0, SmallModel(), 3, ranges[0]).ok());
    }
    EXPECT_THAT(Error(), HasSubstr("files of two checkpoints are mixed"));
  }
}

TEST_F(CommitTest, APartThatIsNotThereIsNamed) {
  EXPECT_THAT(ErrorWith({Cut(SmallModel(), 2, 1)[0]}),
              HasSubstr("part 2 of 2 is missing: '"));
}

TEST_F(CheckpointTest, APartIsGivenWholeAndInOrder) {
  const std::string data(40, 'x');
  const auto create = [&](std::vector<CheckpointRange> ranges) {
    EXPECT_TRUE(BeginCheckpoint(checkpoints_, 3).ok());
    return CheckpointPartWriter::Create(PartialFolder(checkpoints_, 3), 0,
                                        "save", std::move(ranges));
  };
  const CheckpointRange range = {"weight", "a", 2, 10, DType::kF32};
  EXPECT_FALSE(create({range, range}).ok());
  EXPECT_FALSE(create({{"weight", "a", 0, 0, DType::kF32}}).ok());
  EXPECT_FALSE((*create({range}))->Write(0, 1, data.data(), 1).ok());
  EXPECT_FALSE((*create({range}))->Write(0, 0, data.data(), 11).ok());
  const auto writer = create({range});
  EXPECT_TRUE((*writer)->Write(0, 0, data.data(), 9).ok());
  EXPECT_FALSE((*writer)->Write(0, 0, data.data(), 1).ok());
  EXPECT_THAT(std::string((*writer)->Commit().message()),
              HasSubstr("weight/a[2:12]"));
  EXPECT_FALSE(
      PathExists(PartialFolder(checkpoints_, 3) + "/states-00000.safetensors"));
}

// A rank that owns nothing still has a part.
TEST_F(CheckpointTest, APartMayBeEmpty) {
  auto ranges = Cut(SmallModel(), 1, 1);
  ASSERT_TRUE(BeginCheckpoint(checkpoints_, 3).ok());
  const std::string folder = PartialFolder(checkpoints_, 3);
  ASSERT_TRUE(WritePart(folder, 0, SmallModel(), 3, ranges[0]).ok());
  ASSERT_TRUE(WritePart(folder, 1, SmallModel(), 3, {}).ok());
  const absl::Status status =
      CommitCheckpoint(checkpoints_, ManifestOf(SmallModel(), 2, 3));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Load(Step(3), SmallModel(), 3).ok());
}

// Runs `work` in another process and returns how it ended.
int InAnotherProcess(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int result = 0;
  ::waitpid(child, &result, 0);
  EXPECT_TRUE(WIFEXITED(result));
  return WEXITSTATUS(result);
}

TEST_F(CheckpointTest, WhereTheDiskHasNoRoomTheErrorSaysWhatToDo) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 2).ok());
  const auto save = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status = Save(checkpoints_, LargeModel(), 3);
    const bool fits = absl::IsResourceExhausted(status) &&
                      absl::StrContains(status.message(), "states-0000") &&
                      absl::StrContains(status.message(), "ulimit -f") &&
                      AbandonCheckpoint(checkpoints_, 3).ok();
    return fits ? 7 : 1;
  };
  EXPECT_EQ(InAnotherProcess(save), 7);
  EXPECT_THAT(ListFolder(checkpoints_).value(),
              ElementsAre("latest", "step-00000002"));
}

TEST_F(CheckpointTest, WhereNothingMayBeWrittenTheErrorSaysWhere) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 2).ok());
  const auto save = [&] {
    ::chmod(checkpoints_.c_str(), 0500);
    ::chmod(dir_.path().c_str(), 0755);
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 1;
    const absl::Status status = BeginCheckpoint(checkpoints_, 3);
    const bool fits =
        absl::IsPermissionDenied(status) &&
        absl::StrContains(status.message(), "checkpoints") &&
        absl::StrContains(status.message(), "check owner and permissions");
    return fits ? 7 : 1;
  };
  EXPECT_EQ(InAnotherProcess(save), 7);
  ::chmod(checkpoints_.c_str(), 0700);
}

TEST_F(CheckpointTest, ACrashAfterAnyStepOfASaveLosesNothing) {
  const Model model = SmallModel();
  // Step 2 is always there; step 3 is new, or replaced by other bytes: those of
  // another cut.
  for (const bool replaces : {false, true}) {
    int steps = 1;
    for (bool crashed = true; crashed; ++steps) {
      SCOPED_TRACE(absl::StrCat("replaces ", replaces, ", step ", steps));
      fs::remove_all(checkpoints_);
      ASSERT_TRUE(Save(checkpoints_, model, 2).ok());
      if (replaces) {
        ASSERT_TRUE(Save(checkpoints_, model, 3).ok());
      }
      const int result = InAnotherProcess([&] {
        int left = steps;
        return Save(checkpoints_, model, 3, 3, 5,
                    [&] {
                      if (--left == 0) ::_exit(7);
                    }).ok()
                   ? 0
                   : 1;
      });
      ASSERT_THAT(result, testing::AnyOf(0, 7));
      crashed = result == 7;
      // Also before any cleanup.
      for (int i = 0; i < 2; ++i) {
        const auto found = FindNewestCheckpoint(checkpoints_);
        ASSERT_TRUE(found.ok()) << found.status();
        EXPECT_THAT(found->notes, IsEmpty());
        const int64_t step = found->reader->manifest().step;
        if (replaces || steps > 3) {
          EXPECT_EQ(step, 3);
        }
        EXPECT_TRUE(Load(found->path, model, step).ok());
        ASSERT_TRUE(RemoveUnfinishedCheckpoints(checkpoints_).ok());
      }
      std::vector<std::string> want = {"latest", "step-00000002"};
      if (PathExists(Step(3))) want.push_back("step-00000003");
      EXPECT_EQ(ListFolder(checkpoints_).value(), want);
    }
    // The manifest, the folder, the rename, its folder, `latest`; and all.
    EXPECT_EQ(steps, 1 + 5 + 1);
  }
}

// If names cannot be exchanged, a replaced checkpoint is moved aside first. The
// process id is a living one's.
TEST_F(CheckpointTest, OneThatWasMovedAsideComesBack) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
  const std::string aside =
      absl::StrCat(Step(3), ".zero-old.", ::getppid(), ".0");
  fs::rename(Step(3), aside);
  ASSERT_TRUE(fs::create_directory(Step(3) + ".partial"));
  dir_.Write("run/checkpoints/latest.zero-tmp.1.5", "step-");
  dir_.Write("run/checkpoints/step-00000001.zero-tmp.1.7/checkpoint.json", "");
  dir_.Write("run/checkpoints/notes.txt", "mine");
  ASSERT_TRUE(RemoveUnfinishedCheckpoints(checkpoints_).ok());
  EXPECT_THAT(ListFolder(checkpoints_).value(),
              ElementsAre("latest", "notes.txt", "step-00000003"));
  EXPECT_TRUE(Load(Step(3), SmallModel(), 3).ok());
  // The new one is there: the old one goes.
  fs::copy(Step(3), aside);
  ASSERT_TRUE(RemoveUnfinishedCheckpoints(checkpoints_).ok());
  EXPECT_FALSE(PathExists(aside));
  EXPECT_TRUE(Load(Step(3), SmallModel(), 3).ok());
}

TEST_F(CheckpointTest, TheNewestThatOpensIsFoundWithWhyNotTheOthers) {
  EXPECT_TRUE(RemoveUnfinishedCheckpoints(checkpoints_).ok());
  EXPECT_THAT(ListCheckpoints(checkpoints_), IsEmpty());
  EXPECT_EQ(FindNewestCheckpoint(checkpoints_).status().code(),
            absl::StatusCode::kNotFound);
  for (const int64_t step : {1, 2, 3, 123456789}) {
    ASSERT_TRUE(Save(checkpoints_, SmallModel(), step).ok());
  }
  const std::string last = checkpoints_ + "/step-123456789";
  EXPECT_THAT(ListCheckpoints(checkpoints_),
              ElementsAre(Step(1), Step(2), Step(3), last));
  fs::resize_file(last + "/checkpoint.json", 9);
  fs::remove(Step(3) + "/states-00001.safetensors");
  auto found = FindNewestCheckpoint(checkpoints_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Step(2));
  EXPECT_THAT(found->notes,
              ElementsAre(HasSubstr("step-123456789 is damaged: "),
                          HasSubstr("step-00000003 is damaged: ")));
  fs::remove(Step(2) + "/checkpoint.json");
  fs::remove(Step(1) + "/checkpoint.json");
  found = FindNewestCheckpoint(checkpoints_);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(found.status().message()),
              HasSubstr("no checkpoint in"));
}

TEST_F(CheckpointTest, PruningKeepsTheNewestAndEveryNth) {
  const auto left = [&](int64_t keep_last, int64_t keep_every) {
    EXPECT_TRUE(PruneCheckpoints(checkpoints_, keep_last, keep_every).ok());
    std::string steps;
    for (const std::string& path : ListCheckpoints(checkpoints_)) {
      absl::StrAppend(&steps, path.substr(path.size() - 1));
    }
    return steps;
  };
  EXPECT_EQ(left(1, 0), "");
  for (const int64_t step : {1, 2, 3, 4, 5, 6, 7, 8}) {
    ASSERT_TRUE(Save(checkpoints_, SmallModel(), step).ok());
  }
  EXPECT_EQ(left(0, 0), "12345678");
  EXPECT_EQ(left(0, 4), "12345678");
  EXPECT_EQ(left(6, 2), "2345678");
  // One that does not open is not counted, and not removed before older ones.
  fs::remove(Step(7) + "/checkpoint.json");
  EXPECT_EQ(left(2, 4), "4678");
  EXPECT_EQ(left(1, 0), "8");
  EXPECT_THAT(ListFolder(checkpoints_).value(),
              ElementsAre("latest", "step-00000008"));
}

// Reads elements [begin, begin + elems) of the large model's "big"; what came
// from the disk.
int64_t BytesReadFor(const CheckpointReader& reader, int64_t begin,
                     int64_t elems) {
  const auto reads = CheckpointReads::Open(
      reader, {{"weight", "big", begin, elems, DType::kF32}});
  EXPECT_TRUE(reads.ok()) << reads.status();
  EXPECT_TRUE((*reads)->Next(nullptr).ok());
  return (*reads)->read_bytes();
}

TEST_F(CheckpointTest, OnlyTheBlocksOfARangeAreRead) {
  constexpr int64_t kBlockElems = kCheckpointBlockBytes / 4;
  constexpr int64_t kSectors = 2 * 4096;
  const Model model = {{"weight", "big", 11 * kBlockElems, DType::kF32}};
  ASSERT_TRUE(Save(checkpoints_, model, 3, /*parts=*/1).ok());
  const auto reader = CheckpointReader::Open(Step(3)).value();
  // The ranges of the part begin at random places: each may cut a block.
  const int64_t num_ranges =
      static_cast<int64_t>(reader->parts()[0].ranges.size());
  EXPECT_LE(BytesReadFor(*reader, 0, 1), kCheckpointBlockBytes + kSectors);
  const int64_t all = 11 * kCheckpointBlockBytes;
  EXPECT_LE(BytesReadFor(*reader, 0, 11 * kBlockElems),
            all + kSectors * (num_ranges + 3));
  // Four ranks: a block is read twice if it is cut between two of them.
  int64_t sum = 0;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const int64_t begin = 11 * kBlockElems * rank / 4;
    sum +=
        BytesReadFor(*reader, begin, 11 * kBlockElems * (rank + 1) / 4 - begin);
  }
  EXPECT_LE(sum, all + 3 * kCheckpointBlockBytes + kSectors * (num_ranges + 8));
}

TEST_F(CheckpointTest, ReadsOfWhatIsNotThereAreErrors) {
  ASSERT_TRUE(Save(checkpoints_, SmallModel(), 3).ok());
  const auto reader = CheckpointReader::Open(Step(3)).value();
  const auto code = [&](const char* state, int64_t begin, int64_t elems) {
    return CheckpointReads::Open(*reader,
                                 {{state, "a", begin, elems, DType::kF32}})
        .status()
        .code();
  };
  EXPECT_EQ(code("weight", 2, 4), absl::StatusCode::kOk);
  EXPECT_EQ(code("weight", 2, 5), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code("exp_avg_sq", 2, 4), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace zero
