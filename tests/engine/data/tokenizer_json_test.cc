#include "engine/data/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "engine/data/added_tokens.h"
#include "engine/data/bpe.h"
#include "engine/data/normalizer.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kLlama3[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

// The character that stands for a byte.
std::string ByteCharacter(int byte) {
  int next = 256;
  for (int b = 0; b < byte; ++b) {
    if (b < '!' || b == 0x7F || (b > '~' && b < 0xA1) || b == 0xAD) ++next;
  }
  const bool is_printable = byte >= '!' && byte != 0x7F &&
                            !(byte > '~' && byte < 0xA1) && byte != 0xAD;
  const int code = is_printable ? byte : next;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6),
          static_cast<char>(0x80 | (code & 0x3F))};
}

// A tokenizer.json like GPT-2's: byte b is token b, then merges, then the end
// of text.
Json Gpt2Json() {
  Json vocab = Json::object(), merges = Json::array();
  for (int b = 0; b < 256; ++b) vocab[ByteCharacter(b)] = b;
  const std::string space = ByteCharacter(' ');
  const std::pair<std::string, std::string> pairs[] = {
      {"t", "h"},    {"th", "e"},    {space, "the"},       {"a", "n"},
      {"an", "d"},   {space, "and"}, {"\u00c3", "\u00a9"},  // e acute
      {"a", "a"},    {"aa", "aa"},   {"e", "r"},           {"the", "r"},
      {space, space}};
  for (const auto& [left, right] : pairs) {
    vocab[left + right] = vocab.size();
    merges.push_back(left + " " + right);
  }
  return {{"version", "1.0"},
          {"truncation", {{"max_length", 4}}},
          {"added_tokens",
           {{{"id", vocab.size()},
             {"content", "<|endoftext|>"},
             {"special", true},
             {"normalized", false}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "ByteLevel"},
            {"add_prefix_space", false},
            {"trim_offsets", true},
            {"use_regex", true}}},
          {"post_processor", {{"type", "ByteLevel"}, {"trim_offsets", false}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", ""},
            {"end_of_word_suffix", ""},
            {"fuse_unk", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}
constexpr int32_t kThe = 257, kSpaceThe = 258, kEAcute = 262, kEnd = 268;

// Like Llama 3's: with a begin of text before every text.
Json Llama3Json() {
  Json json = Gpt2Json();
  json["model"]["ignore_merges"] = true;
  json["added_tokens"] = {
      {{"id", 268}, {"content", "<|begin_of_text|>"}, {"special", true}},
      {{"id", 269}, {"content", "<|end_of_text|>"}, {"special", true}},
      {{"id", 300}, {"content", "<tool>"}, {"special", false}}};
  json["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", kLlama3}}},
                              {"behavior", "Isolated"},
                              {"invert", false}},
                             {{"type", "ByteLevel"},
                              {"add_prefix_space", false},
                              {"use_regex", false}}}}};
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}},
        {{"type", "TemplateProcessing"},
         {"single",
          {{{"SpecialToken", {{"id", "<|begin_of_text|>"}, {"type_id", 0}}}},
           {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}}}}}};
  return json;
}

class TokenizerJsonTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Tokenizer>> Open(const std::string& text) {
    dir_.Write("tokenizer.json", text);
    return OpenTokenizer(dir_.File("tokenizer.json"));
  }
  std::unique_ptr<Tokenizer> Make(const Json& json) {
    auto tokenizer = Open(json.dump());
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return *std::move(tokenizer);
  }
  std::string ErrorOf(const Json& json) {
    return std::string(Open(json.dump()).status().message());
  }
  // Gpt2Json with one value replaced.
  std::string ErrorWith(const std::string& pointer, const Json& value) {
    Json json = Gpt2Json();
    json[Json::json_pointer(pointer)] = value;
    return ErrorOf(json);
  }
  TempDir dir_;
};

