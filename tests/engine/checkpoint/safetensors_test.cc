#include "engine/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file of this header and data.
std::string File(const std::string& header, const std::string& data = "") {
  const uint64_t n = header.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

std::string Entry(const std::string& name, const std::string& dtype,
                  const std::string& shape, int begin, int end) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype,
                      "\",\"shape\":", shape, ",\"data_offsets\":[", begin, ",",
                      end, "]}");
}

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string ErrorOf(const std::string& contents) {
    dir_.Write("x.safetensors", contents);
    const absl::Status status =
        SafetensorsReader::Open(dir_.File("x.safetensors")).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.safetensors"));
    return std::string(status.message());
  }

  // Writes a file in which every byte of a tensor is its index in `specs`.
  absl::Status Write(const std::string& name,
                     const std::vector<TensorSpec>& specs) {
    auto writer = SafetensorsWriter::Create(dir_.File(name), specs);
    if (!writer.ok()) return writer.status();
    for (size_t i = 0; i < specs.size(); ++i) {
      size_t bytes = DTypeBytes(specs[i].dtype);
      for (const int64_t dim : specs[i].shape) {
        bytes *= static_cast<size_t>(dim);
      }
      const std::string data(bytes, static_cast<char>(i));
      const absl::Status status =
          (*writer)->Write(i, 0, data.data(), data.size());
      if (!status.ok()) return status;
    }
    return (*writer)->Commit();
  }

  TempDir dir_;
};

TEST_F(SafetensorsTest, WhatIsWrittenIsRead) {
  const std::vector<float> values = {1.5f, -2.0f, 3.25f, 0.0f, 5.0f, 6.0f};
  const std::vector<TensorSpec> specs = {{"b", DType::kF32, {2, 3}}};
  auto writer = SafetensorsWriter::Create(dir_.File("m.safetensors"), specs);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Write(0, 8, values.data() + 2, 16).ok());
  ASSERT_TRUE((*writer)->Write(0, 0, values.data(), 8).ok());
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto reader = SafetensorsReader::Open(dir_.path() + "/m.safetensors");
  ASSERT_TRUE(reader.ok()) << reader.status();
  const StoredTensor* tensor = (*reader)->Find("b");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->dtype, DType::kF32);
  EXPECT_THAT(tensor->shape, ElementsAre(2, 3));
  EXPECT_EQ(tensor->ShapeString(), "[2, 3]");
  EXPECT_EQ(tensor->num_elements, 6);
  std::vector<float> read(4);
  ReadAsF32(*tensor, 1, 4, read.data());
  EXPECT_THAT(read, ElementsAre(-2.0f, 3.25f, 0.0f, 5.0f));
  EXPECT_EQ((*reader)->Find("a"), nullptr);
  EXPECT_EQ((*reader)->Find("c"), nullptr);
  EXPECT_THAT(dir_.Read("m.safetensors"),
              HasSubstr(R"({"__metadata__":{"format":"pt"},)"));
}

TEST_F(SafetensorsTest, EveryDTypeAndShapeRoundTripsAligned) {
  const std::vector<TensorSpec> specs = {
      {"u8", DType::kU8, {3}},
      {"f32", DType::kF32, {5}},
      {"scalar", DType::kF32, {}},
      {"f64", DType::kF64, {1, 1}},
      {"empty", DType::kF16, {0, 7}},
      {"bf16", DType::kBF16, {3}},
      {"f16", DType::kF16, {1}},
      {"i32", DType::kI32, {2}},
      {"i64", DType::kI64, {2}},
      {"u16", DType::kU16, {2, 2}},
      {"quote\"\\ \xC3\xA9", DType::kU8, {1}}};
  ASSERT_TRUE(Write("m.safetensors", specs).ok());
  const auto reader =
      SafetensorsReader::Open(dir_.File("m.safetensors")).value();
  ASSERT_EQ(reader->tensors().size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const StoredTensor* tensor = reader->Find(specs[i].name);
    ASSERT_NE(tensor, nullptr) << specs[i].name;
    EXPECT_EQ(tensor->dtype, specs[i].dtype);
    EXPECT_EQ(tensor->shape, specs[i].shape);
    EXPECT_EQ(
        reinterpret_cast<uintptr_t>(tensor->data) % DTypeBytes(tensor->dtype),
        0u);
    for (int64_t b = 0; b < tensor->num_bytes; ++b) {
      ASSERT_EQ(tensor->data[b], i);
    }
  }
}

