#include "engine/config/json_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace zero {
namespace {

// "LINE:COLUMN: path: message" of the only problem.
std::string ProblemOf(const std::string& text) {
  JsonNode root;
  std::vector<JsonProblem> problems;
  if (ParseJsonText(text, 0, &root, &problems)) return "none";
  EXPECT_EQ(problems.size(), 1u);
  const JsonProblem& p = problems[0];
  return absl::StrCat(p.place.line, ":", p.place.column, ": ", p.path, ": ",
                      p.message);
}

JsonNode Parse(const std::string& text) {
  JsonNode root;
  std::vector<JsonProblem> problems;
  EXPECT_TRUE(ParseJsonText(text, 0, &root, &problems))
      << text << ": " << (problems.empty() ? "" : problems[0].message);
  return root;
}

TEST(JsonTextTest, ValuesKeepTheirPlaces) {
  const JsonNode root =
      Parse("// a comment\n{\n  \"a\": /* here */ [1, {}]\n}");
  const JsonNode* a = root.Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->key_place.line, 3);
  EXPECT_EQ(a->key_place.column, 3);
  EXPECT_EQ(a->place.column, 19);
  EXPECT_EQ(a->children[1].place.column, 23);
}

TEST(JsonTextTest, ColumnsCountCharactersNotBytes) {
  EXPECT_EQ(ProblemOf("{\"gr\xC3\xBC\xC3\x9F\": x}"),
            "1:10: gr\xC3\xBC\xC3\x9F: found 'x', want a value");
}

TEST(JsonTextTest, StringsAndEscapesReadAsNlohmannReadsThem) {
  for (const char* text :
       {R"("")", R"("a\"b\\c\/d\b\f\n\r\te")", R"("\u0041\u00e9\u20ac")",
        R"("\ud83d\ude00")", "\"\xF0\x9F\x98\x80 \xE2\x82\xAC\""}) {
    EXPECT_EQ(Parse(text).text, nlohmann::json::parse(text).get<std::string>())
        << text;
  }
}

TEST(JsonTextTest, NumbersReadAsNlohmannReadsThem) {
  for (const char* text :
       {"0", "-0", "1", "-17", "3.25", "1e3", "1E-5", "9223372036854775807",
        "-9223372036854775808", "0.1", "2.2250738585072014e-308", "5e8"}) {
    const JsonNode node = Parse(text);
    EXPECT_EQ(node.number, nlohmann::json::parse(text).get<double>()) << text;
  }
  EXPECT_EQ(Parse("9223372036854775807").integer, INT64_MAX);
  EXPECT_FALSE(Parse("9223372036854775808").is_integer);
  EXPECT_FALSE(Parse("5e8").is_integer);
}

TEST(JsonTextTest, DoublesAreWrittenWithTheFewestDigitsThatReadBack) {
  EXPECT_EQ(JsonDouble(0.1), "0.1");
  EXPECT_EQ(JsonDouble(1), "1.0");
  EXPECT_EQ(JsonDouble(500000), "500000.0");
  EXPECT_EQ(JsonDouble(1e-8), "1e-08");
  for (const double v : {1.0 / 3, 6e-4, 1e300, 5e-324, -123456.789}) {
    EXPECT_EQ(Parse(JsonDouble(v)).number, v);
  }
}

TEST(JsonTextTest, QuotedTextReadsBack) {
  const std::string text = "a\"b\\c\n\t\r\x01 \xE2\x82\xAC";
  EXPECT_EQ(Parse(JsonQuote(text)).text, text);
}

TEST(JsonTextTest, SyntaxErrorsSayWhereAndWhatToDo) {
  EXPECT_EQ(ProblemOf(""), "1:1: : the text is empty, want an object: { ... }");
  EXPECT_EQ(ProblemOf("{\"a\": 1,\n}"), "1:8: : a comma before }; delete it");
  EXPECT_EQ(ProblemOf("{\"a\": [1,]}"), "1:9: a: a comma before ]; delete it");
  EXPECT_EQ(ProblemOf("{\n\"a\": {\"b\": 1"),
            "2:13: a: the text ends inside the object that was opened at 2:6; "
            "want a closing }");
  EXPECT_EQ(ProblemOf("{\"a\": 1 \"b\": 2}"),
            "1:9: : found '\"' after a value, want , or }");
  EXPECT_EQ(ProblemOf("{a: 1}"),
            "1:2: : found 'a', want a key in double quotes: \"...\"");
  EXPECT_EQ(ProblemOf("{\"a\" 1}"),
            "1:6: : found '1' after the key \"a\", want a colon");
  EXPECT_EQ(ProblemOf("{'a': 1}"),
            "1:2: : found a ', want a key in double quotes: \"...\"");
  EXPECT_EQ(ProblemOf("{\"a\": NaN}"),
            "1:7: a: found 'NaN'; numbers must be finite");
  EXPECT_EQ(ProblemOf("{\"a\": 1e999}"),
            "1:7: a: 1e999 does not fit in a 64-bit float");
  EXPECT_EQ(ProblemOf("{\"a\": 007}"), "1:7: a: '007' is not a JSON number");
  EXPECT_EQ(ProblemOf("{\"a\": 1.}"), "1:7: a: '1.' is not a JSON number");
  EXPECT_EQ(ProblemOf("{\"a\": .5}"), "1:7: a: found '.5', want a value");
  EXPECT_EQ(ProblemOf("{\"a\": True}"),
            "1:7: a: found 'True'; JSON writes true");
  EXPECT_EQ(ProblemOf("{\"a\": None}"),
            "1:7: a: found 'None'; JSON writes null");
  EXPECT_EQ(ProblemOf("{} {}"),
            "1:4: : there is '{' after the end of the value; delete it");
  EXPECT_EQ(ProblemOf("{ /* x }"),
            "1:3: : this comment is never closed; want */");
  EXPECT_EQ(ProblemOf("{\"a\": \"b\n\"}"),
            "1:7: a: this string is never closed; want a \"");
  EXPECT_EQ(ProblemOf("{\"a\": \"\xFF\"}"), "1:8: a: this byte is not UTF-8");
  EXPECT_EQ(ProblemOf("{\"a\": \"\\x\"}"),
            "1:8: a: not an escape; want \\\" \\\\ \\/ \\b \\f \\n \\r \\t or "
            "\\uXXXX");
  EXPECT_EQ(ProblemOf("{\"a\": \"\\ud800\"}"),
            "1:8: a: half of a surrogate pair");
}

TEST(JsonTextTest, EveryDuplicateKeyIsReported) {
  JsonNode root;
  std::vector<JsonProblem> problems;
  EXPECT_FALSE(
      ParseJsonText("{\"a\": 1,\n\"a\": 2, \"b\": {\"c\": 1,\n"
                    "\"c\": 2}}",
                    0, &root, &problems));
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0].path, "a");
  EXPECT_EQ(problems[0].message, "given twice, first in line 1; delete one");
  EXPECT_EQ(problems[1].path, "b.c");
  EXPECT_EQ(problems[1].place.line, 3);
}

TEST(JsonTextTest, DeepNestingIsAnErrorAndNoStackOverflow) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += open;
    EXPECT_NE(ProblemOf(text).find("nested deeper than 64 levels"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace zero
