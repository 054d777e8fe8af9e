#include "engine/data/token_file.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

constexpr int64_t kSniffBytes = 4096;
constexpr int64_t kScanTokens = int64_t{1} << 20;

struct Signature {
  absl::string_view bytes;
  const char* what;
};

// Formats that users mistake for text.
constexpr Signature kBinarySignatures[] = {
    {"\x1f\x8b", "gzip: gunzip it first"},
    {"\x28\xb5\x2f\xfd", "zstd: unzstd it first"},
    {"\xfd\x37\x7a\x58\x5a", "xz: unxz it first"},
    {"BZh", "bzip2: bunzip2 it first"},
    {"PK\x03\x04", "a zip archive: unzip it first"},
    {"PAR1", "Parquet: export its text column first"},
    {"%PDF", "PDF: convert it with pdftotext first"},
    {"\x93NUMPY", "a NumPy array: save it with tofile() as .bin instead"},
    {"\xff\xfe", "UTF-16: convert it with iconv -f UTF-16 -t UTF-8 first"},
    {"\xfe\xff", "UTF-16: convert it with iconv -f UTF-16 -t UTF-8 first"},
};

// Other files of llm.c end in .bin too.
const char* LlmcSibling(int32_t magic) {
  switch (magic) {
    case 20240326:
      return "an llm.c model checkpoint";
    case 20240327:
      return "an llm.c debug state";
    case 20240328:
      return "an llm.c tokenizer";
    case 20240522:
      return "an llm.c multiple-choice evaluation set";
    default:
      return nullptr;
  }
}

int32_t LoadInt(const uint8_t* data, int index) {
  int32_t value;
  memcpy(&value, data + 4 * index, sizeof(value));
  return value;
}

template <typename... Parts>
absl::Status Wrong(const std::string& path, const Parts&... what) {
  return absl::InvalidArgumentError(absl::StrCat("'", path, "': ", what...));
}

absl::Status CheckNotEmpty(const std::string& path, int64_t size) {
  if (size > 0) return absl::OkStatus();
  return Wrong(path, "the file is empty; remove it from the data or fill it");
}

absl::Status CheckLooksLikeText(const std::string& path,
                                const MappedFile& file) {
  const absl::string_view head(reinterpret_cast<const char*>(file.data()),
                               std::min(file.size(), kSniffBytes));
  for (const Signature& signature : kBinarySignatures) {
    if (absl::StartsWith(head, signature.bytes)) {
      return Wrong(path, "not text, but ", signature.what);
    }
  }
  if (absl::EndsWith(path, ".jsonl")) {
    return Wrong(path,
                 "JSON lines: samples to train on as they are (data.train) and "
                 "not text; for text, write theirs to a file with jq -j "
                 "'.text + \"<|endoftext|>\"', and tokenize that with "
                 "--separator '<|endoftext|>'");
  }
  const size_t nul = head.find('\0');
  if (nul == absl::string_view::npos) return absl::OkStatus();
  return Wrong(path, "not text: it has a NUL byte at offset ", nul,
               "; token files end in .bin, or set data.format to "
               "llmc, raw_uint16 or text");
}

