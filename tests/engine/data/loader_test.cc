#include "engine/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A source whose token i is i % 251.
class LoaderTest : public ::testing::Test {
 protected:
  const TokenSource* Source(int64_t num_tokens) {
    std::string text;
    for (int64_t i = 0; i < num_tokens; ++i) {
      text.push_back(static_cast<char>(i % 251));
    }
    dir_.Write("data.txt", text);
    source_ =
        TokenSource::Open({dir_.File("data.txt")}, TokenFormat::kText).value();
    return source_.get();
  }

  TempDir dir_;
  std::unique_ptr<TokenSource> source_;
};

TEST_F(LoaderTest, TargetsAreTheNextTokens) {
  const Loader loader =
      Loader::Create(Source(1000),
                     {.sequence_length = 16, .micro_batch_size = 3}, 5)
          .value();
  Batch batch;
  loader.Fill(2, 0, 0, &batch);
  EXPECT_EQ(batch.batch_size, 3);
  EXPECT_EQ(batch.sequence_length, 16);
  EXPECT_EQ(batch.num_valid_targets, 48);
  EXPECT_THAT(batch.sample_ids, ElementsAre(6, 7, 8));
  for (size_t i = 0; i < 48; ++i) {
    const int64_t at =
        batch.windows[i / 16] * 16 + static_cast<int64_t>(i % 16);
    EXPECT_EQ(batch.tokens[i], at % 251);
    EXPECT_EQ(batch.targets[i], (at + 1) % 251);
    EXPECT_EQ(batch.positions[i], static_cast<int32_t>(i % 16));
  }
}

TEST_F(LoaderTest, ABatchCanBeReusedWithAnotherShape) {
  const TokenSource* source = Source(1000);
  const Loader wide =
      Loader::Create(source, {.sequence_length = 16, .micro_batch_size = 3}, 5)
          .value();
  const Loader narrow =
      Loader::Create(source, {.sequence_length = 8, .micro_batch_size = 6}, 5)
          .value();
  Batch reused, fresh;
  wide.Fill(0, 0, 0, &reused);
  narrow.Fill(0, 0, 0, &reused);
  narrow.Fill(0, 0, 0, &fresh);
  EXPECT_EQ(reused.positions, fresh.positions);
  EXPECT_EQ(reused.tokens, fresh.tokens);
  EXPECT_EQ(reused.sample_ids, fresh.sample_ids);
}

// Ranks and micro-batches are interchangeable: the data's half, on tokens.
TEST_F(LoaderTest, TheTokensOfAStepAreTheSameForEveryWorldSize) {
  const TokenSource* source = Source(5000);
  const auto step_tokens = [&](int64_t world, int64_t step) {
    const Loader loader = Loader::Create(source,
                                         {.sequence_length = 16,
                                          .micro_batch_size = 12 / world,
                                          .world = world},
                                         5)
                              .value();
    std::vector<int32_t> tokens;
    std::vector<int64_t> ids;
    for (int64_t rank = 0; rank < world; ++rank) {
      Batch batch;
      loader.Fill(step, 0, rank, &batch);
      tokens.insert(tokens.end(), batch.tokens.begin(), batch.tokens.end());
      ids.insert(ids.end(), batch.sample_ids.begin(), batch.sample_ids.end());
    }
    return std::pair(tokens, ids);
  };
  for (const int64_t world : {2, 3, 4}) {
    for (int64_t step = 0; step < 30; ++step) {
      ASSERT_EQ(step_tokens(world, step), step_tokens(1, step));
    }
  }
}

TEST_F(LoaderTest, DataSmallerThanOneBatchIsAnErrorWithTheNumbers) {
  const absl::Status status =
      Loader::Create(Source(100),
                     {.sequence_length = 16, .micro_batch_size = 8}, 5)
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("100 tokens, which make 6 samples"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("to at most 6"));
}

TEST_F(LoaderTest, ValidationCoversEveryTargetOnceInOrder) {
  const TokenSource* source = Source(103);  // 102 targets: 10 windows + 2
  for (const int64_t world : {1, 2, 3, 4}) {
    const EvalLoader loader =
        EvalLoader::Create(
            source,
            {.sequence_length = 10, .micro_batch_size = 2, .world = world}, 0)
            .value();
    EXPECT_EQ(loader.num_targets(), 102);
    std::vector<int32_t> targets;
    int64_t num_valid = 0;
    for (int64_t i = 0; i < loader.num_batches(); ++i) {
      for (int64_t rank = 0; rank < world; ++rank) {
        Batch batch;
        loader.Fill(i, rank, &batch);
        num_valid += batch.num_valid_targets;
        for (const int32_t target : batch.targets) {
          if (target != kIgnoredTarget) targets.push_back(target);
        }
      }
    }
    EXPECT_EQ(num_valid, 102);
    ASSERT_EQ(targets.size(), 102u);
    for (int32_t i = 0; i < 102; ++i) {
      EXPECT_EQ(targets[static_cast<size_t>(i)], (i + 1) % 251);
    }
  }
}

TEST_F(LoaderTest, TheLastValidationWindowIsPaddedWithIgnoredTargets) {
  const EvalLoader loader =
      EvalLoader::Create(Source(13),
                         {.sequence_length = 10, .micro_batch_size = 3}, 0)
          .value();
  Batch batch;
  loader.Fill(0, 0, &batch);
  EXPECT_EQ(batch.num_valid_targets, 12);
  const std::vector<int32_t> last(batch.targets.begin() + 10,
                                  batch.targets.begin() + 20);
  EXPECT_THAT(last, ElementsAre(11, 12, -1, -1, -1, -1, -1, -1, -1, -1));
  const std::vector<int32_t> past_end(batch.targets.begin() + 20,
                                      batch.targets.end());
  EXPECT_THAT(past_end, Each(kIgnoredTarget));
}

