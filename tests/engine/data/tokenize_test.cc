#include "engine/data/tokenize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

// The library's namespace absl is not Abseil's.
#define absl sentencepiece_absl
#include <sentencepiece_trainer.h>
#undef absl

#include "engine/data/sentencepiece_tokenizer.h"
#include "engine/data/token_file.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int32_t> ReadTokens(const std::string& pattern) {
  const auto source = TokenSource::Open({pattern}, TokenFormat::kLlmc).value();
  std::vector<int32_t> tokens(static_cast<size_t>(source->size()));
  source->Read(0, source->size(), tokens.data());
  return tokens;
}

// Lines of words, about `bytes` long.
std::string Lines(size_t bytes) {
  std::mt19937 random(11);
  std::string text;
  while (text.size() < bytes) {
    for (size_t n = 1 + random() % 9; n > 0; --n) {
      text.push_back(static_cast<char>('a' + random() % 26));
    }
    text.push_back(random() % 8 == 0 ? '\n' : ' ');
  }
  return text;
}

class TokenizeTest : public ::testing::Test {
 protected:
  TokenizeOptions Options() const {
    return {.inputs = {dir_.File("*.txt")},
            .output = dir_.File("out.bin"),
            .force = true};
  }
  std::string ErrorOf(const TokenizeOptions& options) const {
    return std::string(TokenizeFiles(options).status().message());
  }
  TempDir dir_;
};

TEST_F(TokenizeTest, EveryFileIsADocumentAfterAnEndOfText) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.txt", "c");
  const TokenizeStats stats = TokenizeFiles(Options()).value();
  EXPECT_THAT(ReadTokens(dir_.File("out.bin")),
              ElementsAre(256, 'a', 'b', 256, 'c'));
  EXPECT_EQ(stats.num_files, 2);
  EXPECT_EQ(stats.num_documents, 2);
  EXPECT_EQ(stats.text_bytes, 3);
  EXPECT_EQ(stats.num_tokens, 5);
  EXPECT_EQ(stats.vocab_size, 257);
  EXPECT_EQ(stats.bytes_per_token, 2);
  ASSERT_EQ(stats.outputs.size(), 1u);
  EXPECT_EQ(stats.outputs[0].num_tokens, 5);
}

TEST_F(TokenizeTest, ASeparatorCutsDocumentsAndIsNotEncoded) {
  dir_.Write("a.txt", "one<|endoftext|>two<|endoftext|><|endoftext|>x");
  TokenizeOptions options = Options();
  options.document_separator = "<|endoftext|>";
  EXPECT_EQ(TokenizeFiles(options).value().num_documents, 3);
  EXPECT_THAT(ReadTokens(dir_.File("out.bin")),
              ElementsAre(256, 'o', 'n', 'e', 256, 't', 'w', 'o', 256, 'x'));
}

TEST_F(TokenizeTest, ShardsHoldTheSameTokensAsOneFile) {
  dir_.Write("a.txt", Lines(2500));
  TokenizeOptions options = Options();
  const TokenizeStats whole = TokenizeFiles(options).value();
  options.output = dir_.File("shards.bin");
  options.tokens_per_shard = 1000;
  const TokenizeStats stats = TokenizeFiles(options).value();
  ASSERT_EQ(stats.outputs.size(), 3u);
  EXPECT_EQ(stats.outputs[0].path, dir_.File("shards_000000.bin"));
  EXPECT_EQ(stats.outputs[0].num_tokens, 1000);
  EXPECT_EQ(stats.outputs[1].num_tokens, 1000);
  EXPECT_EQ(stats.num_tokens, whole.num_tokens);
  EXPECT_EQ(ReadTokens(dir_.File("shards_*.bin")),
            ReadTokens(dir_.File("out.bin")));
}

TEST_F(TokenizeTest, AnOutputThatIsAlsoAnInputIsAnError) {
  TokenizeOptions options = Options();
  options.inputs = {dir_.File("*")};
  for (const char* name : {"out.bin", "out_val.bin"}) {
    dir_.Write(name, "text");
    EXPECT_THAT(ErrorOf(options), HasSubstr(name));
    EXPECT_EQ(dir_.Read(name), "text");
    ASSERT_EQ(std::remove(dir_.File(name).c_str()), 0);
  }
}

