#include "engine/data/samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "engine/data/loader.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kEnd = kByteEndOfText, kNone = kIgnoredTarget;

class SamplesTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<Sample>> Read(const std::string& lines,
                                           int num_threads = 2) {
    path_ = dir_.Write("a.jsonl", lines);
    return ReadSamples({path_}, *tokenizer_, num_threads);
  }
  std::string ErrorOf(const std::string& lines) {
    const auto samples = Read(lines);
    EXPECT_FALSE(samples.ok());
    return std::string(samples.status().message());
  }

  TempDir dir_;
  std::string path_;
  const std::unique_ptr<Tokenizer> tokenizer_ = MakeByteTokenizer();
};

// ---- Lines ------------------------------------------------------------------

TEST_F(SamplesTest, APromptIsNoTargetAndACompletionEndsWithTheEndOfText) {
  const auto samples = Read(R"({"prompt": "ab", "completion": "cd"})");
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 1u);
  EXPECT_THAT((*samples)[0].ids, ElementsAre('a', 'b', 'c', 'd', kEnd));
  EXPECT_EQ((*samples)[0].num_prompt, 2);
}

TEST_F(SamplesTest, TextAndAnEmptyPromptBeginWithTheEndOfText) {
  const auto samples = Read(
      "{\"text\": \"ab\"}\n\n{\"prompt\": \"\", \"completion\": \"c\", \"id\": "
      "7}\r\n");
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 2u);
  for (const Sample& sample : *samples) EXPECT_EQ(sample.num_prompt, 1);
  EXPECT_THAT((*samples)[0].ids, ElementsAre(kEnd, 'a', 'b', kEnd));
  EXPECT_THAT((*samples)[1].ids, ElementsAre(kEnd, 'c', kEnd));
}

TEST_F(SamplesTest, EscapesAndUnicodeAreReadAsJson) {
  const auto samples = Read(R"({"prompt": "\n", "completion": "\u00e9"})");
  ASSERT_TRUE(samples.ok()) << samples.status();
  EXPECT_THAT((*samples)[0].ids, ElementsAre('\n', 0xC3, 0xA9, kEnd));
}

TEST_F(SamplesTest, TheSamplesDoNotDependOnTheNumberOfThreads) {
  std::string lines;
  for (int i = 0; i < 1000; ++i) {
    absl::StrAppend(&lines, R"({"prompt": ")", i, R"(", "completion": ")",
                    i * i, "\"}\n");
  }
  const auto one = Read(lines, 1), many = Read(lines, 7);
  ASSERT_TRUE(one.ok() && many.ok());
  ASSERT_EQ(one->size(), 1000u);
  for (size_t i = 0; i < one->size(); ++i) {
    EXPECT_EQ((*one)[i].ids, (*many)[i].ids);
  }
}

TEST_F(SamplesTest, AWrongLineIsNamedWithWhatWasExpected) {
  const std::string good = "{\"text\": \"a\"}\n";
  const std::string wanted =
      R"(want {"prompt": "...", "completion": "..."} or {"text": "..."})";
  const auto at = [&](int line, const std::string& what) {
    return absl::StrCat(path_, ":", line, ": ", what);
  };
  EXPECT_THAT(ErrorOf(good + "{\"text\": }\n"),
              HasSubstr("not JSON, column 1"));
  EXPECT_THAT(ErrorOf(good + "{\"text\": }\n"),
              HasSubstr(at(2, "not JSON, column 10: ")));
  EXPECT_EQ(ErrorOf(good + good + "[1]\n"),
            at(3, "a JSON array, not an object; " + wanted));
  EXPECT_EQ(ErrorOf(R"({"prompt": "a", "response": "b"})"),
            at(1, R"(it has "prompt", "response"; )" + wanted));
  EXPECT_EQ(ErrorOf(R"({"prompt": "a", "completion": "b", "text": "c"})"),
            at(1, R"(it has "completion", "prompt", "text"; )" + wanted));
  EXPECT_EQ(ErrorOf("{}"), at(1, "it has no keys; " + wanted));
  EXPECT_EQ(ErrorOf(R"({"text": 7})"),
            at(1, "\"text\" is a number, want a string; " + wanted));
  EXPECT_EQ(ErrorOf(R"({"prompt": "a", "completion": ""})"),
            at(1,
               "\"completion\" is empty, so there is nothing to learn; fill it "
               "or delete the line"));
  EXPECT_THAT(ErrorOf(R"({"messages": []})"),
              HasSubstr("no chat templates; apply the model's template first"));
  EXPECT_THAT(ErrorOf("{\"text\": \"\xff\"}"), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf("\n \n"), HasSubstr("it has no lines; want"));
}

TEST_F(SamplesTest, TheFirstOfManyWrongLinesIsNamed) {
  std::string lines;
  for (int i = 1; i <= 2000; ++i) {
    lines += i > 700 ? "{\n" : "{\"text\": \"a\"}\n";
  }
  for (int i = 0; i < 5; ++i) EXPECT_THAT(ErrorOf(lines), HasSubstr(":701: "));
}

// ---- Rows -------------------------------------------------------------------

Sample Of(std::vector<int32_t> ids, int64_t num_prompt) {
  return {std::move(ids), num_prompt};
}

