#include "engine/checkpoint/portable.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/file.h"
#include "engine/checkpoint/safetensors.h"
#include "gtest/gtest.h"
#include "models/hf_config.h"
#include "models/registry.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using Floats = std::vector<float>;
using ByName = std::map<std::string, Floats>;

ByName RandomParameters(const Model& model) {
  ByName all;
  for (const Parameter* parameter : model.AllParameters()) {
    Parameter random;
    random.name = parameter->name;
    random.init = {.std = 1.0f};
    Floats& values = all[parameter->name];
    values.resize(parameter->shape.num_elems());
    InitialValues(random, 7, 0, values.size(), values.data());
  }
  return all;
}

// The size of a writer's pieces.
constexpr int64_t kPieceElems = 1000;

absl::StatusOr<std::vector<std::string>> Save(
    const std::string& dir, const ModelConfig& config, const ByName& values,
    DType dtype = DType::kF32, const std::function<void()>& before_each = [] {},
    int64_t max_shard_bytes = kMaxShardBytes) {
  const auto model = MakeModel(config);
  auto writer = PortableWriter::Create(dir, *model, dtype, max_shard_bytes);
  if (!writer.ok()) return writer.status();
  for (const Parameter* parameter : model->AllParameters()) {
    absl::Span<const float> all = values.at(parameter->name);
    for (size_t at = 0; at < all.size(); at += kPieceElems) {
      before_each();
      (*writer)->Write(*parameter, at, all.subspan(at, kPieceElems));
    }
  }
  return (*writer)->Commit(
      {{"config.json", WriteHfConfig(config, dtype, -1, -1)}});
}

absl::StatusOr<ByName> Load(const std::string& dir, const ModelConfig& config) {
  const auto model = MakeModel(config);
  const auto read = OpenPortable(dir, *model);
  if (!read.ok()) return read.status();
  ByName all;
  for (const Parameter* parameter : model->AllParameters()) {
    const int64_t size = parameter->shape.num_elems();
    Floats& values = all[parameter->name];
    values.assign(size, -99.0f);
    for (int64_t at = 0; at < size; at += kPieceElems) {
      (*read)(*parameter, at, std::min(size - at, kPieceElems),
              values.data() + at);
    }
  }
  return all;
}

std::vector<ModelConfig> AllFamilies() {
  std::vector<ModelConfig> configs;
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama,
                             ModelFamily::kQwen2, ModelFamily::kQwen3}) {
    for (bool tied : {false, true}) {
      configs.push_back(TinyConfig(family));
      configs.back().tie_word_embeddings = tied;
    }
  }
  return configs;
}

std::string Name(const ModelConfig& config) {
  return std::string(ModelFamilyName(config.family)) +
         (config.tie_word_embeddings ? " tied" : "");
}

TEST(PortableTest, WhatIsSavedIsLoadedToTheBit) {
  for (const ModelConfig& config : AllFamilies()) {
    SCOPED_TRACE(Name(config));
    TempDir dir;
    const ByName values = RandomParameters(*MakeModel(config));
    ASSERT_TRUE(Save(dir.File("final"), config, values).ok());
    const auto loaded = Load(dir.File("final"), config);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(*loaded, values);

    const auto read = ReadHfConfig(dir.File("final"));
    ASSERT_TRUE(read.ok()) << read.status();
    ModelConfig want = config;
    want.from_pretrained = dir.File("final");
    EXPECT_EQ(*read, want);
  }
}

// Matrices of more than one piece, whose rows do not fill one: as they are and
// turned, whole and as a slice of rows.
TEST(PortableTest, LargeParametersAreWrittenAndReadInPieces) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    ModelConfig config = TinyConfig(family);
    config.vocab_size = kPieceElems / 32 + 77;
    config.intermediate_size = kPieceElems / 32 + 5;
    const auto model = MakeModel(config);
    const ByName values = RandomParameters(*model);
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      TempDir dir;
      ASSERT_TRUE(Save(dir.File("a"), config, values, dtype).ok());
      const auto loaded = Load(dir.File("a"), config);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ByName want = values;
      for (auto& [name, floats] : want) {
        if (dtype == DType::kF32) continue;
        for (float& value : floats) value = BF16ToF32(F32ToBF16(value));
      }
      EXPECT_TRUE(*loaded == want);
    }
  }
}

