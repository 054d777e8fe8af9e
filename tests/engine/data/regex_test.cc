#include "engine/data/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> Matches(const Regex& regex, const std::string& text) {
  RegexScratch scratch;
  std::vector<std::string> found;
  Regex::Match match;
  for (size_t from = 0; regex.Find(text, from, &scratch, &match);
       from = match.end) {
    found.push_back(text.substr(match.begin, match.end - match.begin));
    if (match.begin == match.end) break;
  }
  return found;
}

std::vector<std::string> Matches(const std::string& pattern,
                                 const std::string& text) {
  return Matches(Regex::FromOniguruma(pattern).value(), text);
}

std::string ErrorOf(const std::string& pattern) {
  return std::string(Regex::FromOniguruma(pattern).status().message());
}

TEST(RegexTest, FindsTheLeftmostMatchFromAPlaceOn) {
  const Regex regex = Regex::FromOniguruma("b+").value();
  RegexScratch scratch;
  Regex::Match match;
  ASSERT_TRUE(regex.Find("abbabb", 2, &scratch, &match));
  EXPECT_EQ(match.begin, 2u);
  EXPECT_EQ(match.end, 3u);
  ASSERT_TRUE(regex.Find("abbabb", 3, &scratch, &match));
  EXPECT_EQ(match.begin, 4u);
  EXPECT_FALSE(regex.Find("abba", 3, &scratch, &match));
}

TEST(RegexTest, ClassesAreThoseOfUnicode) {
  EXPECT_THAT(Matches("\\p{L}+", "caf\u00e9 \u6a21\u578b a\u0301"),
              ElementsAre("caf\u00e9", "\u6a21\u578b", "a"));
  EXPECT_THAT(Matches("\\p{N}", "1\u0663\u00bd"),
              ElementsAre("1", "\u0663", "\u00bd"));
  EXPECT_THAT(Matches("\\d", "1\u0663\u00bd"), ElementsAre("1", "\u0663"));
  EXPECT_THAT(Matches("(?i:'s)", "'s'S'\u017f"),
              ElementsAre("'s", "'S", "'\u017f"));
  EXPECT_THAT(Matches("[^\\S\\r]", " \r\u00a0"), ElementsAre(" ", "\u00a0"));
  EXPECT_THAT(Matches("\\p{Han}", "\u6a21\u3001"), ElementsAre("\u6a21"));
}

// PCRE2's own \s has U+180E, which has not been white space since Unicode 6.3.
TEST(RegexTest, WhiteSpaceIsThatOfTheStandard) {
  EXPECT_THAT(Matches("\\s", "\u180e"), IsEmpty());
  EXPECT_THAT(Matches("[\\s]", "\u180e"), IsEmpty());
  EXPECT_THAT(Matches("\\S", "\u180e"), ElementsAre("\u180e"));
  EXPECT_THAT(Matches("\\s+", "\t\n\v\f\r \u0085\u2003\u2028\u3000").size(), 1);
}

TEST(RegexTest, WhatTheLibrariesReadDifferentlyIsRefused) {
  for (const std::string part : {"\\w", "\\b", "\\h", "^", "$", "(?<=", "(?<!",
                                 "(?i)", "(?m:", "[[", "\\x4", "\\p{^L}"}) {
    const auto status = Regex::FromOniguruma("a" + part + "b").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << part;
  }
  EXPECT_THAT(ErrorOf("a\\wb"), HasSubstr("'\\w' in it is not supported"));
  EXPECT_THAT(ErrorOf("[a&&b]"), HasSubstr("'&&'"));
  EXPECT_THAT(ErrorOf("[]a]"), HasSubstr("']'"));
  EXPECT_THAT(ErrorOf("a{1,3}+"), HasSubstr("'{1,3}+'"));
  EXPECT_THAT(ErrorOf("a{,3}"), HasSubstr("'{,3}'"));
}

TEST(RegexTest, AWrongPatternIsAnError) {
  for (const std::string pattern : {"(a", "a)", "[a", "*", "\\p{L", "\\",
                                    "\\p{Nonsense}", "\\x{110000}", "(?:"}) {
    EXPECT_FALSE(Regex::FromOniguruma(pattern).ok()) << pattern;
  }
  EXPECT_THAT(ErrorOf("(a"), HasSubstr("not a regular expression: missing"));
}

TEST(RegexTest, ALiteralIsNoPattern) {
  EXPECT_THAT(Matches(Regex::Literal("a.b("), "a.b(axb("), ElementsAre("a.b("));
}

// The stack of compiled patterns is small; a long text must not end in it.
TEST(RegexTest, LongMatchesAreWhole) {
  const std::string text(5 << 20, 'a');
  EXPECT_THAT(Matches("(?:a|b)+", text), ElementsAre(text));
  EXPECT_THAT(Matches("(?:aa?)+(?!a)", text), ElementsAre(text));
}

}  // namespace
}  // namespace zero
