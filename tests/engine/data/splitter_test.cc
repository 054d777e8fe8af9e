#include "engine/data/splitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zero {
namespace {

using ::testing::ElementsAre;

// Of GPT-2, Llama 3 and Qwen2 (tests/e2e/tokenizer_zoo.py names the sources).
constexpr char kGpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
    "\\s+(?!\\S)|\\s+";
constexpr char kLlama3[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr char kQwen2[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

SplitStage Stage(const std::string& pattern,
                 SplitBehavior behavior = SplitBehavior::kIsolated,
                 bool invert = false) {
  SplitStage stage;
  stage.regex = Regex::FromOniguruma(pattern).value();
  stage.behavior = behavior;
  stage.invert = invert;
  return stage;
}

std::vector<std::string> Words(const std::vector<SplitStage>& stages,
                               const std::string& text,
                               bool continues = false) {
  RegexScratch scratch;
  std::vector<std::string> words;
  EXPECT_TRUE(Splitter(stages).Split(
      text, text.size(), continues, &scratch,
      [&](absl::string_view word) { words.emplace_back(word); }));
  return words;
}

// The results of the package `tokenizers` 0.23.3, here and in the next tests.
TEST(SplitterTest, Gpt2SplitsIntoTheseWords) {
  EXPECT_THAT(Words({Stage(kGpt2)}, "I'm  2024's\n\n  caf\u00e9!\t"),
              ElementsAre("I", "'m", " ", " 2024", "'s", "\n\n ", " caf\u00e9",
                          "!", "\t"));
}

TEST(SplitterTest, Llama3SplitsIntoTheseWords) {
  EXPECT_THAT(
      Words({Stage(kLlama3)}, "I'M  20245's\n\n  caf\u00e9!\n\n\tx = 1;\n"),
      ElementsAre("I", "'M", " ", " ", "202", "45", "'s", "\n\n", " ",
                  " caf\u00e9", "!\n\n", "\tx", " =", " ", "1", ";\n"));
}

TEST(SplitterTest, Qwen2SplitsIntoTheseWords) {
  EXPECT_THAT(Words({Stage(kQwen2)}, "(2024)\r\n\u6a21\u578b\u3002 x"),
              ElementsAre("(", "2", "0", "2", "4", ")\r\n", "\u6a21\u578b",
                          "\u3002", " x"));
}

TEST(SplitterTest, MatchesGoWhereTheBehaviorSays) {
  const std::string text = "a,,b,c";
  const auto words = [&](SplitBehavior behavior, bool invert = false) {
    return Words({Stage(",", behavior, invert)}, text);
  };
  EXPECT_THAT(words(SplitBehavior::kRemoved), ElementsAre("a", "b", "c"));
  EXPECT_THAT(words(SplitBehavior::kIsolated),
              ElementsAre("a", ",", ",", "b", ",", "c"));
  EXPECT_THAT(words(SplitBehavior::kMergedWithPrevious),
              ElementsAre("a,", ",", "b,", "c"));
  EXPECT_THAT(words(SplitBehavior::kMergedWithNext),
              ElementsAre("a", ",", ",b", ",c"));
  EXPECT_THAT(words(SplitBehavior::kContiguous),
              ElementsAre("a", ",,", "b", ",", "c"));
  EXPECT_THAT(words(SplitBehavior::kRemoved, true), ElementsAre(",", ",", ","));
}

TEST(SplitterTest, StagesCutFurtherAndPutSpacesInFront) {
  SplitStage spaced;
  spaced.add_prefix_space = true;
  EXPECT_THAT(Words({Stage("\\p{N}"), spaced}, "a1 b"),
              ElementsAre(" a", " 1", " b"));
  EXPECT_THAT(Words({spaced, Stage(kGpt2)}, "a b"), ElementsAre(" a", " b"));
  EXPECT_THAT(Words({spaced, Stage(kGpt2)}, "a b", /*continues=*/true),
              ElementsAre("a", " b"));
  EXPECT_THAT(Words({}, "a b"), ElementsAre("a b"));
}

TEST(SplitterTest, EmptyMatchesCutAndAreNoWords) {
  EXPECT_THAT(Words({Stage("(?=b)|c*")}, "ab\u00e9bcc"),
              ElementsAre("a", "b", "\u00e9", "b", "cc"));
}

// At every place: whether a word ends there, and if so the words before it.
TEST(SplitterTest, SaysWhetherAWordEndsAtACut) {
  const std::string text = "a  b\n\n c,, d's\n";
  for (const auto behavior :
       {SplitBehavior::kRemoved, SplitBehavior::kIsolated,
        SplitBehavior::kMergedWithPrevious, SplitBehavior::kMergedWithNext,
        SplitBehavior::kContiguous}) {
    for (const char* pattern : {kGpt2, kLlama3, ",", "\\s"}) {
      const Splitter splitter({Stage(pattern, behavior)});
      RegexScratch scratch;
      const std::vector<std::string> all =
          Words({Stage(pattern, behavior)}, text);
      for (size_t size = 1; size < text.size(); ++size) {
        std::vector<std::string> words;
        const auto take = [&](absl::string_view word) {
          words.emplace_back(word);
        };
        if (!splitter.Split(text, size, false, &scratch, take)) continue;
        // The rest alone has the rest of the words.
        splitter.Split(text.substr(size), text.size() - size, true, &scratch,
                       take);
        EXPECT_EQ(words, all) << pattern << " at " << size;
      }
    }
  }
  const Splitter splitter({Stage(kGpt2)});
  RegexScratch scratch;
  const auto ends = [&](size_t size) {
    return splitter.Split(text, size, false, &scratch,
                          [](absl::string_view) {});
  };
  EXPECT_TRUE(ends(1));  // a|
  EXPECT_TRUE(ends(2));  // a | b: the second space is b's
  EXPECT_FALSE(ends(3));
  EXPECT_FALSE(ends(5));  // in "\n\n"
}

}  // namespace
}  // namespace zero