TEST_F(LoaderTest, ValidationStopsAtItsLimit) {
  const EvalLoader loader =
      EvalLoader::Create(Source(1000),
                         {.sequence_length = 10, .micro_batch_size = 4}, 6)
          .value();
  EXPECT_EQ(loader.num_batches(), 2);
  EXPECT_EQ(loader.num_targets(), 60);
  EXPECT_EQ(loader.num_windows(), 6);
  EXPECT_EQ(loader.source_windows(), 100);
  Batch batch;
  loader.Fill(1, 0, &batch);
  EXPECT_EQ(batch.num_valid_targets, 20);
  EXPECT_EQ(batch.targets[20], kIgnoredTarget);
}

// ---- Documents ------------------------------------------------------------

// Per row.
std::vector<std::vector<int32_t>> PositionsOf(const Batch& batch) {
  std::vector<std::vector<int32_t>> rows;
  for (int64_t row = 0; row < batch.batch_size; ++row) {
    const auto begin = batch.positions.begin() + row * batch.sequence_length;
    rows.emplace_back(begin, begin + batch.sequence_length);
  }
  return rows;
}

TEST_F(LoaderTest, ADocumentTokenBeginsTheDocumentBehindIt) {
  dir_.Write("a.txt", "abcde");
  dir_.Write("b.txt", "f");
  dir_.Write("c.txt", "ghijklm");
  // abc de|f |ghij klm: windows of 4 and the next token.
  const auto source = TokenSource::Open({dir_.File("?.txt")}).value();
  ASSERT_EQ(source->size(), 15);
  const EvalLoader loader =
      EvalLoader::Create(source.get(),
                         {.sequence_length = 4, .micro_batch_size = 5}, 0,
                         kByteEndOfText)
          .value();
  Batch batch;
  loader.Fill(0, 0, &batch);
  // abcd, e.f., ghij, kl with two tokens of padding, only padding.
  EXPECT_THAT(PositionsOf(batch),
              ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(0, 0, 1, 0),
                          ElementsAre(0, 1, 2, 3), ElementsAre(0, 1, 2, 3),
                          ElementsAre(0, 1, 2, 3)));
  EXPECT_EQ(batch.num_documents, 7);
  EXPECT_THAT(batch.offsets,
              ElementsAre(0, 4, 5, 7, 8, 12, 16, 20, 20, 20, 20, 20, 20, 20, 20,
                          20, 20, 20, 20, 20, 20));
  // No target is lost: "e" ends its text, and the next one begins with "f".
  EXPECT_THAT(std::vector<int32_t>(batch.targets.begin() + 4,
                                   batch.targets.begin() + 8),
              ElementsAre(256, 'f', 256, 'g'));
  EXPECT_EQ(batch.num_valid_targets, 14);
  EXPECT_EQ(loader.num_targets(), 14);
}

TEST_F(LoaderTest, WhatStandsInForTokensBeginsNoDocument) {
  // Token 0 is the document token, and pads the end of the data.
  const EvalLoader loader =
      EvalLoader::Create(Source(6),
                         {.sequence_length = 4, .micro_batch_size = 3}, 0,
                         /*document_token=*/0)
          .value();
  Batch batch;
  loader.Fill(0, 0, &batch);
  EXPECT_EQ(batch.num_documents, 3);
  EXPECT_THAT(PositionsOf(batch), Each(ElementsAre(0, 1, 2, 3)));
}

TEST_F(LoaderTest, DocumentsAreTheSameForEveryWorldSizeAndReusedBatch) {
  const TokenSource* source = Source(5000);
  const auto step = [&](int64_t world, int32_t document_token, Batch* batch) {
    const Loader loader = Loader::Create(source,
                                         {.sequence_length = 100,
                                          .micro_batch_size = 12 / world,
                                          .world = world},
                                         5, document_token)
                              .value();
    std::vector<std::vector<int32_t>> rows;
    int64_t documents = 0;
    for (int64_t rank = 0; rank < world; ++rank) {
      loader.Fill(1, 0, rank, batch);
      documents += batch->num_documents;
      for (auto& row : PositionsOf(*batch)) rows.push_back(std::move(row));
    }
    return std::pair(rows, documents);
  };
  Batch reused, fresh;
  const auto want = step(1, 7, &reused);
  EXPECT_GT(want.second, 12);
  // Every document but a row's first begins with the token.
  for (int64_t d = 0; d < reused.num_documents; ++d) {
    const int32_t begin = reused.offsets[static_cast<size_t>(d)];
    EXPECT_TRUE(begin % 100 == 0 ||
                reused.tokens[static_cast<size_t>(begin)] == 7);
    EXPECT_EQ(reused.positions[static_cast<size_t>(begin)], 0);
  }
  for (const int64_t world : {2, 3, 4}) {
    EXPECT_EQ(step(world, 7, &reused), want);
  }
  // And without documents, the same as a fresh one.
  EXPECT_EQ(step(4, kNoDocumentToken, &reused),
            step(4, kNoDocumentToken, &fresh));
  EXPECT_TRUE(reused.offsets.empty());
  EXPECT_EQ(reused.num_documents, 0);
}

TEST_F(LoaderTest, OneTokenIsTooFewToValidate) {
  EXPECT_THAT(std::string(EvalLoader::Create(
                              Source(1),
                              {.sequence_length = 10, .micro_batch_size = 1}, 0)
                              .status()
                              .message()),
              HasSubstr("needs at least 2"));
}

}  // namespace
}  // namespace zero