absl::Status ReadLlmcHeader(const std::string& path, const MappedFile& file,
                            TokenSource::Shard* shard) {
  if (file.size() < kTokenHeaderBytes) {
    return absl::DataLossError(
        absl::StrCat("'", path, "': truncated: ", file.size(),
                     " bytes, but the header of a "
                     "token file alone has ",
                     kTokenHeaderBytes, "; write it again"));
  }
  const int32_t magic = LoadInt(file.data(), 0);
  const int32_t version = LoadInt(file.data(), 1);
  const int64_t count = LoadInt(file.data(), 2);
  if (magic != kTokenMagicU16 && magic != kTokenMagicU32) {
    const char* sibling = LlmcSibling(magic);
    return Wrong(path, "wrong magic number ", magic,
                 sibling ? absl::StrCat(" (", sibling, ")") : "", "; expected ",
                 kTokenMagicU16, " (uint16 tokens) or ", kTokenMagicU32,
                 " (uint32 tokens)");
  }
  shard->bytes_per_token = magic == kTokenMagicU16 ? 2 : 4;
  const bool known = version == 1 || (magic == kTokenMagicU32 && version == 7);
  if (!known) {
    return Wrong(path, "token file version ", version,
                 " is not known; expected 1",
                 magic == kTokenMagicU32 ? " or 7" : "");
  }
  if (count <= 0) {
    return Wrong(path, "its header says ", count,
                 " tokens; expected at least 1");
  }
  const int64_t expected = kTokenHeaderBytes + count * shard->bytes_per_token;
  if (file.size() != expected) {
    return absl::DataLossError(absl::StrCat(
        "'", path, "': ", file.size() < expected ? "truncated" : "too long",
        ": its header says ", count, " tokens = ", expected,
        " bytes, the file has ", file.size(), "; copy or write it again"));
  }
  shard->tokens = file.data() + kTokenHeaderBytes;
  shard->num_tokens = count;
  return absl::OkStatus();
}

absl::Status ReadRaw(const std::string& path, const MappedFile& file,
                     TokenSource::Shard* shard) {
  if (file.size() % 2 != 0) {
    return absl::DataLossError(absl::StrCat(
        "'", path, "': ", file.size(),
        " bytes is an odd number; a raw .bin is "
        "uint16 tokens, so it is truncated or something else (text: set "
        "data.format to text)"));
  }
  shard->bytes_per_token = 2;
  shard->tokens = file.data();
  shard->num_tokens = file.size() / 2;
  return absl::OkStatus();
}

absl::StatusOr<TokenFormat> Detect(const std::string& path,
                                   const MappedFile& file) {
  const int32_t magic = file.size() >= 4 ? LoadInt(file.data(), 0) : 0;
  if (magic == kTokenMagicU16 || magic == kTokenMagicU32) {
    return TokenFormat::kLlmc;
  }
  if (!absl::EndsWith(path, ".bin")) return TokenFormat::kText;
  if (const char* sibling = LlmcSibling(magic)) {
    return Wrong(path, "wrong magic number ", magic, ": this is ", sibling,
                 ", not a token file (if it is raw "
                 "uint16, set data.format to raw_uint16)");
  }
  return TokenFormat::kRawU16;
}

// Fills `shard` except `begin`.
absl::Status OpenShard(const std::string& path, TokenFormat format,
                       MappedFile* file, TokenSource::Shard* shard) {
  ZERO_ASSIGN_OR_RETURN(*file, MappedFile::Open(path));
  ZERO_RETURN_IF_ERROR(CheckNotEmpty(path, file->size()));
  if (format == TokenFormat::kAuto) {
    ZERO_ASSIGN_OR_RETURN(format, Detect(path, *file));
    if (format == TokenFormat::kText) {
      ZERO_RETURN_IF_ERROR(CheckLooksLikeText(path, *file));
    }
  }
  shard->path = path;
  shard->format = format;
  if (format == TokenFormat::kLlmc) return ReadLlmcHeader(path, *file, shard);
  if (format == TokenFormat::kRawU16) return ReadRaw(path, *file, shard);
  shard->bytes_per_token = 1;
  shard->tokens = file->data();
  shard->num_tokens = file->size();
  return absl::OkStatus();
}