TEST_F(TokenizerJsonTest, MergesInTheOrderTheyWereLearned) {
  const auto tokenizer = Make(Gpt2Json());
  EXPECT_EQ(tokenizer->vocab_size(), 269);
  EXPECT_EQ(tokenizer->eot_id(), kEnd);
  EXPECT_EQ(tokenizer->name(), dir_.File("tokenizer.json"));
  EXPECT_THAT(tokenizer->DocumentStart(), ElementsAre(kEnd));
  EXPECT_THAT(tokenizer->Encode("the the"), ElementsAre(kThe, kSpaceThe));
  // "th" and "the" come before "er", and "ther" after both.
  EXPECT_THAT(tokenizer->Encode("ther"), ElementsAre(266));
  EXPECT_THAT(tokenizer->Encode("aer"), ElementsAre('a', 265));
  // The leftmost of equal pairs.
  EXPECT_THAT(tokenizer->Encode("aaa"), ElementsAre(263, 'a'));
  EXPECT_THAT(tokenizer->Encode("aaaaaaa"), ElementsAre(264, 263, 'a'));
  EXPECT_THAT(tokenizer->Encode("caf\u00e9"),
              ElementsAre('c', 'a', 'f', kEAcute));
  EXPECT_THAT(tokenizer->Encode("   the"), ElementsAre(267, kSpaceThe));
  EXPECT_THAT(tokenizer->Encode(""), IsEmpty());
}

TEST_F(TokenizerJsonTest, MergesMayBePairs) {
  Json json = Gpt2Json();
  for (Json& merge : json["model"]["merges"]) {
    const std::string text = merge;
    const size_t space = text.find(' ');
    merge = {text.substr(0, space), text.substr(space + 1)};
  }
  EXPECT_THAT(Make(json)->Encode("the the"), ElementsAre(kThe, kSpaceThe));
}

TEST_F(TokenizerJsonTest, WordsOfAllLengthsAreMergedAlike) {
  const auto tokenizer = Make(Gpt2Json());
  for (const int n : {1, 11, 12, 13, 1000, 100000}) {  // short ones are cached
    std::string text;
    std::vector<int32_t> want(n, 264);
    for (int i = 0; i < n; ++i) text += "aaaa";
    EXPECT_EQ(tokenizer->Encode(text), want) << n;
    EXPECT_EQ(tokenizer->Encode(text), want) << n;
  }
}

TEST_F(TokenizerJsonTest, ManyDifferentWordsAreAllRight) {
  // More than the cache holds, each twice.
  const auto tokenizer = Make(Gpt2Json());
  for (int round = 0; round < 2; ++round) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 100000; ++i) {
      const std::string digits = std::to_string(i);
      ids = tokenizer->Encode(digits);
      ASSERT_EQ(std::string(ids.begin(), ids.end()), digits);
    }
  }
}

TEST_F(TokenizerJsonTest, ManyThreadsMayEncode) {
  const auto tokenizer = Make(Llama3Json());
  std::string text;
  for (int i = 0; i < 2000; ++i) text += " the " + std::to_string(i * 7919);
  const std::vector<int32_t> want = tokenizer->Encode(text);
  std::vector<std::vector<int32_t>> ids(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < ids.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 3; ++round) ids[t] = tokenizer->Encode(text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : ids) EXPECT_EQ(one, want);
}

TEST_F(TokenizerJsonTest, TextIsNeverAControlToken) {
  const auto tokenizer = Make(Gpt2Json());
  const std::vector<int32_t> ids = tokenizer->Encode("a<|endoftext|>b");
  EXPECT_THAT(ids, testing::Not(testing::Contains(kEnd)));
  EXPECT_EQ(tokenizer->Decode(ids), "a<|endoftext|>b");
  EXPECT_THAT(tokenizer->EncodePrompt("a<|endoftext|>b"),
              ElementsAre('a', kEnd, 'b'));
  EXPECT_EQ(tokenizer->TokenBytes(kEnd), "");
}

