// `zero checkpoint` on checkpoints whose values are known.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/portable.h"
#include "engine/config/print.h"
#include "models/catalog.h"
#include "models/hf_config.h"
#include "models/registry.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/commands.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

// A command's stdout and status.
struct Output {
  absl::Status status;
  std::string text;
};

Output RunCommand(std::vector<std::string> arguments) {
  CLI::App app;
  const Command command = AddCheckpoint(app);
  std::reverse(arguments.begin(), arguments.end());
  app.parse(arguments);
  testing::internal::CaptureStdout();
  Output output;
  output.status = command();
  output.text = testing::internal::GetCapturedStdout();
  return output;
}

// The resolved config of a run, as written by a run.
LoadedConfig ConfigOf(const std::string& preset, const std::string& more) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  options.missing_files = MissingFiles::kIgnored;
  return ParseConfig(absl::StrCat(
                         R"({"model": {"preset": ")", preset,
                         R"("}, "train_batch_size": 8, "training": {"steps": 5},
                    "data": {"tokenizer": "bytes", "sequence_length": 16})",
                         more, "}"),
                     "config.json", options)
      .value();
}

// A function of state, name and element.
float ValueOf(const std::string& state, const std::string& name, int64_t i) {
  const size_t seed = std::hash<std::string>()(state + name) % 1000;
  return static_cast<float>(seed) + static_cast<float>(i % 1021) / 1021;
}

// Writes a checkpoint of that config in `parts` parts, which take turns.
// Element 7 of the exp_avg of the first parameter is `seventh`.
void Save(const std::string& checkpoints, const LoadedConfig& loaded,
          int64_t step, int parts, float seventh = 0.5) {
  const auto model = MakeModel(loaded.config.model);
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.samples = 8 * step;
  manifest.parts = parts;
  manifest.run = "run";
  manifest.save = absl::StrCat("save ", step);
  manifest.progress = {{"lr", 0.25}};
  manifest.config = Json::parse(PrintResolvedJson(loaded.config));
  // The folder may be gone when the checkpoint is exported.
  manifest.config["model"]["from_pretrained"] = "gone";
  std::vector<std::vector<CheckpointRange>> ranges(parts);
  size_t turn = 0;
  for (const Parameter* parameter : model->AllParameters()) {
    manifest.parameters[parameter->name] = parameter->shape.dims();
    const int64_t elems = parameter->shape.num_elems();
    for (const char* state : {"weight", "exp_avg"}) {
      for (int64_t begin = 0; begin < elems; begin += 5000) {
        ranges[turn++ % parts].push_back(
            {state, parameter->name, begin,
             std::min<int64_t>(5000, elems - begin), DType::kF32});
      }
    }
  }
  ASSERT_TRUE(BeginCheckpoint(checkpoints, step).ok());
  for (int part = 0; part < parts; ++part) {
    auto writer = CheckpointPartWriter::Create(
        PartialFolder(checkpoints, step), part, manifest.save, ranges[part]);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t r = 0; r < ranges[part].size(); ++r) {
      const CheckpointRange& range = ranges[part][r];
      std::vector<float> values(range.elems);
      for (int64_t i = 0; i < range.elems; ++i) {
        values[i] = ValueOf(range.state, range.parameter, range.begin + i);
      }
      if (range.state == "exp_avg" && range.begin == 0 &&
          range.parameter == model->AllParameters()[0]->name) {
        values[7] = seventh;
      }
      ASSERT_TRUE((*writer)->Write(r, 0, values.data(), range.elems).ok());
    }
    ASSERT_TRUE((*writer)->Commit().ok());
  }
  const absl::Status status = CommitCheckpoint(checkpoints, manifest);
  ASSERT_TRUE(status.ok()) << status;
}

class CheckpointCommandTest : public ::testing::Test {
 protected:
  std::string Step(const std::string& run, int step) const {
    return dir_.File(absl::StrCat(run, "/checkpoints/step-0000000", step));
  }
  void FlipLastByte(const std::string& path) {
    std::string contents = ReadFile(path).value();
    contents.back() = static_cast<char>(contents.back() ^ 1);
    ASSERT_TRUE(WriteFileAtomically(path, contents).ok());
  }
  TempDir dir_;
};