TEST_F(SafetensorsTest, HalfTypesConvertToFp32) {
  const uint16_t bf16[] = {0x3FC0, 0xC000};  // 1.5, -2
  const uint16_t f16[] = {0x3E00, 0xC000};
  const double f64[] = {1.5, -2.0};
  const std::vector<TensorSpec> specs = {{"bf16", DType::kBF16, {2}},
                                         {"f16", DType::kF16, {2}},
                                         {"f64", DType::kF64, {2}}};
  auto writer = SafetensorsWriter::Create(dir_.File("m.safetensors"), specs);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Write(0, 0, bf16, 4).ok());
  ASSERT_TRUE((*writer)->Write(1, 0, f16, 4).ok());
  ASSERT_TRUE((*writer)->Write(2, 0, f64, 16).ok());
  ASSERT_TRUE((*writer)->Commit().ok());
  const auto reader =
      SafetensorsReader::Open(dir_.File("m.safetensors")).value();
  for (const StoredTensor& tensor : reader->tensors()) {
    std::vector<float> values(2);
    ReadAsF32(tensor, 0, 2, values.data());
    EXPECT_THAT(values, ElementsAre(1.5f, -2.0f)) << tensor.name;
  }
}

TEST_F(SafetensorsTest, AFolderIsReadByItsUsualNames) {
  const std::vector<TensorSpec> specs = {{"w", DType::kF32, {2}}};
  EXPECT_THAT(
      std::string(SafetensorsReader::Open(dir_.path()).status().message()),
      HasSubstr("has neither model.safetensors nor"));
  ASSERT_TRUE(Write("model.safetensors", specs).ok());
  EXPECT_EQ(SafetensorsReader::Open(dir_.path()).value()->tensors().size(), 1u);
}

class ShardedTest : public SafetensorsTest {
 protected:
  void SetUp() override {
    const std::vector<TensorSpec> a = {{"w1", DType::kF32, {2}}};
    const std::vector<TensorSpec> b = {{"a2", DType::kF32, {2}},
                                       {"w2", DType::kF32, {2}}};
    ASSERT_TRUE(Write("m-1.safetensors", a).ok());
    ASSERT_TRUE(Write("m-2.safetensors", b).ok());
  }
  absl::Status OpenIndex(const std::string& weight_map) {
    dir_.Write("model.safetensors.index.json",
               "{\"metadata\":{},\"weight_map\":" + weight_map + "}");
    auto reader = SafetensorsReader::Open(dir_.path());
    if (reader.ok()) reader_ = std::move(*reader);
    return reader.status();
  }
  void ExpectError(const std::string& weight_map, const std::string& words) {
    EXPECT_THAT(std::string(OpenIndex(weight_map).message()), HasSubstr(words));
  }
  std::unique_ptr<SafetensorsReader> reader_;
};

TEST_F(ShardedTest, ShardsAreOneModelSortedByName) {
  ASSERT_TRUE(OpenIndex(R"({"w1":"m-1.safetensors","w2":"m-2.safetensors",
                            "a2":"m-2.safetensors"})")
                  .ok());
  std::vector<std::string> names;
  for (const StoredTensor& tensor : reader_->tensors()) {
    names.push_back(tensor.name);
  }
  EXPECT_THAT(names, ElementsAre("a2", "w1", "w2"));
  EXPECT_EQ(reader_->Find("w2")->data[0], 1);
}