TEST_F(TokenizerJsonTest, TheBeginOfTextStandsInFrontOfDocumentsAndPrompts) {
  const auto tokenizer = Make(Llama3Json());
  EXPECT_EQ(tokenizer->eot_id(), 269);
  EXPECT_THAT(tokenizer->DocumentStart(), ElementsAre(269, 268));
  EXPECT_THAT(tokenizer->EncodePrompt("the"), ElementsAre(268, kThe));
  EXPECT_THAT(tokenizer->Encode("the"), ElementsAre(kThe));
  // It is not a control token: text may contain it.
  EXPECT_THAT(tokenizer->Encode("a<tool>"), ElementsAre('a', 300));
  EXPECT_EQ(tokenizer->Decode({'a', 300}), "a<tool>");
  // Ids have holes.
  EXPECT_EQ(tokenizer->vocab_size(), 301);
  EXPECT_EQ(tokenizer->Decode({'a', 280, 299, 301, -1}),
            "a\uFFFD\uFFFD\uFFFD\uFFFD");
}

TEST_F(TokenizerJsonTest, IgnoreMergesTakesWholeWordsFirst) {
  Json json = Llama3Json();
  json["model"]["vocab"]["zebra"] = 290;
  EXPECT_THAT(Make(json)->Encode("zebra zebra"),
              ElementsAre(290, ' ', 'z', 'e', 'b', 'r', 'a'));
  json["model"]["ignore_merges"] = false;
  EXPECT_THAT(Make(json)->Encode("zebra"),
              ElementsAre('z', 'e', 'b', 'r', 'a'));
}

TEST_F(TokenizerJsonTest, TheEndOfTextIsWhatTheFilesBesideItSay) {
  Json json = Gpt2Json();
  json["added_tokens"][0]["content"] = "<end>";
  EXPECT_THAT(ErrorOf(json), HasSubstr("does not say which token ends a text"));
  dir_.Write("special_tokens_map.json",
             "{\"eos_token\": {\"content\": \"<end>\"}}");
  EXPECT_EQ(Make(json)->eot_id(), kEnd);
  dir_.Write("tokenizer_config.json", "{\"eos_token\": \"the\"}");
  EXPECT_EQ(Make(json)->eot_id(), kThe);
  dir_.Write("tokenizer_config.json", "{\"eos_token\": \"<eos>\"}");
  EXPECT_THAT(ErrorOf(json),
              HasSubstr("eos_token is \"<eos>\", which is not a token of"));
}

TEST_F(TokenizerJsonTest, ItsFilesAreReadByOthers) {
  const auto files = Make(Llama3Json())->Files();
  EXPECT_EQ(files.at("tokenizer.json"), dir_.Read("tokenizer.json"));
  const Json config = Json::parse(files.at("tokenizer_config.json"));
  EXPECT_EQ(config["eos_token"], "<|end_of_text|>");
  EXPECT_EQ(config["bos_token"], "<|begin_of_text|>");
  dir_.Write("tokenizer_config.json", "{\"eos_token\": \"the\"}");
  EXPECT_EQ(Make(Llama3Json())->Files().at("tokenizer_config.json"),
            dir_.Read("tokenizer_config.json"));
}

TEST_F(TokenizerJsonTest, WhatIsNoUtf8BecomesReplacementCharacters) {
  const auto tokenizer = Make(Gpt2Json());
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("a\xFF\xE2\x82z\xC3")),
            "a\uFFFD\uFFFDz\uFFFD");
}

TEST_F(TokenizerJsonTest, TextIsNormalizedFirst) {
  Json json = Gpt2Json();
  json["normalizer"] = {{"type", "NFC"}};
  const auto tokenizer = Make(json);
  EXPECT_THAT(tokenizer->Encode("cafe\u0301"),
              ElementsAre('c', 'a', 'f', kEAcute));
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode("\uFB01")), "\uFB01");
  json["normalizer"] = {{"type", "Sequence"},
                        {"normalizers", {{{"type", "NFKC"}}}}};
  EXPECT_THAT(Make(json)->Encode("\uFB01"), ElementsAre('f', 'i'));
}