TEST_F(CheckpointCommandTest, ListSaysWhatThereIsAndWhatIsNotComplete) {
  EXPECT_THAT(
      std::string(RunCommand({"list", dir_.File("a")}).status.message()),
      HasSubstr("does not exist; name a checkpoint"));
  ASSERT_TRUE(MakeFolders(dir_.File("a")).ok());
  EXPECT_THAT(
      std::string(RunCommand({"list", dir_.File("a")}).status.message()),
      HasSubstr("there is no checkpoint in"));
  const LoadedConfig config = ConfigOf("gpt2-tiny", "");
  Save(dir_.File("a/checkpoints"), config, 2, 2);
  Save(dir_.File("a/checkpoints"), config, 4, 1);
  std::filesystem::remove(Step("a", 4) + "/states-00000.json");
  ASSERT_TRUE(BeginCheckpoint(dir_.File("a/checkpoints"), 6).ok());
  ASSERT_TRUE(MakeFolders(Step("a", 8) + ".abandoned.22").ok());
  for (const std::string& dir : {dir_.File("a"), dir_.File("a/checkpoints/")}) {
    const Output output = RunCommand({"list", dir});
    EXPECT_TRUE(output.status.ok()) << output.status;
    const std::vector<std::string> lines = absl::StrSplit(output.text, '\n');
    ASSERT_EQ(lines.size(), 6u) << output.text;
    EXPECT_THAT(lines[1],
                testing::ContainsRegex("^step-00000002 +2 +16 20.*MiB +yes$"));
    EXPECT_THAT(lines[2],
                testing::ContainsRegex(
                    "^step-00000004 +- +- +- +-  no: .*states-00000.json"));
    EXPECT_THAT(lines[3],
                testing::ContainsRegex("^step-00000006.partial +- +- +- +-  "
                                       "no: is being written"));
    EXPECT_THAT(lines[4], testing::ContainsRegex(
                              "^step-00000008.abandoned.22 .*no: was set"));
    // All columns are below their names.
    const size_t column = lines[0].find("complete");
    EXPECT_EQ(lines[1].find("yes"), column) << output.text;
    for (const int i : {2, 3, 4}) {
      EXPECT_EQ(lines[i].find("no: "), column) << output.text;
    }
  }
  const Output output = RunCommand({"list", dir_.File("a"), "--json"});
  const Json line = Json::parse(
      std::vector<std::string>(absl::StrSplit(output.text, '\n'))[0]);
  EXPECT_EQ(line["complete"], true);
  EXPECT_EQ(line["step"], 2);
  EXPECT_EQ(line["samples"], 16);
  EXPECT_GT(line["bytes"], 1000000);
}

TEST_F(CheckpointCommandTest, ShowHasStatesParametersAndParts) {
  Save(dir_.File("a/checkpoints"), ConfigOf("gpt2-tiny", ""), 2, 3);
  for (const std::string& path :
       {dir_.File("a"), Step("a", 2), dir_.File("a/checkpoints/latest")}) {
    const Output output = RunCommand({"show", path});
    EXPECT_TRUE(output.status.ok()) << output.status;
    for (const char* part :
         {"step", "progress.lr", "exp_avg", "fp32, ", "[257, 128]",
          "exp_avg weight", "states-00002.safetensors"}) {
      EXPECT_THAT(output.text, HasSubstr(part));
    }
  }
  const Json json =
      Json::parse(RunCommand({"show", dir_.File("a"), "--json"}).text);
  EXPECT_EQ(json["parts"].size(), 3u);
  EXPECT_EQ(json["states"][1]["state"], "weight");
  EXPECT_EQ(json["config"]["training"]["steps"], 5);
  EXPECT_THAT(std::string(RunCommand({"show", dir_.path()}).status.message()),
              HasSubstr("there is no checkpoint in " + dir_.path()));
}