TEST(PortableTest, HalfPrecisionRoundsOnceAndThenIsExact) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const ModelConfig config = TinyConfig(ModelFamily::kQwen3);
    TempDir dir;
    const ByName values = RandomParameters(*MakeModel(config));
    ASSERT_TRUE(Save(dir.File("a"), config, values, dtype).ok());
    const auto once = Load(dir.File("a"), config);
    ASSERT_TRUE(once.ok()) << once.status();
    for (const auto& [name, loaded] : *once) {
      const Floats& from = values.at(name);
      for (size_t i = 0; i < loaded.size(); ++i) {
        ASSERT_EQ(loaded[i], dtype == DType::kBF16
                                 ? BF16ToF32(F32ToBF16(from[i]))
                                 : F16ToF32(F32ToF16(from[i])));
      }
    }
    ASSERT_TRUE(Save(dir.File("b"), config, *once, dtype).ok());
    EXPECT_EQ(*Load(dir.File("b"), config), *once);
    EXPECT_EQ(dir.Read("a/model.safetensors"), dir.Read("b/model.safetensors"));
  }
}

TEST(PortableTest, EveryElementIsInTheFileOnce) {
  for (const ModelConfig& config : AllFamilies()) {
    SCOPED_TRACE(Name(config));
    const auto model = MakeModel(config);
    int64_t total = 0;
    std::map<std::string, int> names;
    for (const PortableTensor& tensor : model->PortableTensors()) {
      total += tensor.shape.num_elems();
      EXPECT_EQ(++names[tensor.name], 1) << tensor.name;
    }
    EXPECT_EQ(total, model->NumParameters());
  }
}

TEST(PortableTest, PackedProjectionsAreCutAndConv1dIsTurned) {
  TempDir dir;
  ModelConfig config = TinyConfig(ModelFamily::kLlama);
  ByName values = RandomParameters(*MakeModel(config));
  ASSERT_TRUE(Save(dir.File("llama"), config, values).ok());
  auto llama = SafetensorsReader::Open(dir.File("llama"));
  ASSERT_TRUE(llama.ok());
  const StoredTensor* k =
      (*llama)->Find("model.layers.1.self_attn.k_proj.weight");
  ASSERT_NE(k, nullptr);
  EXPECT_EQ(k->shape, (std::vector<int64_t>{16, 32}));
  float first;
  ReadAsF32(*k, 0, 1, &first);
  EXPECT_EQ(first, values["block.1.attn.qkv.weight"][32 * 32]);  // after q

  config = TinyConfig(ModelFamily::kGpt2);
  values = RandomParameters(*MakeModel(config));
  ASSERT_TRUE(Save(dir.File("gpt2"), config, values).ok());
  auto gpt2 = SafetensorsReader::Open(dir.File("gpt2"));
  ASSERT_TRUE(gpt2.ok());
  const StoredTensor* fc = (*gpt2)->Find("transformer.h.0.mlp.c_fc.weight");
  ASSERT_NE(fc, nullptr);
  EXPECT_EQ(fc->shape, (std::vector<int64_t>{32, 40}));  // [in, out]
  ReadAsF32(*fc, 1, 1, &first);
  EXPECT_EQ(first, values["block.0.mlp.fc.weight"][32]);  // row 1, column 0
}

