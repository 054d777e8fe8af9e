#include "engine/data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

// The library's namespace absl is not Abseil's.
#define absl sentencepiece_absl
#include <sentencepiece_trainer.h>
#undef absl

#include "engine/base/file.h"
#include "engine/data/sentencepiece_tokenizer.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const char kText[] =
    "The quick brown fox jumps over the lazy dog.\n"
    "  Two spaces,\ttabs;\n\nempty lines and 12345 numbers.\n"
    "caf\xC3\xA9, \xE2\x82\xAC 5, \xF0\x9F\x98\x80 and \xEF\xAC\x81ne.\n";

// A corpus large enough for a few hundred pieces, from a fixed seed.
std::string Corpus() {
  const char* words[] = {"tensor", "gradient",  "shard", "rank",  "the",
                         "of",     "reduces",   "into",  "loss",  "memory",
                         "bucket", "parameter", "while", "every", "device"};
  std::mt19937 random(3);
  std::string text;
  for (int i = 0; i < 20000; ++i) {
    text += words[random() % std::size(words)];
    text += random() % 12 == 0 ? ".\n" : " ";
  }
  return text + kText;
}

// One trained model for all tests of this file.
class SentencePieceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TempDir;
    dir_->Write("corpus.txt", Corpus());
    const absl::Status status =
        TrainSentencePiece({.inputs = {dir_->File("corpus.txt")},
                            .model_prefix = dir_->File("bpe"),
                            .vocab_size = 400});
    ASSERT_TRUE(status.ok()) << status;
  }
  static void TearDownTestSuite() { delete dir_; }

  static std::unique_ptr<Tokenizer> Model() {
    return OpenTokenizer(dir_->File("bpe.model")).value();
  }

  static TempDir* dir_;
};
TempDir* SentencePieceTest::dir_ = nullptr;

std::string Streamed(const Tokenizer& tokenizer,
                     const std::vector<int32_t>& ids) {
  StreamDecoder decoder(&tokenizer);
  std::string text;
  for (const int32_t id : ids) text += decoder.Push(id);
  return text + decoder.Finish();
}

TEST(ByteTokenizerTest, AnyBytesSurviveTheRoundTrip) {
  const auto tokenizer = MakeByteTokenizer();
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const std::vector<int32_t> ids = tokenizer->Encode(all);
  EXPECT_EQ(ids.size(), 256u);
  EXPECT_EQ(ids[200], 200);
  EXPECT_EQ(tokenizer->Decode(ids), all);
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eot_id(), 256);
  EXPECT_EQ(tokenizer->name(), "bytes");
}

TEST(ByteTokenizerTest, EndOfTextIsSilentAndPaddedIdsAreReplaced) {
  const auto tokenizer = MakeByteTokenizer();
  EXPECT_EQ(tokenizer->Decode({'a', 256, 'b', 300, -1}),
            "ab\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST_F(SentencePieceTest, TextSurvivesTheRoundTripWithFewerTokens) {
  const auto tokenizer = Model();
  EXPECT_EQ(tokenizer->vocab_size(), 400);
  for (const std::string& text :
       {std::string(kText), Corpus(), std::string(" leading"),
        std::string("\n"), std::string("")}) {
    EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text);
  }
  EXPECT_LT(tokenizer->Encode(Corpus()).size(), Corpus().size() / 3);
}

TEST_F(SentencePieceTest, EncodeNeverMakesTheEndOfText) {
  const auto tokenizer = Model();
  EXPECT_EQ(tokenizer->eot_id(), 1);
  for (const int32_t id : tokenizer->Encode("a<|endoftext|>b")) {
    EXPECT_NE(id, tokenizer->eot_id());
  }
  EXPECT_EQ(tokenizer->TokenBytes(tokenizer->eot_id()), "");
}

TEST_F(SentencePieceTest, PiecesCutAfterLineBreaksGiveTheIdsOfTheWhole) {
  const auto tokenizer = Model();
  const std::string text = Corpus();
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.size(), text.find('\n', begin + 1000) + 1);
    const size_t stop = end == 0 ? text.size() : end;
    EXPECT_TRUE(tokenizer->EncodePart(absl::string_view(text).substr(begin),
                                      stop - begin, begin > 0, &ids));
    begin = stop;
  }
  EXPECT_EQ(ids, tokenizer->Encode(text));
}