TEST_F(CheckpointCommandTest, VerifyNamesTheDamageOfEachFile) {
  const LoadedConfig config = ConfigOf("gpt2-tiny", "");
  Save(dir_.File("a/checkpoints"), config, 2, 3);
  Save(dir_.File("a/checkpoints"), config, 4, 2);
  Output output = RunCommand({"verify", dir_.File("a")});
  EXPECT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text, HasSubstr("step-00000002: 3 parts"));
  EXPECT_THAT(output.text, HasSubstr("step-00000004: 2 parts"));
  FlipLastByte(Step("a", 2) + "/states-00000.safetensors");
  FlipLastByte(Step("a", 2) + "/states-00002.safetensors");
  output = RunCommand({"verify", Step("a", 2), Step("a", 4)});
  EXPECT_EQ(output.status.message(), "1 of 2 checkpoints is damaged");
  EXPECT_THAT(output.text, HasSubstr("states-00000.safetensors': bytes "));
  EXPECT_THAT(output.text, Not(HasSubstr("states-00001.safetensors")));
  EXPECT_THAT(output.text, HasSubstr("states-00002.safetensors': bytes "));
  FlipLastByte(Step("a", 4) + "/checkpoint.json");
  output = RunCommand({"verify", dir_.File("a")});
  EXPECT_EQ(output.status.message(), "2 of 2 checkpoints are damaged");
  EXPECT_THAT(output.text, HasSubstr("checkpoint.json': its checksum"));
}

TEST_F(CheckpointCommandTest, DiffComparesGatheredStatesBitByBit) {
  const LoadedConfig config = ConfigOf("gpt2-tiny", "");
  Save(dir_.File("a/checkpoints"), config, 2, 3);
  Save(dir_.File("b/checkpoints"),
       ConfigOf("gpt2-tiny", R"(, "zero_optimization": {"stage": 3})"), 2, 2);
  Save(dir_.File("c/checkpoints"), config, 2, 1, 0.75);
  Save(dir_.File("d/checkpoints"), ConfigOf("llama-tiny", ""), 2, 1);
  Output output = RunCommand({"diff", dir_.File("a"), dir_.File("b")});
  EXPECT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text,
              HasSubstr("config zero_optimization.stage: 0 and 3"));
  EXPECT_THAT(output.text, HasSubstr("equal: "));
  output = RunCommand({"diff", dir_.File("a"), dir_.File("c")});
  const std::string first = "element 7: 0.5 (0x3f000000) and 0.75 (0x3f400000)";
  EXPECT_THAT(std::string(output.status.message()), HasSubstr(first));
  EXPECT_THAT(std::string(output.status.message()),
              HasSubstr(" states of parameters and 1 of "));
  EXPECT_THAT(output.text, HasSubstr("exp_avg of "));
  output = RunCommand({"diff", dir_.File("a"), dir_.File("d")});
  EXPECT_THAT(output.text, HasSubstr("only in " + dir_.File("d")));
  EXPECT_FALSE(output.status.ok());
}

TEST_F(CheckpointCommandTest, ExportIsAModelThatLoads) {
  for (const char* preset :
       {"gpt2-tiny", "llama-tiny", "qwen2-tiny", "qwen3-tiny"}) {
    SCOPED_TRACE(preset);
    const std::string run = preset;
    const LoadedConfig config = ConfigOf(preset, "");
    Save(dir_.File(run + "/checkpoints"), config, 2, 3);
    const Output output =
        RunCommand({"export", dir_.File(run), dir_.File(run + "/out")});
    ASSERT_TRUE(output.status.ok()) << output.status;
    EXPECT_THAT(output.text, HasSubstr("as fp32"));
    const auto model = MakeModel(config.config.model);
    const auto read = OpenPortable(dir_.File(run + "/out"), *model);
    ASSERT_TRUE(read.ok()) << read.status();
    for (const Parameter* parameter : model->AllParameters()) {
      std::vector<float> values(parameter->shape.num_elems());
      (*read)(*parameter, 0, static_cast<int64_t>(values.size()),
              values.data());
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i],
                  ValueOf("weight", parameter->name, static_cast<int64_t>(i)));
      }
    }
    EXPECT_TRUE(ReadHfConfig(dir_.File(run + "/out")).ok());
    EXPECT_THAT(dir_.Read(run + "/out/config.json"),
                HasSubstr("\"eos_token_id\": 256"));
  }
}