TEST(PortableTest, MissingUnexpectedAndMisshapenTensorsAreListed) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kQwen2}) {
    const ModelConfig config = TinyConfig(family);
    const std::string layer =
        family == ModelFamily::kGpt2 ? "transformer.h." : "model.layers.";
    TempDir dir;
    const std::string folder = dir.File("m");
    ASSERT_TRUE(
        Save(folder, config, RandomParameters(*MakeModel(config))).ok());
    auto error = [&](const ModelConfig& other) {
      const auto loaded = Load(folder, other);
      EXPECT_FALSE(loaded.ok());
      EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
      return std::string(loaded.status().message());
    };
    ModelConfig deeper = config;
    deeper.num_hidden_layers = 3;
    std::string message = error(deeper);
    EXPECT_NE(message.find(folder), std::string::npos) << message;
    EXPECT_NE(message.find("missing " + layer + "2."), std::string::npos);
    EXPECT_NE(message.find(" more"), std::string::npos) << message;
    EXPECT_EQ(message.find("unexpected"), std::string::npos);

    ModelConfig shallower = config;
    shallower.num_hidden_layers = 1;
    message = error(shallower);
    EXPECT_NE(message.find("unexpected " + layer + "1."), std::string::npos);
    EXPECT_EQ(message.find("missing"), std::string::npos);

    ModelConfig wider = config;
    wider.vocab_size = 77;
    message = error(wider);
    EXPECT_NE(message.find("is fp32[61, 32], want a float [77, 32]"),
              std::string::npos)
        << message;

    ModelConfig untied = config;
    untied.tie_word_embeddings = false;
    EXPECT_NE(error(untied).find("missing lm_head.weight"), std::string::npos);
  }
}