TEST_F(TokenizeTest, ShardsOfAnEarlierRunAreAnError) {
  dir_.Write("a.txt", "abc");
  dir_.Write("out_000007.bin", "old");
  dir_.Write("out_other.bin", "unrelated");
  TokenizeOptions options = Options();
  options.force = false;
  options.tokens_per_shard = 1000;
  EXPECT_THAT(ErrorOf(options), HasSubstr("out_000007.bin' exists"));
  // A name is not a pattern.
  for (const std::string name : {"w\\x", "~nobody", "[0-9]", "a{b,c}"}) {
    options.output = dir_.File(name + ".bin");
    EXPECT_TRUE(TokenizeFiles(options).ok()) << name;
    EXPECT_THAT(ErrorOf(options), HasSubstr(name + "_000000.bin' exists"));
  }
}

TEST_F(TokenizeTest, AnEarlierOutputIsReplacedByForceOnly) {
  dir_.Write("a.txt", "abc");
  TokenizeOptions options = Options();
  options.force = false;
  dir_.Write("out.bin", "earlier");
  EXPECT_THAT(ErrorOf(options), HasSubstr("out.bin' exists; choose another"));
  EXPECT_EQ(dir_.Read("out.bin"), "earlier");
  options.tokens_per_shard = 2;
  dir_.Write("out_000001.bin", "");
  dir_.Write("out_000009.bin", "");
  EXPECT_THAT(ErrorOf(options), HasSubstr("(and 1 more)"));
  // Shards not replaced by new ones are removed.
  options.force = true;
  EXPECT_EQ(TokenizeFiles(options).value().outputs.size(), 2u);
  EXPECT_THAT(ReadTokens(dir_.File("out_*.bin")),
              ElementsAre(256, 'a', 'b', 'c'));
  EXPECT_EQ(dir_.Read("out.bin"), "earlier");
}

// Tokens of whole documents, whatever the threads and the pieces.
class CountingTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 1 << 24; }
  int32_t eot_id() const override { return 0; }
  std::string name() const override { return "runs"; }
  // The lengths of runs of equal characters.
  bool EncodePart(absl::string_view text, size_t size, bool /*continues*/,
                  std::vector<int32_t>* ids) const override {
    for (size_t i = 0; i < size;) {
      const size_t end =
          std::min(text.find_first_not_of(text[i], i), text.size());
      if (end > size) return false;
      ids->push_back(static_cast<int32_t>(end - i));
      i = end;
    }
    return true;
  }
  std::string TokenBytes(int32_t /*id*/) const override { return ""; }
};

TEST_F(TokenizeTest, ATokenThatGoesOnBehindAPieceIsNotCut) {
  std::string text;
  std::mt19937 random(12);
  while (text.size() < (3 << 20)) {
    text += std::string(1 + random() % 5, 'a' + random() % 26);
    text += std::string(random() % 1000 == 0 ? random() % 900000 : 1, '\n');
  }
  dir_.Write("a.txt", text);
  dir_.Write("b.txt", std::string(1500000, '\n'));
  CountingTokenizer tokenizer;
  std::vector<int32_t> whole = {0};
  tokenizer.EncodePart(text, text.size(), false, &whole);
  whole.insert(whole.end(), {0, 1500000});
  for (const int threads : {1, 3}) {
    EXPECT_EQ(
        TokenizeInMemory({dir_.File("*.txt")}, tokenizer, threads).value(),
        whole);
  }
}

TEST_F(TokenizeTest, ProgressEndsWithAllOfTheText) {
  dir_.Write("a.txt", Lines(3 << 20));
  TokenizeOptions options = Options();
  std::vector<int64_t> done;
  options.progress = [&](int64_t bytes, int64_t total) {
    EXPECT_EQ(total, static_cast<int64_t>(dir_.Read("a.txt").size()));
    done.push_back(bytes);
  };
  const TokenizeStats stats = TokenizeFiles(options).value();
  EXPECT_GE(done.size(), 2u);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), stats.text_bytes);
}

TEST_F(TokenizeTest, TheValidationPartBeginsBehindALineBreak) {
  dir_.Write("a.txt", "0123\n5678\nabcd\nefgh\n");
  TokenizeOptions options = Options();
  options.validation_fraction = 0.4;  // border at byte 12, in "abcd"
  const TokenizeStats stats = TokenizeFiles(options).value();
  ASSERT_EQ(stats.outputs.size(), 2u);
  EXPECT_EQ(stats.outputs[0].num_tokens, 16);
  EXPECT_EQ(stats.outputs[1].path, dir_.File("out_val.bin"));
  EXPECT_THAT(ReadTokens(dir_.File("out_val.bin")),
              ElementsAre(256, 'e', 'f', 'g', 'h', '\n'));
}