TEST_F(ShardedTest, AnIndexThatDoesNotFitItsShardsIsAnError) {
  ExpectError(R"({"w1":"m-9.safetensors"})", "m-9.safetensors': no such file");
  ExpectError(R"({"w1":"m-1.safetensors","w9":"m-1.safetensors"})",
              "tensor 'w9': it is not in");
  ExpectError(R"({"w2":"m-2.safetensors"})", "tensor 'a2'");
  ExpectError(R"({"w1":"m-2.safetensors","w2":"m-2.safetensors",
                  "a2":"m-2.safetensors"})",
              "tensor 'w1': it is not in");
  ExpectError(R"({"w1":"../m-1.safetensors"})", "not the name of a file");
  ExpectError(R"({"w1":3})", "is not a string");
  ExpectError("[]", "no object 'weight_map'");
  ExpectError(R"({"w1":"m-1.safetensors","w1":"m-1.safetensors"})",
              "'w1' appears twice");
}

TEST_F(SafetensorsTest, AFileThatIsTooShortIsAnError) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("0 bytes are too few"));
  EXPECT_THAT(ErrorOf("1234567"), HasSubstr("7 bytes are too few"));
  EXPECT_THAT(ErrorOf(File("{}").substr(0, 9)),
              HasSubstr("the header has 2 bytes, but 1 follow"));
  EXPECT_THAT(ErrorOf(std::string(8, '\xff')), HasSubstr("truncated, or not"));
}

TEST_F(SafetensorsTest, AHeaderThatIsNotTheRightJsonIsAnError) {
  EXPECT_THAT(ErrorOf(File("{\"a\":")), HasSubstr("not valid JSON"));
  EXPECT_THAT(ErrorOf(File("{\"\xff\":1}")), HasSubstr("not valid JSON"));
  EXPECT_THAT(ErrorOf(File("[]")), HasSubstr("not a JSON object"));
  EXPECT_THAT(ErrorOf(File("{\"a\":1}")),
              HasSubstr("tensor 'a': its entry must have dtype"));
  EXPECT_THAT(ErrorOf(File("{\"__metadata__\":{\"k\":1}}")),
              HasSubstr("__metadata__.k is not a string"));
}

TEST_F(SafetensorsTest, ADuplicateNameIsAnError) {
  const std::string entry = Entry("a", "U8", "[1]", 0, 1);
  EXPECT_THAT(ErrorOf(File("{" + entry + "," + entry + "}", "x")),
              HasSubstr("'a' appears twice"));
}

TEST_F(SafetensorsTest, AnUnknownDTypeIsAnError) {
  EXPECT_THAT(
      ErrorOf(File("{" + Entry("a", "F8_E4M3", "[1]", 0, 1) + "}", "x")),
      HasSubstr("tensor 'a': dtype F8_E4M3 is not one of F32, BF16"));
}

TEST_F(SafetensorsTest, WrongShapesAndOffsetsAreErrors) {
  const auto error = [&](const std::string& shape, int begin, int end) {
    return ErrorOf(
        File("{" + Entry("a", "F32", shape, begin, end) + "}", "12345678"));
  };
  EXPECT_THAT(error("[2]", 0, 4), HasSubstr("span 4 bytes, but F32 [2] has 8"));
  EXPECT_THAT(error("[2]", 4, 0), HasSubstr("not a pair begin <= end"));
  EXPECT_THAT(error("[2]", -8, 0), HasSubstr("not a pair begin <= end"));
  EXPECT_THAT(error("[-2]", 0, 8), HasSubstr("not an integer >= 0"));
  EXPECT_THAT(error("[1.5]", 0, 8), HasSubstr("not an integer >= 0"));
  EXPECT_THAT(error("2", 0, 8), HasSubstr("shape is not a list"));
  EXPECT_THAT(error("[4]", 0, 16), HasSubstr("truncated"));
  EXPECT_THAT(error("[4294967296, 4294967296, 4]", 0, 8),
              HasSubstr("more elements than fit"));
  EXPECT_THAT(error("[1]", 4, 8), HasSubstr("leaves a gap to"));
  EXPECT_THAT(error("[1]", 0, 4), HasSubstr("belong to no tensor"));
}