// Llama's models add a space before every text.
TEST_F(SentencePieceTest, OnlyTheFirstPieceGetsTheModelsOwnSpace) {
  std::string lines, model;
  for (int i = 0; i < 200; ++i) lines += "the rank reduces the shard\n";
  dir_->Write("lines.txt", lines);
  ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(
                  {{"input", dir_->File("lines.txt")},
                   {"model_type", "bpe"},
                   {"vocab_size", "290"},
                   {"byte_fallback", "true"},
                   {"normalization_rule_name", "identity"},
                   {"remove_extra_whitespaces", "false"}},
                  nullptr, &model)
                  .ok());
  dir_->Write("space.model", model);
  const auto tokenizer = OpenTokenizer(dir_->File("space.model")).value();
  EXPECT_EQ(tokenizer->TokenBytes(tokenizer->Encode("rank")[0])[0], ' ');

  const std::string first = "the shard\n", second = "rank\n the rank\n";
  std::vector<int32_t> ids;
  tokenizer->EncodePart(first + second, first.size(), /*continues=*/false,
                        &ids);
  tokenizer->EncodePart(second, second.size(), /*continues=*/true, &ids);
  EXPECT_EQ(ids, tokenizer->Encode(first + second));
  EXPECT_EQ(tokenizer->Decode(ids), first + second);
  EXPECT_EQ(Streamed(*tokenizer, ids), " " + first + second);
}

TEST_F(SentencePieceTest, StreamingGivesTheTextOfDecode) {
  const auto tokenizer = Model();
  EXPECT_EQ(Streamed(*tokenizer, tokenizer->Encode(kText)), kText);
}

TEST_F(SentencePieceTest, PaddedIdsAreReplaced) {
  const auto tokenizer = Model();
  const std::vector<int32_t> ids = {tokenizer->Encode("a")[0], 5000, -3};
  EXPECT_EQ(tokenizer->Decode(ids), "a\xEF\xBF\xBD\xEF\xBF\xBD");
  EXPECT_EQ(Streamed(*tokenizer, ids), "a\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST_F(SentencePieceTest, TrainingIsDeterministic) {
  ASSERT_TRUE(TrainSentencePiece({.inputs = {dir_->File("corpus.txt")},
                                  .model_prefix = dir_->File("again"),
                                  .vocab_size = 400})
                  .ok());
  EXPECT_EQ(dir_->Read("again.model"), dir_->Read("bpe.model"));
}

TEST_F(SentencePieceTest, UnigramModelsTrainToo) {
  const absl::Status status =
      TrainSentencePiece({.inputs = {dir_->File("corpus.txt")},
                          .model_prefix = dir_->File("unigram"),
                          .vocab_size = 320,
                          .model_type = "unigram"});
  ASSERT_TRUE(status.ok()) << status;
  const auto tokenizer = OpenTokenizer(dir_->File("unigram.model")).value();
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(kText)), kText);
}

TEST_F(SentencePieceTest, LongLinesAndLargeInputsAreCutDown) {
  TempDir dir;
  std::string line;
  for (int i = 0; i < 3000; ++i) line += "sharding caf\xC3\xA9 parameters ";
  dir.Write("long.txt", line + "\n" + Corpus());
  const absl::Status status = TrainSentencePiece({.inputs = {dir.File("*.txt")},
                                                  .model_prefix = dir.File("m"),
                                                  .vocab_size = 300,
                                                  .max_input_bytes = 60000});
  ASSERT_TRUE(status.ok()) << status;
  const auto tokenizer = OpenTokenizer(dir.File("m.model")).value();
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(line)), line);
}

TEST_F(SentencePieceTest, WrongTrainingOptionsAreNamed) {
  const auto error = [&](SentencePieceTraining options) {
    if (options.inputs.empty()) options.inputs = {dir_->File("corpus.txt")};
    if (options.model_prefix.empty()) options.model_prefix = dir_->File("x");
    return std::string(TrainSentencePiece(options).message());
  };
  EXPECT_THAT(error({.model_type = "wordpiece"}), HasSubstr("'wordpiece'"));
  EXPECT_THAT(error({.vocab_size = 100}), HasSubstr("100 is not in [300"));
  EXPECT_THAT(error({.inputs = {dir_->File("corpse.txt")}}),
              HasSubstr("nearest names are: corpus.txt"));
  const std::string large = error({.vocab_size = 50000});
  EXPECT_THAT(large, HasSubstr("vocabulary 50000"));
  EXPECT_THAT(large, HasSubstr("<= "));
  EXPECT_FALSE(PathExists(dir_->File("x.model")));
}