TEST_F(CheckpointCommandTest, ExportRoundsAsTheRunsParametersAre) {
  Save(dir_.File("a/checkpoints"),
       ConfigOf("gpt2-tiny", R"(, "bf16": {"enabled": true})"), 2, 1);
  for (const auto& [flags, dtype] :
       {std::pair(std::vector<std::string>{}, "BF16"),
        std::pair(std::vector<std::string>{"--dtype", "fp16"}, "F16"),
        std::pair(std::vector<std::string>{"--dtype", "fp32"}, "F32")}) {
    std::vector<std::string> arguments = {"export", Step("a", 2),
                                          dir_.File("out")};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    ASSERT_TRUE(RunCommand(arguments).status.ok());
    EXPECT_THAT(ReadFile(dir_.File("out/model.safetensors")).value(),
                HasSubstr(absl::StrCat("\"dtype\":\"", dtype, "\"")));
  }
}

TEST_F(CheckpointCommandTest, ExportInShardsHasTheSameTensors) {
  Save(dir_.File("a/checkpoints"), ConfigOf("llama-tiny", ""), 2, 1);
  ASSERT_TRUE(
      RunCommand({"export", Step("a", 2), dir_.File("one")}).status.ok());
  const Output output = RunCommand(
      {"export", Step("a", 2), dir_.File("many"), "--max-shard-size", "50KB"});
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_THAT(output.text, HasSubstr(" shards"));
  EXPECT_FALSE(PathExists(dir_.File("many/model.safetensors")));
  const auto one = SafetensorsReader::Open(dir_.File("one"));
  const auto many = SafetensorsReader::Open(dir_.File("many"));
  ASSERT_TRUE(one.ok() && many.ok()) << many.status();
  ASSERT_EQ((*one)->tensors().size(), (*many)->tensors().size());
  for (const StoredTensor& tensor : (*one)->tensors()) {
    const StoredTensor* const other = (*many)->Find(tensor.name);
    ASSERT_NE(other, nullptr) << tensor.name;
    ASSERT_EQ(tensor.num_bytes, other->num_bytes);
    EXPECT_EQ(std::memcmp(tensor.data, other->data, tensor.num_bytes), 0);
  }
  EXPECT_EQ(dir_.Read("many/generation_config.json"),
            "{\n  \"_from_model_config\": true,\n  \"bos_token_id\": 256,\n"
            "  \"eos_token_id\": 256\n}\n");
}

// A damaged checkpoint leaves the previous folder.
TEST_F(CheckpointCommandTest, ExportOfDamageWritesNothing) {
  const LoadedConfig config = ConfigOf("gpt2-tiny", "");
  Save(dir_.File("a/checkpoints"), config, 2, 1);
  dir_.Write("out/mine", "x");
  dir_.Write("out/model.safetensors", "x");
  const std::string path = Step("a", 2) + "/states-00000.safetensors";
  std::string contents = ReadFile(path).value();
  for (size_t i = 20000; i < contents.size(); i += 10000) contents[i] ^= 1;
  ASSERT_TRUE(WriteFileAtomically(path, contents).ok());
  const Output output = RunCommand({"export", Step("a", 2), dir_.File("out")});
  EXPECT_EQ(output.status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(ListFolder(dir_.File("out")).value(),
              ElementsAre("mine", "model.safetensors"));
  EXPECT_EQ(dir_.Count(), 2);
}

}  // namespace
}  // namespace zero

// The program's own is in the same archive as its commands.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