TEST_F(TokenizerJsonTest, StreamedTextIsTheTextOfAllTokens) {
  const auto tokenizer = Make(Gpt2Json());
  const std::string text = "the caf\u00e9, \u6a21\u578b \U0001F600!";
  StreamDecoder decoder(tokenizer.get());
  std::string streamed;
  for (const int32_t id : tokenizer->Encode(text)) streamed += decoder.Push(id);
  EXPECT_EQ(streamed + decoder.Finish(), text);
}

// Wherever a text is cut, the ids of both parts are those of the whole, or the
// first part reports that they are not.
TEST_F(TokenizerJsonTest, PartsGiveTheIdsOfTheWhole) {
  Json nfc = Llama3Json();
  nfc["normalizer"] = {{"type", "NFC"}};
  nfc["added_tokens"].push_back({{"id", 301},
                                 {"content", "<l>"},
                                 {"lstrip", true},
                                 {"normalized", true}});
  Json spaced = Gpt2Json();
  spaced["pre_tokenizer"]["add_prefix_space"] = true;
  const char* words[] = {"the",  " and",   "\n", "\n\n",     "  ", "e\u0301",
                         "1234", "<l>",    "'s", "<tool>",   "!",  "\u0301",
                         "\r\n", "\u6a21", "\t", "\xE2\x82", " "};
  std::mt19937 random(7);
  for (const Json& json : {Gpt2Json(), Llama3Json(), nfc, spaced}) {
    const auto tokenizer = Make(json);
    int64_t num_cuts = 0, num_good = 0;
    for (int i = 0; i < 300; ++i) {
      std::string text;
      for (int n = 0; n < 12; ++n) text += words[random() % std::size(words)];
      const std::vector<int32_t> whole = tokenizer->Encode(text);
      for (size_t cut = 1; cut < text.size(); ++cut) {
        if ((text[cut] & 0xC0) == 0x80) continue;
        ++num_cuts;
        std::vector<int32_t> ids;
        if (!tokenizer->EncodePart(text, cut, false, &ids)) continue;
        ++num_good;
        ASSERT_TRUE(tokenizer->EncodePart(text.substr(cut), text.size() - cut,
                                          true, &ids));
        ASSERT_EQ(ids, whole)
            << cut << " of "
            << Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
      }
    }
    EXPECT_GT(num_good, num_cuts / 10);
  }
}

TEST_F(TokenizerJsonTest, WhatIsNotReadIsNamedWithARemedy) {
  const std::pair<const char*, Json> kUnknown[] = {
      {"/model/type", "WordPiece"},
      {"/model/type", "Unigram"},
      {"/model/byte_fallback", true},
      {"/model/dropout", 0.1},
      {"/model/end_of_word_suffix", "</w>"},
      {"/normalizer", {{"type", "Lowercase"}}},
      {"/pre_tokenizer", {{"type", "Metaspace"}}},
      {"/pre_tokenizer", nullptr},
      {"/post_processor", {{"type", "BertProcessing"}}},
      {"/decoder", {{"type", "WordPiece"}}},
      {"/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"Regex", "\\w+"}}},
        {"behavior", "Isolated"}}}};
  for (const auto& [pointer, value] : kUnknown) {
    Json json = Gpt2Json();
    json[Json::json_pointer(pointer)] = value;
    const absl::Status status = Open(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()),
                testing::AnyOf(HasSubstr("data.tokenizer to \"none\""),
                               HasSubstr("use the tokenizer.model")))
        << pointer;
  }
  EXPECT_THAT(ErrorWith("/model/type", "WordPiece"),
              HasSubstr("tokenizer.json': model.type is \"WordPiece\"; zero "
                        "reads the byte-level BPE"));
  EXPECT_THAT(ErrorWith("/normalizer", {{"type", "Lowercase"}}),
              HasSubstr("normalizer.type is \"Lowercase\""));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", {{"type", "Sequence"},
                                           {"pretokenizers",
                                            {{{"type", "Split"},
                                              {"pattern", {{"Regex", "\\w"}}},
                                              {"behavior", "Isolated"}}}}}),
              HasSubstr("pre_tokenizer.pretokenizers[0].pattern \"\\\\w\": "
                        "'\\w' in it is not supported"));
}