// Calls fn(load), where load(i) is token first + i as stored.
template <typename Fn>
auto OnTokens(const TokenSource::Shard& shard, int64_t first, const Fn& fn) {
  const uint8_t* tokens = shard.tokens + first * shard.bytes_per_token;
  const auto load = [tokens]<typename T>(int64_t i, T value) {
    memcpy(&value, tokens + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  };
  switch (shard.bytes_per_token) {
    case 1:
      return fn([=](int64_t i) { return load(i, uint8_t{}); });
    case 2:
      return fn([=](int64_t i) { return load(i, uint16_t{}); });
    default:
      return fn([=](int64_t i) { return load(i, uint32_t{}); });
  }
}

uint32_t MaxInShard(const TokenSource::Shard& shard, int64_t first, int64_t n) {
  return OnTokens(shard, first, [&](const auto& load) -> uint32_t {
    auto max = load(0);
    for (int64_t i = 1; i < n; ++i) max = std::max(max, load(i));
    return max;
  });
}

// The first block of kScanTokens tokens that has an id >= vocab_size; the
// number of blocks when there is none.
int64_t FirstBadBlock(const TokenSource::Shard& shard, int64_t vocab_size,
                      int num_threads) {
  const int64_t num_blocks = CeilDiv(shard.num_tokens, kScanTokens);
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> bad{num_blocks};
  auto scan = [&] {
    for (;;) {
      const int64_t block = next.fetch_add(1);
      // Blocks are assigned in order: all before the first bad one are read.
      if (block >= bad.load()) return;
      const int64_t first = block * kScanTokens;
      const int64_t n = std::min(kScanTokens, shard.num_tokens - first);
      if (MaxInShard(shard, first, n) < vocab_size) continue;
      int64_t known = bad.load();
      while (block < known && !bad.compare_exchange_weak(known, block)) {
      }
    }
  };
  std::vector<std::thread> helpers;
  const int64_t num_helpers = std::min<int64_t>(num_threads, num_blocks) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) helpers.emplace_back(scan);
  scan();
  for (std::thread& helper : helpers) helper.join();
  return bad.load();
}

absl::Status TokenTooLarge(const TokenSource::Shard& shard, int64_t block,
                           int64_t vocab_size) {
  int64_t index = block * kScanTokens;
  while (MaxInShard(shard, index, 1) < vocab_size) ++index;
  return absl::InvalidArgumentError(absl::StrCat(
      "'", shard.path, "': token ", index, " of ", shard.num_tokens, " is id ",
      MaxInShard(shard, index, 1), ", but model.vocab_size is ", vocab_size,
      "; the data belongs to another tokenizer (format read: ",
      TokenFormatName(shard.format),
      "): set model.vocab_size and data.tokenizer to what zero tokenize "
      "printed for it, or tokenize for this model"));
}

}  // namespace

absl::StatusOr<TextFiles> OpenTextFiles(
    const std::vector<std::string>& patterns) {
  ZERO_ASSIGN_OR_RETURN(const auto paths, ExpandPaths(patterns));
  TextFiles text;
  for (const std::string& path : paths) {
    ZERO_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    ZERO_RETURN_IF_ERROR(CheckNotEmpty(path, file.size()));
    ZERO_RETURN_IF_ERROR(CheckLooksLikeText(path, file));
    text.total_bytes += file.size();
    text.files.push_back(std::move(file));
  }
  return text;
}

absl::StatusOr<std::unique_ptr<TokenSource>> TokenSource::Open(
    const std::vector<std::string>& patterns, TokenFormat format) {
  ZERO_ASSIGN_OR_RETURN(const auto paths, ExpandPaths(patterns));
  std::unique_ptr<TokenSource> source(new TokenSource);
  for (const std::string& path : paths) {
    MappedFile file;
    Shard shard;
    ZERO_RETURN_IF_ERROR(OpenShard(path, format, &file, &shard));
    const bool is_text = shard.format == TokenFormat::kText;
    if (source->shards_.empty()) source->is_text_ = is_text;
    if (is_text != source->is_text_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", path, "' is read as ", TokenFormatName(shard.format), ", but '",
          source->shards_[0].path, "' as ",
          TokenFormatName(source->shards_[0].format),
          "; text and token files cannot be mixed, see zero tokenize"));
    }
    const bool separated = is_text && !source->shards_.empty();
    shard.begin = source->size_ + (separated ? 1 : 0);
    source->size_ = shard.begin + shard.num_tokens;
    source->files_.push_back(std::move(file));
    source->shards_.push_back(std::move(shard));
  }
  return source;
}