TEST(PackSamplesTest, SamplesShareARowAndCompletionsAloneAreTargets) {
  PackingLoss loss;
  const PackedRows rows =
      PackSamples({Of({1, 2, 3, 4}, 2), Of({5, 6, 7}, 1)}, 6, &loss);
  EXPECT_THAT(rows.tokens, ElementsAre(1, 2, 3, 5, 6, 0));
  EXPECT_THAT(rows.targets, ElementsAre(kNone, 3, 4, 6, 7, kNone));
  EXPECT_THAT(rows.positions, ElementsAre(0, 1, 2, 0, 1, 0));
  EXPECT_EQ(rows.num_samples, 2);
  EXPECT_EQ(rows.num_tokens, 5);
  EXPECT_EQ(rows.num_targets, 4);
  EXPECT_EQ(loss.cut_samples + loss.left_out, 0);
}

TEST(PackSamplesTest, ASampleGoesWhereTheRoomIsLeast) {
  PackingLoss loss;
  const auto of = [](int64_t tokens) {
    return Of(std::vector<int32_t>(tokens + 1, static_cast<int32_t>(tokens)),
              1);
  };
  const PackedRows rows =
      PackSamples({of(5), of(6), of(2), of(3), of(1)}, 8, &loss);
  EXPECT_EQ(rows.num_rows(), 3);
  EXPECT_THAT(rows.tokens, ElementsAre(5, 5, 5, 5, 5, 3, 3, 3,  //
                                       6, 6, 6, 6, 6, 6, 2, 2,  //
                                       1, 0, 0, 0, 0, 0, 0, 0));
}

TEST(PackSamplesTest, WhatIsTooLongIsCutAndCounted) {
  PackingLoss loss;
  const PackedRows rows = PackSamples(
      {Of({1, 2, 3, 4, 5, 6}, 2), Of({1, 2, 3, 4, 5}, 4), Of({7, 8}, 1)}, 3,
      &loss);
  EXPECT_THAT(rows.tokens, ElementsAre(1, 2, 3, 7, 0, 0));
  EXPECT_THAT(rows.targets, ElementsAre(kNone, 3, 4, 8, kNone, kNone));
  EXPECT_EQ(loss.cut_samples, 1);
  EXPECT_EQ(loss.cut_tokens, 2);
  EXPECT_EQ(loss.left_out, 1);
}

// ---- Batches ----------------------------------------------------------------

class PackedLoaderTest : public ::testing::Test {
 protected:
  // Five rows of 4, in row r the tokens 10 r + 1 ...; two samples in each.
  PackedLoaderTest() {
    std::vector<Sample> samples;
    for (int r = 0; r < 5; ++r) {
      samples.push_back(Of({10 * r + 1, 10 * r + 2, 10 * r + 3}, 1));
      samples.push_back(Of({10 * r + 4, 10 * r + 5, 10 * r + 6}, 2));
    }
    PackingLoss loss;
    source_ = TokenSource::FromRows("a.jsonl", PackSamples(samples, 4, &loss));
  }
  std::unique_ptr<TokenSource> source_;
};

TEST_F(PackedLoaderTest, ABatchHasWholeRowsWithTheirTargetsAndDocuments) {
  const Loader loader =
      Loader::Create(source_.get(),
                     {.sequence_length = 4, .micro_batch_size = 2}, 3)
          .value();
  EXPECT_EQ(loader.sampler().num_samples(), 5);
  EXPECT_EQ(loader.sampler().steps_per_epoch(), 2);
  Batch batch;
  loader.Fill(1, 0, 0, &batch);
  EXPECT_EQ(batch.num_valid_targets, 6);
  EXPECT_EQ(batch.num_documents, 4);
  EXPECT_THAT(batch.offsets, ElementsAre(0, 2, 4, 6, 8, 8, 8, 8, 8));
  EXPECT_THAT(batch.positions, ElementsAre(0, 1, 0, 1, 0, 1, 0, 1));
  for (int row = 0; row < 2; ++row) {
    const int32_t first = static_cast<int32_t>(10 * batch.windows[row]);
    const auto tokens = batch.tokens.begin() + 4 * row;
    EXPECT_THAT(std::vector<int32_t>(tokens, tokens + 4),
                ElementsAre(first + 1, first + 2, first + 4, first + 5));
    const auto targets = batch.targets.begin() + 4 * row;
    EXPECT_THAT(std::vector<int32_t>(targets, targets + 4),
                ElementsAre(first + 2, first + 3, kNone, first + 6));
  }
}

TEST_F(PackedLoaderTest, EvaluationCountsEachTargetOnceOverAllRanks) {
  const BatchShape shape{
      .sequence_length = 4, .micro_batch_size = 2, .world = 2};
  const EvalLoader loader =
      EvalLoader::Create(source_.get(), shape, /*max_windows=*/0).value();
  EXPECT_EQ(loader.num_targets(), 15);
  EXPECT_EQ(loader.num_batches(), 2);
  Batch batch;
  int64_t counted = 0;
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t rank = 0; rank < 2; ++rank) {
      loader.Fill(i, rank, &batch);
      counted += batch.num_valid_targets;
      EXPECT_EQ(batch.offsets[static_cast<size_t>(batch.num_documents)], 8);
    }
  }
  EXPECT_EQ(counted, 15);
  EXPECT_EQ(EvalLoader::Create(source_.get(), shape, 4)->num_targets(), 12);
}

}  // namespace
}  // namespace zero
