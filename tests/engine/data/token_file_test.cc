#include "engine/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Bytes(const void* data, size_t n) {
  return std::string(static_cast<const char*>(data), n);
}

template <typename T>
std::string Tokens(const std::vector<T>& tokens) {
  return Bytes(tokens.data(), tokens.size() * sizeof(T));
}

std::string Header(int32_t magic, int32_t version, int32_t count) {
  std::vector<int32_t> header(kTokenHeaderInts, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return Tokens(header);
}

std::string LlmcU16(const std::vector<uint16_t>& tokens) {
  return Header(kTokenMagicU16, 1, static_cast<int32_t>(tokens.size())) +
         Tokens(tokens);
}

std::vector<int32_t> All(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.size()));
  source.Read(0, source.size(), tokens.data());
  return tokens;
}

class TokenFileTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<TokenSource>> Open(
      const std::string& name, TokenFormat format = TokenFormat::kAuto) {
    return TokenSource::Open({dir_.File(name)}, format);
  }

  // The error of opening a file of these bytes.
  absl::Status ErrorOf(const std::string& name, const std::string& contents,
                       TokenFormat format = TokenFormat::kAuto) {
    dir_.Write(name, contents);
    const absl::Status status = Open(name, format).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(dir_.File(name)));
    return status;
  }

  void ExpectError(const std::string& name, const std::string& contents,
                   const std::string& words,
                   TokenFormat format = TokenFormat::kAuto) {
    EXPECT_THAT(std::string(ErrorOf(name, contents, format).message()),
                HasSubstr(words));
  }

  TempDir dir_;
};

TEST_F(TokenFileTest, ReadsLlmcUint16) {
  dir_.Write("a.bin", LlmcU16({50256, 1, 65535}));
  const auto source = Open("a.bin").value();
  EXPECT_THAT(All(*source), ElementsAre(50256, 1, 65535));
  EXPECT_EQ(source->shards()[0].format, TokenFormat::kLlmc);
  EXPECT_FALSE(source->is_text());
}

TEST_F(TokenFileTest, ReadsLlmcUint32OfBothVersions) {
  for (const int32_t version : {1, 7}) {
    dir_.Write("a.bin", Header(kTokenMagicU32, version, 2) +
                            Tokens<uint32_t>({128000, 7}));
    EXPECT_THAT(All(*Open("a.bin").value()), ElementsAre(128000, 7));
  }
}

TEST_F(TokenFileTest, ReadsRawUint16) {
  dir_.Write("a.bin", Tokens<uint16_t>({5, 6, 50256}));
  const auto source = Open("a.bin").value();
  EXPECT_THAT(All(*source), ElementsAre(5, 6, 50256));
  EXPECT_EQ(source->shards()[0].format, TokenFormat::kRawU16);
}

TEST_F(TokenFileTest, ReadsTextAsBytes) {
  dir_.Write("a.txt", "h\xC3\xA9\n");
  const auto source = Open("a.txt").value();
  EXPECT_THAT(All(*source), ElementsAre('h', 0xC3, 0xA9, '\n'));
  EXPECT_TRUE(source->is_text());
}

TEST_F(TokenFileTest, AFormatCanBeForced) {
  dir_.Write("a.bin", "text in a .bin");
  EXPECT_EQ(Open("a.bin", TokenFormat::kText).value()->size(), 14);
  dir_.Write("b.dat", Tokens<uint16_t>({1, 2}));
  EXPECT_THAT(All(*Open("b.dat", TokenFormat::kRawU16).value()),
              ElementsAre(1, 2));
}

TEST_F(TokenFileTest, EndOfTextStandsBetweenTextFilesOnly) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.txt", "c");
  dir_.Write("c.txt", "d");
  const auto source = Open("*.txt").value();
  EXPECT_THAT(All(*source), ElementsAre('a', 'b', 256, 'c', 256, 'd'));
}

TEST_F(TokenFileTest, ShardsAreOneStreamInOrder) {
  dir_.Write("s_1.bin", LlmcU16({10, 11}));
  dir_.Write("s_0.bin", LlmcU16({1, 2, 3}));
  dir_.Write("s_2.bin", Tokens<uint16_t>({20}));
  EXPECT_THAT(All(*Open("s_*.bin").value()), ElementsAre(1, 2, 3, 10, 11, 20));
  const auto listed =
      TokenSource::Open({dir_.File("s_2.bin"), dir_.File("s_[01].bin")})
          .value();
  EXPECT_THAT(All(*listed), ElementsAre(20, 1, 2, 3, 10, 11));
}