TEST_F(SentencePieceTest, WrongModelFilesAreNamed) {
  TempDir dir;
  EXPECT_EQ(OpenTokenizer(dir.File("no.model")).status().code(),
            absl::StatusCode::kNotFound);
  for (const std::string& contents :
       {std::string(""), std::string("not a model"), std::string(100, '\0'),
        dir_->Read("bpe.model").substr(0, 500)}) {
    dir.Write("bad.model", contents);
    const absl::Status status = OpenTokenizer(dir.File("bad.model")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("bad.model' is not a SentencePiece model"));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("model ()")));
  }
}

TEST_F(SentencePieceTest, MutatedModelFilesDoNotCrash) {
  TempDir dir;
  const std::string whole = dir_->Read("bpe.model");
  std::mt19937 random(4);
  for (int i = 0; i < 300; ++i) {
    std::string mutated = whole;
    for (size_t c = 1 + random() % 3; c > 0; --c) {
      mutated[random() % mutated.size()] = static_cast<char>(random());
    }
    dir.Write("m.model", mutated);
    const auto tokenizer = OpenTokenizer(dir.File("m.model"));
    if (!tokenizer.ok()) continue;
    const std::vector<int32_t> ids = (*tokenizer)->Encode(kText);
    EXPECT_GE((*tokenizer)->Decode(ids).size(), 0u);
    for (const int32_t id : ids) (*tokenizer)->TokenBytes(id);
  }
}

TEST(OpenTokenizerTest, SaysWhatIsPossible) {
  EXPECT_EQ(OpenTokenizer("bytes").value()->name(), "bytes");
  EXPECT_THAT(std::string(OpenTokenizer("byte").status().message()),
              HasSubstr("expected bytes, the path"));
  TempDir dir;
  EXPECT_THAT(std::string(OpenTokenizer(dir.File("")).status().message()),
              HasSubstr("neither a tokenizer.json nor a tokenizer.model"));
  EXPECT_EQ(OpenTokenizer(dir.File("tokenizer.json")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(StreamDecoderTest, HoldsBackUnfinishedCharacters) {
  const auto tokenizer = MakeByteTokenizer();
  StreamDecoder decoder(tokenizer.get());
  EXPECT_EQ(decoder.Push('a'), "a");
  EXPECT_EQ(decoder.Push(0xF0), "");
  EXPECT_EQ(decoder.Push(0x9F), "");
  EXPECT_EQ(decoder.Push(0x98), "");
  EXPECT_EQ(decoder.Push(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(decoder.Push(0xE2), "");
  EXPECT_EQ(decoder.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.Finish(), "");
  EXPECT_EQ(decoder.Push('b'), "b");
}

// Table 3-8 of the Unicode standard: one replacement per maximal subpart.
TEST(TakeValidUtf8Test, ReplacesMaximalSubparts) {
  const std::string r = "\xEF\xBF\xBD";
  const auto taken = [](std::string bytes) { return TakeValidUtf8(&bytes); };
  EXPECT_EQ(taken("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"),
            "a" + r + r + r + "b" + r + "c" + r + r + "d");
  EXPECT_EQ(taken("\xC0\xAFz"), r + r + "z");                  // overlong
  EXPECT_EQ(taken("\xED\xA0\x80z"), r + r + r + "z");          // surrogate
  EXPECT_EQ(taken("\xF4\x90\x80\x80z"), r + r + r + r + "z");  // > U+10FFFF
  EXPECT_EQ(taken("\xF5z"), r + "z");
}

// For any bytes, in any pieces, the text is the same and valid for a strict
// decoder.
TEST(TakeValidUtf8Test, DoesNotDependOnHowTheBytesArrive) {
  std::mt19937 random(5);
  const auto tokenizer = MakeByteTokenizer();
  for (int i = 0; i < 10000; ++i) {
    std::string bytes;
    for (size_t n = random() % 12; n > 0; --n) {
      const char* often = "\xE2\x82\xAC\xF0\x9F\x98\x80\xC3\xA9";
      bytes.push_back(random() % 3 == 0 ? static_cast<char>(random())
                                        : often[random() % 9]);
    }
    std::string rest = bytes;
    std::string whole = TakeValidUtf8(&rest);
    EXPECT_LE(rest.size(), 3u);
    if (!rest.empty()) whole += "\xEF\xBF\xBD";
    EXPECT_EQ(Streamed(*tokenizer, tokenizer->Encode(bytes)), whole);
    std::string again = whole;
    EXPECT_EQ(TakeValidUtf8(&again), whole);
    EXPECT_EQ(again, "");
  }
}

}  // namespace
}  // namespace zero