TEST_F(TokenizeTest, TextLongerThanAPieceIsEncodedWhole) {
  const std::string text = Lines((3 << 20) + 12345);
  dir_.Write("a.txt", text);
  ASSERT_TRUE(TokenizeFiles(Options()).ok());
  const std::vector<int32_t> tokens = ReadTokens(dir_.File("out.bin"));
  ASSERT_EQ(tokens.size(), text.size() + 1);
  EXPECT_TRUE(std::equal(text.begin(), text.end(), tokens.begin() + 1));
}

TEST_F(TokenizeTest, SentencePieceTokensDecodeToTheText) {
  const std::string text = Lines((1 << 20) + 300000);
  dir_.Write("a.txt", text);
  ASSERT_TRUE(TrainSentencePiece({.inputs = {dir_.File("a.txt")},
                                  .model_prefix = dir_.File("m"),
                                  .vocab_size = 300,
                                  .max_input_bytes = 100000})
                  .ok());
  TokenizeOptions options = Options();
  options.tokenizer = dir_.File("m.model");
  const TokenizeStats stats = TokenizeFiles(options).value();
  EXPECT_EQ(stats.vocab_size, 300);
  const std::vector<int32_t> tokens = ReadTokens(dir_.File("out.bin"));
  EXPECT_EQ(OpenTokenizer(options.tokenizer).value()->Decode(tokens), text);
}

// SentencePiece's default normalizer turns line breaks into spaces.
TEST_F(TokenizeTest, ATokenizerThatChangesTheTextIsRefusedUnlessAllowed) {
  dir_.Write("a.txt", "the rank\nreduces\n");
  std::string lines, model;
  for (int i = 0; i < 100; ++i) lines += "the rank reduces the shard\n";
  dir_.Write("lines.txt", lines);
  ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(
                  {{"input", dir_.File("lines.txt")},
                   {"vocab_size", "30"},
                   {"hard_vocab_limit", "false"}},
                  nullptr, &model)
                  .ok());
  dir_.Write("lossy.model", model);
  TokenizeOptions options = Options();
  options.tokenizer = dir_.File("lossy.model");
  EXPECT_THAT(ErrorOf(options), HasSubstr("changes the text: \"Two  spaces,"));
  EXPECT_THAT(ErrorOf(options), HasSubstr("--allow-lossy"));
  options.allow_lossy = true;
  EXPECT_TRUE(TokenizeFiles(options).ok());
}

TEST_F(TokenizeTest, WrongOptionsAreNamed) {
  dir_.Write("a.txt", "ab");
  TokenizeOptions options = Options();
  options.output = dir_.File("out");
  EXPECT_THAT(ErrorOf(options), HasSubstr("must be a name that ends in .bin"));
  options = Options();
  options.tokens_per_shard = -1;
  EXPECT_THAT(ErrorOf(options), HasSubstr("-1 is negative"));
  options = Options();
  options.validation_fraction = 1;
  EXPECT_THAT(ErrorOf(options), HasSubstr("1 is not in [0, 1)"));
  options = Options();
  options.tokenizer = "words";
  EXPECT_THAT(ErrorOf(options), HasSubstr("'words' is not known"));
  options = Options();
  options.inputs = {dir_.File("*.text")};
  EXPECT_THAT(ErrorOf(options), HasSubstr("matches no file"));
  EXPECT_FALSE(PathExists(dir_.File("out.bin")));
}

TEST_F(TokenizeTest, AnEmptyOrBinaryInputIsAnErrorAndNothingIsWritten) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.txt", "");
  EXPECT_THAT(ErrorOf(Options()), HasSubstr("b.txt': the file is empty"));
  dir_.Write("b.txt", std::string("x\0y", 3));
  EXPECT_THAT(ErrorOf(Options()), HasSubstr("b.txt': not text"));
  dir_.Write("b.txt", "cd");
  TokenizeOptions options = Options();
  options.inputs = {dir_.Write("c.jsonl", "{\"text\": \"ab\"}\n")};
  EXPECT_THAT(ErrorOf(options), HasSubstr("c.jsonl': JSON lines"));
  EXPECT_EQ(dir_.Count(), 3);
}

TEST(TokenFileWriterTest, WideTokensRoundTrip) {
  TempDir dir;
  auto writer = TokenFileWriter::Create(dir.File("w.bin"), 4).value();
  const std::vector<int32_t> ids = {0, 128000, 0x7FFFFFFF};
  ASSERT_TRUE(writer->Append(ids.data(), 3).ok());
  EXPECT_FALSE(PathExists(dir.File("w.bin")));
  ASSERT_TRUE(writer->Commit().ok());
  EXPECT_EQ(ReadTokens(dir.File("w.bin")), ids);
}

}  // namespace
}  // namespace zero