TEST_F(TokenFileTest, EveryRangeAcrossShardsReadsTheSameTokens) {
  dir_.Write("a.txt", "abc");
  dir_.Write("b.txt", "d");
  dir_.Write("c.txt", "efgh");
  const auto source = Open("*.txt").value();
  const std::vector<int32_t> all = All(*source);
  for (int64_t begin = 0; begin <= source->size(); ++begin) {
    for (int64_t n = 0; begin + n <= source->size(); ++n) {
      std::vector<int32_t> part(static_cast<size_t>(n) + 1, -7);
      source->Read(begin, n, part.data());
      EXPECT_EQ(part.back(), -7);
      part.pop_back();
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + begin));
    }
  }
}

TEST_F(TokenFileTest, AnEmptyFileIsAnError) {
  ExpectError("a.txt", "", "empty");
  ExpectError("a.bin", "", "empty");
}

TEST_F(TokenFileTest, ATruncatedFileIsAnErrorWithBothSizes) {
  const std::string whole = LlmcU16({1, 2, 3, 4});
  ExpectError("a.bin", whole.substr(0, whole.size() - 2),
              "truncated: its header says 4 tokens = 1032 bytes, the file has "
              "1030");
  ExpectError("a.bin", whole.substr(0, 600), "truncated: 600 bytes");
  EXPECT_EQ(ErrorOf("a.bin", whole.substr(0, 1024)).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(TokenFileTest, BytesAfterTheTokensAreAnError) {
  ExpectError("a.bin", LlmcU16({1, 2}) + "xx", "too long");
}

TEST_F(TokenFileTest, AnOddByteCountIsAnError) {
  ExpectError("a.bin", "abc", "3 bytes is an odd number");
}

TEST_F(TokenFileTest, AWrongMagicIsAnErrorThatNamesTheOtherFile) {
  ExpectError("a.bin", Header(20240326, 3, 2) + "abcd",
              "wrong magic number 20240326: this is an llm.c model checkpoint");
  ExpectError("a.bin", Header(1234, 1, 2) + "abcd", "wrong magic number 1234",
              TokenFormat::kLlmc);
}

TEST_F(TokenFileTest, AWrongVersionOrCountIsAnError) {
  ExpectError("a.bin", Header(kTokenMagicU16, 2, 1) + "ab",
              "version 2 is not known");
  ExpectError("a.bin", Header(kTokenMagicU16, 1, 0), "says 0 tokens");
  ExpectError("a.bin", Header(kTokenMagicU16, 1, -5), "says -5 tokens");
}

TEST_F(TokenFileTest, BinaryFilesAreNotTakenForText) {
  ExpectError("a.txt", std::string("ab\0c", 4), "NUL byte at offset 2");
  ExpectError("a.txt.gz", "\x1f\x8b\x08xxxx", "gzip: gunzip it first");
  ExpectError("a.txt", "\xff\xfeh", "UTF-16");
}

TEST_F(TokenFileTest, AFolderIsAnErrorWithTheRemedy) {
  dir_.Write("data/a.bin", "ab");
  EXPECT_THAT(std::string(Open("data").status().message()),
              HasSubstr("is a folder; name its files, for example '" +
                        dir_.File("data/*") + "'"));
}

TEST_F(TokenFileTest, AnUnreadableFileIsAnError) {
  dir_.Write("a.txt", "x");
  ::chmod(dir_.File("a.txt").c_str(), 0);
  // Root may read everything, so become user nobody for a moment, who cannot
  // even search the folder: one more kind of unreadable.
  const uid_t user = ::geteuid();
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const absl::Status file = Open("a.txt").status();
  const absl::Status glob = Open("*.txt").status();
  ASSERT_EQ(::seteuid(user), 0);
  EXPECT_EQ(file.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(file.message()), HasSubstr("check owner"));
  EXPECT_EQ(glob.code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(TokenFileTest, AGlobThatMatchesNothingNamesTheNearestFiles) {
  dir_.Write("train_000.bin", "ab");
  dir_.Write("train_001.bin", "ab");
  const absl::Status status = Open("trian_*.bin").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("nearest names are: train_000.bin, train_001.bin"));
}

TEST_F(TokenFileTest, AMissingFileInAMissingFolderNamesTheNearestFolder) {
  dir_.Write("datasets/a.bin", "ab");
  EXPECT_THAT(std::string(Open("dataset/a.bin").status().message()),
              HasSubstr("nearest names are: datasets"));
}

TEST_F(TokenFileTest, WrongListsAreErrors) {
  EXPECT_THAT(std::string(TokenSource::Open({}).status().message()),
              HasSubstr("no data files"));
  EXPECT_THAT(std::string(TokenSource::Open({""}).status().message()),
              HasSubstr("file name is empty"));
  EXPECT_THAT(std::string(Open("**/x.txt").status().message()),
              HasSubstr("** is not supported"));
}

TEST_F(TokenFileTest, TextAndTokenFilesCannotBeMixed) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.bin", LlmcU16({1}));
  EXPECT_THAT(std::string(Open("*").status().message()),
              HasSubstr("cannot be mixed"));
}

TEST_F(TokenFileTest, TheFirstTokenOutsideTheVocabularyIsNamed) {
  std::vector<uint16_t> tokens(5 << 20, 3);
  tokens[3000001] = 50257;
  tokens[5000000] = 60000;
  dir_.Write("a_0.bin", LlmcU16({50256}));
  dir_.Write("a_1.bin", LlmcU16(tokens));
  const auto source = Open("a_*.bin").value();
  for (const int num_threads : {1, 2, 5}) {
    const absl::Status status = source->ValidateTokens(50257, num_threads);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a_1.bin': token 3000001 of 5242880 is id 50257, but "
                          "model.vocab_size is 50257"));
    EXPECT_TRUE(source->ValidateTokens(60001, num_threads).ok());
  }
}