std::unique_ptr<TokenSource> TokenSource::FromTokens(
    const std::string& path, std::vector<int32_t> tokens) {
  ZERO_CHECK(!tokens.empty());
  std::unique_ptr<TokenSource> source(new TokenSource);
  source->size_ = static_cast<int64_t>(tokens.size());
  source->tokens_ =
      std::make_shared<const std::vector<int32_t>>(std::move(tokens));
  source->shards_.push_back(
      {.path = path,
       .format = TokenFormat::kText,
       .bytes_per_token = sizeof(int32_t),
       .num_tokens = source->size_,
       .tokens = reinterpret_cast<const uint8_t*>(source->tokens_->data())});
  return source;
}

std::unique_ptr<TokenSource> TokenSource::FromRows(const std::string& path,
                                                   PackedRows rows) {
  ZERO_CHECK_GE(rows.num_rows(), 1);
  std::unique_ptr<TokenSource> source(new TokenSource);
  source->rows_ = std::make_shared<const PackedRows>(std::move(rows));
  source->size_ = static_cast<int64_t>(source->rows_->tokens.size());
  source->shards_.push_back({.path = path,
                             .format = TokenFormat::kJsonLines,
                             .bytes_per_token = sizeof(int32_t),
                             .num_tokens = source->size_,
                             .tokens = reinterpret_cast<const uint8_t*>(
                                 source->rows_->tokens.data())});
  return source;
}

std::unique_ptr<TokenSource> TokenSource::View(int64_t begin, int64_t n) const {
  ZERO_CHECK(rows_ == nullptr);
  ZERO_CHECK_GE(begin, 0);
  ZERO_CHECK_GE(n, 0);
  ZERO_CHECK_LE(begin + n, size_);
  std::unique_ptr<TokenSource> view(new TokenSource(*this));
  view->view_begin_ = view_begin_ + begin;
  view->size_ = n;
  return view;
}

void TokenSource::Read(int64_t begin, int64_t n, int32_t* out) const {
  ZERO_CHECK_GE(begin, 0);
  ZERO_CHECK_GE(n, 0);
  ZERO_CHECK_LE(begin + n, size_);
  begin += view_begin_;
  auto shard = std::upper_bound(
      shards_.begin(), shards_.end(), begin,
      [](int64_t position, const Shard& s) { return position < s.begin; });
  if (shard != shards_.begin()) --shard;
  while (n > 0) {
    const int64_t first = begin - shard->begin;
    const int64_t take = std::min(n, shard->num_tokens - first);
    OnTokens(*shard, first, [&](const auto& load) {
      for (int64_t i = 0; i < take; ++i) {
        out[i] = static_cast<int32_t>(load(i));
      }
    });
    begin += take;
    out += take;
    n -= take;
    ++shard;
    // The end of text comes between two text files.
    if (n > 0 && shard->begin > begin) {
      *out++ = kByteEndOfText;
      ++begin;
      --n;
    }
  }
}

bool TokenSource::Contains(int32_t id) const {
  std::vector<int32_t> block(static_cast<size_t>(std::min(size_, kScanTokens)));
  for (int64_t begin = 0; begin < size_; begin += kScanTokens) {
    const int64_t n = std::min(kScanTokens, size_ - begin);
    Read(begin, n, block.data());
    const auto end = block.begin() + n;
    if (std::find(block.begin(), end, id) != end) return true;
  }
  return false;
}

absl::Status TokenSource::ValidateTokens(int64_t vocab_size,
                                         int num_threads) const {
  ZERO_CHECK_GE(vocab_size, 1);
  ZERO_CHECK_GE(num_threads, 1);
  if (is_text_ && vocab_size >= kByteVocabSize) return absl::OkStatus();
  if (is_text_ && shards_.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model.vocab_size ", vocab_size, " has no room for token ",
        kByteEndOfText, ", the end of text that separates the ", shards_.size(),
        " text files; set model.vocab_size to ", kByteVocabSize));
  }
  for (const Shard& shard : shards_) {
    const int64_t block = FirstBadBlock(shard, vocab_size, num_threads);
    if (block * kScanTokens < shard.num_tokens) {
      return TokenTooLarge(shard, block, vocab_size);
    }
  }
  return absl::OkStatus();
}

}  // namespace zero