TEST_F(TokenizerJsonTest, DamageIsNamedWithItsPlace) {
  EXPECT_THAT(std::string(Open("{\"model\": ").status().message()),
              HasSubstr("tokenizer.json' is not JSON: "));
  EXPECT_THAT(ErrorOf(Json::array()), HasSubstr("is not a tokenizer.json"));
  EXPECT_THAT(ErrorWith("/model/vocab", Json::object()),
              HasSubstr("model.vocab is not an object with tokens"));
  EXPECT_THAT(ErrorWith("/model/vocab/the", 5),
              HasSubstr("which another token has"));
  EXPECT_THAT(ErrorWith("/model/vocab/the", -1),
              HasSubstr("gives \"the\" the id -1; want a whole number"));
  EXPECT_THAT(ErrorWith("/model/vocab/the", 1 << 24),
              HasSubstr("the id 16777216; want"));
  EXPECT_THAT(ErrorWith("/model/merges/3", "a"),
              HasSubstr("model.merges[3] is \"a\"; want two tokens"));
  EXPECT_THAT(ErrorWith("/model/merges/3", "a z"),
              HasSubstr("model.merges[3] is \"a z\", but model.vocab has no "
                        "\"az\""));
  EXPECT_THAT(ErrorWith("/added_tokens/0/id", 3), HasSubstr("another token"));
  EXPECT_THAT(ErrorWith("/added_tokens/0/lstrip", 3),
              HasSubstr("added_tokens[0].lstrip is not true or false"));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", {{"type", "Split"}}),
              HasSubstr("pre_tokenizer.pattern is null; want"));
  Json json = Gpt2Json();
  json["model"]["vocab"].erase("A");
  EXPECT_THAT(ErrorOf(json), HasSubstr("has no token for the byte 65"));
  Json deep = {{"type", "NFC"}};
  for (int i = 0; i < 40; ++i) {
    deep = {{"type", "Sequence"}, {"normalizers", {deep}}};
  }
  EXPECT_THAT(ErrorWith("/normalizer", deep),
              HasSubstr("sequences in sequences"));
}

// Bytes, and values of any kind in any place.
TEST_F(TokenizerJsonTest, MutatedFilesAreErrorsOrTokenizers) {
  const Json values[] = {nullptr,
                         true,
                         -1,
                         1e300,
                         "",
                         "a",
                         "(",
                         "\\p{L}",
                         Json::array(),
                         Json::object(),
                         {{"type", "Split"}},
                         {{"type", "Sequence"}},
                         "Sequence",
                         "<|endoftext|>"};
  const Json base = Llama3Json();
  const Json flat = base.flatten();
  std::vector<std::string> pointers;
  for (const auto& [pointer, value] : flat.items()) {
    pointers.push_back(pointer);
    const size_t slash = pointer.rfind('/');
    if (slash > 0) pointers.push_back(pointer.substr(0, slash));
  }
  std::mt19937 random(8);
  int64_t num_read = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    if (i % 2 == 0) {
      Json json = base;
      // Not only tokens and merges, which are most of it.
      std::string pointer;
      do {
        pointer = pointers[random() % pointers.size()];
      } while (absl::StartsWith(pointer, "/model/") && random() % 50 > 0);
      json[Json::json_pointer(pointer)] = values[random() % std::size(values)];
      text = json.dump();
    } else {
      text = base.dump();
      for (size_t n = 1 + random() % 3; n > 0; --n) {
        text[random() % text.size()] = static_cast<char>(random());
      }
      if (random() % 8 == 0) text.resize(random() % text.size());
    }
    const auto tokenizer = Open(text);
    if (!tokenizer.ok()) {
      EXPECT_THAT(std::string(tokenizer.status().message()),
                  HasSubstr("tokenizer.json'"));
      continue;
    }
    ++num_read;
    const auto ids = (*tokenizer)->EncodePrompt("the caf\u00e9<tool> 12 \xFF");
    for (const int32_t id : ids) EXPECT_LT(id, (*tokenizer)->vocab_size());
    (*tokenizer)->Decode(ids);
  }
  EXPECT_GT(num_read, 100);
}