TEST(PortableTest, WhatOtherWritersAddIsUnderstood) {
  // Old GPT-2 files lack "transformer.", and carry causal masks; a tied head
  // may be stored anyway.
  const ModelConfig config = TinyConfig(ModelFamily::kGpt2);
  const auto model = MakeModel(config);
  const ByName values = RandomParameters(*model);
  TempDir dir;
  ASSERT_TRUE(Save(dir.File("new"), config, values).ok());
  auto reader = SafetensorsReader::Open(dir.File("new"));
  ASSERT_TRUE(reader.ok());
  std::vector<TensorSpec> specs;
  const std::string prefix = "transformer.";
  for (const StoredTensor& tensor : (*reader)->tensors()) {
    specs.push_back(
        {tensor.name.substr(prefix.size()), tensor.dtype, tensor.shape});
  }
  specs.push_back({"h.0.attn.bias", DType::kU8, {1, 1, 27, 27}});
  specs.push_back({"h.1.attn.masked_bias", DType::kF32, {}});
  specs.push_back({"lm_head.weight", DType::kF32, {61, 32}});
  std::filesystem::create_directories(dir.File("old"));
  auto writer =
      SafetensorsWriter::Create(dir.File("old/model.safetensors"), specs);
  ASSERT_TRUE(writer.ok()) << writer.status();
  for (size_t i = 0; i < specs.size(); ++i) {
    size_t bytes = DTypeBytes(specs[i].dtype);
    for (int64_t dim : specs[i].shape) bytes *= dim;
    std::string data(bytes, '\0');
    if (const auto* stored = (*reader)->Find(prefix + specs[i].name)) {
      std::memcpy(data.data(), stored->data, stored->num_bytes);
    }
    ASSERT_TRUE((*writer)->Write(i, 0, data.data(), bytes).ok());
  }
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto loaded = Load(dir.File("old"), config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(*loaded, values);
}

TEST(PortableTest, AFolderIsReplacedAsOneAndKeepsWhatIsNotOurs) {
  const ModelConfig config = TinyConfig(ModelFamily::kLlama);
  TempDir dir;
  dir.Write("final/config.json", "an earlier one");
  dir.Write("final/tokenizer.json", "a user's");
  dir.Write("final/extra/notes.txt", "too");
  dir.Write("final/model.safetensors.zero-tmp.2147483647.0", "half");
  const ByName values = RandomParameters(*MakeModel(config));
  ASSERT_TRUE(Save(dir.File("final"), config, values).ok());
  EXPECT_EQ(*Load(dir.File("final"), config), values);
  EXPECT_EQ(dir.Read("final/tokenizer.json"), "a user's");
  EXPECT_EQ(dir.Read("final/extra/notes.txt"), "too");
  EXPECT_FALSE(
      PathExists(dir.File("final/model.safetensors.zero-tmp.2147483647.0")));
  EXPECT_EQ(dir.Count(), 1);
}

// What cannot be copied is a note, and neither the new weights nor the old
// folder are lost for it.
TEST(PortableTest, WhatCanNotBeCarriedOverIsANoteAndStays) {
  const ModelConfig config = TinyConfig(ModelFamily::kLlama);
  const ByName values = RandomParameters(*MakeModel(config));
  TempDir dir;
  const std::string final_dir = dir.File("final");
  dir.Write("final/extra/notes.txt", "a user's");
  ASSERT_EQ(::mkfifo(dir.File("final/extra/pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("nowhere", dir.File("final/link"));
  auto notes = Save(final_dir, config, values);
  ASSERT_TRUE(notes.ok()) << notes.status();
  EXPECT_TRUE(notes->empty()) << (*notes)[0];
  EXPECT_TRUE(std::filesystem::is_fifo(dir.File("final/extra/pipe")));
  EXPECT_TRUE(std::filesystem::is_symlink(dir.File("final/link")));
  EXPECT_EQ(dir.Count(), 1);
  // Across file systems there are no hard links, and a pipe cannot be copied.
  const std::string root =
      dir.path().starts_with("/dev/shm/") ? "/tmp" : "/dev/shm";
  struct stat here, there;
  if (::stat(root.c_str(), &there) != 0 || ::access(root.c_str(), W_OK) != 0 ||
      ::stat(dir.path().c_str(), &here) != 0 || here.st_dev == there.st_dev) {
    GTEST_SKIP() << root << " is no other file system here";
  }
  std::string other = root + "/zero_test_XXXXXX";
  ASSERT_NE(::mkdtemp(other.data()), nullptr);
  ASSERT_EQ(::mkfifo((other + "/pipe").c_str(), 0600), 0);
  std::filesystem::remove_all(final_dir);
  std::filesystem::create_symlink(other, final_dir);
  notes = Save(final_dir, config, values);
  EXPECT_TRUE(std::filesystem::is_fifo(dir.File("final.previous/pipe")));
  std::filesystem::remove_all(other);
  ASSERT_TRUE(notes.ok()) << notes.status();
  ASSERT_EQ(notes->size(), 1u);
  EXPECT_NE((*notes)[0].find("pipe"), std::string::npos) << (*notes)[0];
  EXPECT_NE((*notes)[0].find("remains as " + dir.File("final.previous")),
            std::string::npos);
  EXPECT_EQ(*Load(final_dir, config), values);
}

// A save that is killed at any parameter leaves the earlier folder as it was.
TEST(PortableTest, AKilledSaveLeavesTheEarlierFolder) {
  const ModelConfig config = TinyConfig(ModelFamily::kLlama);
  TempDir dir;
  const ByName values = RandomParameters(*MakeModel(config));
  ASSERT_TRUE(Save(dir.File("final"), config, values).ok());
  const auto model = MakeModel(config);
  const int num_tensors = static_cast<int>(model->PortableTensors().size());
  for (const int survived : {0, num_tensors / 2, num_tensors - 1}) {
    const pid_t child = ::fork();
    if (child == 0) {
      int left = survived;
      Save(dir.File("final"), config, values, DType::kF32, [&] {
        if (left-- == 0) ::raise(SIGKILL);
      }).IgnoreError();
      ::_exit(0);
    }
    int result = 0;
    ::waitpid(child, &result, 0);
    ASSERT_TRUE(WIFSIGNALED(result));
    EXPECT_EQ(dir.Count(), 2);
    EXPECT_EQ(*Load(dir.File("final"), config), values);
    ASSERT_TRUE(RemoveStaleFiles(dir.path(), {"final"}).ok());
    EXPECT_EQ(dir.Count(), 1);
    EXPECT_EQ(*Load(dir.File("final"), config), values);
  }
}

// ---- Shards -----------------------------------------------------------------

TEST(PortableTest, ShardsAreNoLargerThanAskedAndLoadToTheBit) {
  for (const ModelConfig& config : AllFamilies()) {
    SCOPED_TRACE(Name(config));
    TempDir dir;
    const ByName values = RandomParameters(*MakeModel(config));
    constexpr int64_t kMost = 20'000;
    ASSERT_TRUE(Save(
                    dir.File("m"), config, values, DType::kF32, [] {}, kMost)
                    .ok());
    EXPECT_FALSE(PathExists(dir.File("m/model.safetensors")));
    const auto index =
        nlohmann::json::parse(dir.Read("m/model.safetensors.index.json"));
    std::map<std::string, int64_t> bytes;
    int64_t total = 0;
    for (const auto& [name, file] : index["weight_map"].items()) {
      bytes[file] += 0;
    }
    const auto model = MakeModel(config);
    for (const PortableTensor& tensor : model->PortableTensors()) {
      const std::string file = index["weight_map"][tensor.name];
      bytes[file] += tensor.shape.num_elems() * 4;
      total += tensor.shape.num_elems() * 4;
    }
    EXPECT_EQ(index["metadata"]["total_size"], total);
    EXPECT_GE(bytes.size(), 2u);
    const std::string end =
        absl::StrFormat("-of-%05d.safetensors", bytes.size());
    for (const auto& [file, size] : bytes) {
      EXPECT_GT(size, 0) << file;
      EXPECT_LE(size, kMost) << file;
      EXPECT_NE(file.find(end), std::string::npos) << file;
    }
    EXPECT_EQ(*Load(dir.File("m"), config), values);
    EXPECT_EQ(dir.Count(), 1);
  }
}

TEST(PortableTest, ATensorLargerThanAShardHasOneForItself) {
  const ModelConfig config = TinyConfig(ModelFamily::kQwen2);
  TempDir dir;
  const auto model = MakeModel(config);
  ASSERT_TRUE(Save(
                  dir.File("m"), config, RandomParameters(*model), DType::kBF16,
                  [] {}, 1)
                  .ok());
  const auto names = ListFolder(dir.File("m"));
  EXPECT_EQ(names->size(), model->PortableTensors().size() + 2);
}

TEST(PortableTest, ShardsAndOneFileTakeEachOthersPlace) {
  const ModelConfig config = TinyConfig(ModelFamily::kLlama);
  TempDir dir;
  ByName values = RandomParameters(*MakeModel(config));
  const std::string folder = dir.File("m");
  for (const int64_t most : {int64_t{20'000}, kMaxShardBytes, int64_t{9'000}}) {
    values.begin()->second[0] += 1;
    ASSERT_TRUE(Save(
                    folder, config, values, DType::kF32, [] {}, most)
                    .ok());
    EXPECT_EQ(*Load(folder, config), values);
    EXPECT_EQ(PathExists(folder + "/model.safetensors"),
              most == kMaxShardBytes);
  }
}

TEST(PortableTest, ThreadsWriteGroupsAtTheSameTime) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    const ModelConfig config = TinyConfig(family);
    TempDir dir;
    const auto model = MakeModel(config);
    const ByName values = RandomParameters(*model);
    auto writer =
        PortableWriter::Create(dir.File("m"), *model, DType::kF32, 5'000);
    ASSERT_TRUE(writer.ok());
    std::vector<std::thread> threads;
    size_t num_parameters = 0;
    for (const auto& group : (*writer)->groups()) {
      num_parameters += group.size();
      threads.emplace_back([&] {
        for (const Parameter* parameter : group) {
          absl::Span<const float> all = values.at(parameter->name);
          for (size_t at = 0; at < all.size(); at += 100) {
            (*writer)->Write(*parameter, at, all.subspan(at, 100));
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(threads.size(), 4u);
    EXPECT_EQ(num_parameters, model->AllParameters().size());
    ASSERT_TRUE((*writer)
                    ->Commit({{"config.json",
                               WriteHfConfig(config, DType::kF32, -1, -1)}})
                    .ok());
    EXPECT_EQ(*Load(dir.File("m"), config), values);
  }
}

TEST(PortableTest, AMissingFolderIsNotFound) {
  const auto loaded =
      Load("/nonexistent/model", TinyConfig(ModelFamily::kLlama));
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace zero