TEST_F(SafetensorsTest, OverlappingTensorsAreAnError) {
  EXPECT_THAT(ErrorOf(File("{" + Entry("a", "F32", "[2]", 0, 8) + "," +
                               Entry("b", "F32", "[1]", 4, 8) + "}",
                           "12345678")),
              HasSubstr("tensor 'b': its data overlaps that of 'a'"));
}

TEST_F(SafetensorsTest, TooFewOrTooManyBytesAreAnErrorAndNoFileAppears) {
  const std::vector<TensorSpec> specs = {{"w", DType::kF32, {2}}};
  const char data[16] = {};
  for (const auto& [offset, bytes] : std::vector<std::pair<int, int>>{
           {0, 0}, {0, 4}, {4, 8}, {0, 12}, {-4, 8}}) {
    auto writer = SafetensorsWriter::Create(dir_.File("m.safetensors"), specs);
    ASSERT_TRUE(writer.ok()) << writer.status();
    absl::Status status = (*writer)->Write(0, offset, data, bytes);
    if (status.ok()) status = (*writer)->Commit();
    writer->reset();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("tensor 'w'"));
    EXPECT_EQ(dir_.Count(), 0);
  }
}

TEST_F(SafetensorsTest, WrongSpecsAreErrors) {
  const auto error = [&](const std::vector<TensorSpec>& specs) {
    return std::string(Write("m.safetensors", specs).message());
  };
  EXPECT_THAT(error({{"w", DType::kF32, {1}}, {"w", DType::kF32, {1}}}),
              HasSubstr("'w': declared twice"));
  EXPECT_THAT(error({{"__metadata__", DType::kF32, {1}}}),
              HasSubstr("reserved"));
  EXPECT_THAT(error({{"w", DType::kF32, {-1}}}), HasSubstr("[-1] is negative"));
  EXPECT_THAT(std::string(Write("no/m.safetensors", {}).message()),
              HasSubstr("does not exist"));
}

// Changed bytes in length, header and size: a reader whose every tensor can be
// read, or an error; never a crash.
TEST_F(SafetensorsTest, TenThousandMutatedFilesDoNotCrash) {
  const std::vector<TensorSpec> specs = {{"wte.weight", DType::kF32, {4, 3}},
                                         {"h.0.bias", DType::kBF16, {5}},
                                         {"n", DType::kI64, {}}};
  ASSERT_TRUE(Write("m.safetensors", specs).ok());
  const std::string whole = dir_.Read("m.safetensors");
  const std::string often = "{}[]\",:0123456789-eFIBU \\";
  std::mt19937 random(2);
  int num_opened = 0;
  for (int i = 0; i < 10000; ++i) {
    std::string mutated = whole;
    for (size_t c = 1 + random() % 3; c > 0; --c) {
      const size_t at = random() % (random() % 8 == 0 ? 8 : mutated.size());
      mutated[at] = random() % 2 == 0 ? often[random() % often.size()]
                                      : static_cast<char>(random());
    }
    if (random() % 8 == 0) mutated.resize(random() % mutated.size());
    dir_.Write("x.safetensors", mutated);
    const auto reader = SafetensorsReader::Open(dir_.File("x.safetensors"));
    if (!reader.ok()) continue;
    ++num_opened;
    for (const StoredTensor& tensor : (*reader)->tensors()) {
      int64_t sum = 0;
      for (int64_t b = 0; b < tensor.num_bytes; ++b) sum += tensor.data[b];
      EXPECT_GE(sum, 0);
    }
  }
  EXPECT_GT(num_opened, 100);
  EXPECT_LT(num_opened, 9000);
}

}  // namespace
}  // namespace zero