// ---- Parts ------------------------------------------------------------------

std::vector<std::string> Segments(const std::vector<AddedToken>& tokens,
                                  const std::string& text,
                                  bool special_is_text = false) {
  RegexScratch scratch;
  std::vector<AddedTokens::Segment> segments;
  AddedTokens(tokens).Split(text, special_is_text, &scratch, &segments);
  std::vector<std::string> found;
  for (const auto& segment : segments) {
    const std::string part =
        text.substr(segment.begin, segment.end - segment.begin);
    found.push_back(segment.id < 0 ? part
                                   : part + "=" + std::to_string(segment.id));
  }
  return found;
}

TEST(AddedTokensTest, TheLongestTokenFromTheLeftCounts) {
  const std::vector<AddedToken> tokens = {{.content = "ab", .id = 1},
                                          {.content = "abc", .id = 2},
                                          {.content = "bcd", .id = 3},
                                          {.content = "", .id = 4}};
  EXPECT_THAT(Segments(tokens, "xabcdab"),
              ElementsAre("x", "abc=2", "d", "ab=1"));
  EXPECT_THAT(Segments(tokens, "xyz"), ElementsAre("xyz"));
  EXPECT_THAT(Segments(tokens, ""), IsEmpty());
}

TEST(AddedTokensTest, TokensTakeWhiteSpaceAlong) {
  EXPECT_THAT(Segments({{.content = "<l>", .id = 1, .lstrip = true}},
                       "a \u2003<l> b<l>"),
              ElementsAre("a", " \u2003<l>=1", " b", "<l>=1"));
  EXPECT_THAT(
      Segments({{.content = "<r>", .id = 1, .rstrip = true}}, "a <r> \n<r>b"),
      ElementsAre("a ", "<r> \n=1", "<r>=1", "b"));
}

TEST(AddedTokensTest, ASingleWordIsNoPartOfAnother) {
  EXPECT_THAT(Segments({{.content = "in", .id = 1, .single_word = true}},
                       "in inside begin \u00e9in in_ in"),
              ElementsAre("in=1", " inside begin \u00e9in in_ ", "in=1"));
}

TEST(AddedTokensTest, SpecialTokensMayBeText) {
  const std::vector<AddedToken> tokens = {
      {.content = "<s>", .id = 1, .special = true}, {.content = "s", .id = 2}};
  EXPECT_THAT(Segments(tokens, "<s>s"), ElementsAre("<s>=1", "s=2"));
  EXPECT_THAT(Segments(tokens, "<s>s", /*special_is_text=*/true),
              ElementsAre("<s>", "s=2"));
}

TEST(NormalizerTest, ChangesWhatTheFormSays) {
  std::string buffer;
  const std::string ascii = "plain\ntext";
  EXPECT_EQ(Normalize(NormalForm::kC, ascii, &buffer).data(), ascii.data());
  EXPECT_EQ(Normalize(NormalForm::kC, "e\u0301", &buffer), "\u00e9");
  EXPECT_EQ(Normalize(NormalForm::kD, "\u00e9", &buffer), "e\u0301");
  EXPECT_EQ(Normalize(NormalForm::kC, "\uFB01", &buffer), "\uFB01");
  EXPECT_EQ(Normalize(NormalForm::kKC, "\uFB01", &buffer), "fi");
  // Marks in their order, Hangul, and what must not compose again.
  EXPECT_EQ(Normalize(NormalForm::kC, "a\u0323\u0307\u0301", &buffer),
            Normalize(NormalForm::kC, "\u1ea1\u0307\u0301", &buffer));
  EXPECT_EQ(Normalize(NormalForm::kC, "\u1112\u1161\u11ab", &buffer), "\ud55c");
  EXPECT_EQ(Normalize(NormalForm::kC, "\u2126\n\u0301\n", &buffer),
            "\u03a9\n\u0301\n");
}

}  // namespace
}  // namespace zero