TEST_F(TokenFileTest, AnIdAboveInt32IsOutsideEveryVocabulary) {
  dir_.Write("a.bin",
             Header(kTokenMagicU32, 1, 2) + Tokens<uint32_t>({1, 0x80000001u}));
  EXPECT_THAT(
      std::string(Open("a.bin").value()->ValidateTokens(1 << 30, 1).message()),
      HasSubstr("id 2147483649"));
}

TEST_F(TokenFileTest, TextNeedsRoomForItsBytesAndTheEndOfText) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.txt", "c\xff");
  EXPECT_TRUE(Open("*.txt").value()->ValidateTokens(257, 2).ok());
  EXPECT_THAT(
      std::string(Open("*.txt").value()->ValidateTokens(256, 2).message()),
      HasSubstr("no room for token 256"));
  EXPECT_TRUE(Open("a.txt").value()->ValidateTokens(128, 2).ok());
  EXPECT_FALSE(Open("b.txt").value()->ValidateTokens(128, 2).ok());
}

TEST_F(TokenFileTest, ContainsSeesTokensAndWhatStandsBetweenTexts) {
  dir_.Write("a.txt", "ab");
  dir_.Write("b.txt", "c");
  const auto texts = Open("*.txt").value();
  EXPECT_TRUE(texts->Contains('c'));
  EXPECT_FALSE(texts->Contains('d'));
  EXPECT_TRUE(texts->Contains(kByteEndOfText));
  EXPECT_FALSE(texts->View(0, 2)->Contains(kByteEndOfText));
  EXPECT_FALSE(Open("a.txt").value()->Contains(kByteEndOfText));
  // After more than is read at once.
  std::vector<uint16_t> tokens((1 << 20) + 3, 1);
  tokens.back() = 5;
  dir_.Write("c.bin", LlmcU16(tokens));
  EXPECT_TRUE(Open("c.bin").value()->Contains(5));
  EXPECT_FALSE(Open("c.bin").value()->View(0, 1 << 20)->Contains(5));
}

// Random bytes over a whole file, cut at random: opening gives a source whose
// every token can be read, or an error; never a crash.
TEST_F(TokenFileTest, TenThousandMutatedFilesDoNotCrash) {
  std::mt19937 random(1);
  const std::string whole = LlmcU16(std::vector<uint16_t>(300, 77));
  int num_opened = 0;
  for (int i = 0; i < 10000; ++i) {
    std::string mutated = whole;
    const int num_changes = static_cast<int>(random() % 4);
    for (int c = 0; c < num_changes; ++c) {
      // Mostly in what is read of the header.
      const size_t at =
          random() % 4 == 0 ? random() % mutated.size() : random() % 12;
      mutated[at] = static_cast<char>(random());
    }
    if (random() % 4 == 0) mutated.resize(random() % mutated.size());
    dir_.Write("m.bin", mutated);
    const auto format = static_cast<TokenFormat>(random() % 4);
    const auto source = Open("m.bin", format);
    if (!source.ok()) continue;
    ++num_opened;
    const std::vector<int32_t> tokens = All(**source);
    EXPECT_EQ((*source)->ValidateTokens(78, 1).ok(),
              std::all_of(tokens.begin(), tokens.end(),
                          [](int32_t t) { return 0 <= t && t < 78; }));
  }
  EXPECT_GT(num_opened, 1000);
  EXPECT_LT(num_opened, 9500);
}

TEST(TokenSourceTest, TokensInMemoryAreASourceLikeAnother) {
  const auto source = TokenSource::FromTokens("book.txt", {7, 300, 70000});
  EXPECT_EQ(source->size(), 3);
  EXPECT_FALSE(source->is_text());
  EXPECT_TRUE(source->Contains(70000));
  const auto view = source->View(1, 2);
  std::vector<int32_t> tokens(2);
  view->Read(0, 2, tokens.data());
  EXPECT_THAT(tokens, ElementsAre(300, 70000));
  EXPECT_TRUE(view->ValidateTokens(70001, 1).ok());
  EXPECT_THAT(std::string(view->ValidateTokens(70000, 1).message()),
              HasSubstr("'book.txt': token 2 of 3 is id 70000"));
}

}  // namespace
}  // namespace zero
