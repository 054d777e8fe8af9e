#include "engine/data/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/base/utf8.h"
#include "engine/data/added_tokens.h"
#include "engine/data/bpe.h"
#include "engine/data/normalizer.h"
#include "engine/data/splitter.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::json;

// The pattern of the ByteLevel pre-tokenizer.
// Source: GPT-2's encoder.py (github.com/openai/gpt-2).
constexpr char kGpt2Pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
    "\\s+(?!\\S)|\\s+";

constexpr char kElsewhere[] =
    "; make token files with the package that this tokenizer comes from, and "
    "set data.tokenizer to \"none\"";
constexpr char kSentencePieceInstead[] =
    "; use the tokenizer.model (SentencePiece) of this model, if it has one";

constexpr int64_t kMaxId = (1 << 24) - 1;
constexpr int kMaxDepth = 16;  // of sequences in sequences

// A match reads at most this much after a cut.
constexpr size_t kLookAhead = 1024;

// ---- The bytes that a token's characters stand for --------------------------

// Code points of byte-level vocabularies: printable bytes are themselves, the
// others count from U+0100.
// Source: bytes_to_unicode() in GPT-2's encoder.py.
std::array<uint32_t, 256> ByteCharacters() {
  std::array<uint32_t, 256> characters;
  uint32_t next = 256;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b != 0xAD);
    characters[b] = printable ? b : next++;
  }
  return characters;
}

class ByteAlphabet {
 public:
  ByteAlphabet() {
    const auto characters = ByteCharacters();
    for (uint32_t b = 0; b < 256; ++b) {
      bytes_[characters[b]] = static_cast<char>(b);
      known_[characters[b]] = true;
    }
  }

  // The bytes of a token, or the token itself if one of its characters stands
  // for none. REQUIRES: valid UTF-8.
  std::string Bytes(absl::string_view token) const {
    std::string bytes;
    for (size_t i = 0; i < token.size(); ++i) {
      uint32_t code = static_cast<uint8_t>(token[i]);
      if (code >= 0x80) {
        const bool two = code < 0xE0 && i + 1 < token.size();
        code = two ? (code & 0x1F) << 6 | (token[++i] & 0x3F) : kEnd;
      }
      if (code >= kEnd || !known_[code]) return std::string(token);
      bytes += bytes_[code];
    }
    return bytes;
  }

 private:
  static constexpr uint32_t kEnd = 256 + 68;  // 68 bytes are not printable
  std::array<char, kEnd> bytes_ = {};
  std::array<bool, kEnd> known_ = {};
};

// ---- What the file says -----------------------------------------------------

struct Parts {
  std::vector<std::string> tokens;  // bytes by id
  std::vector<bool> exists;         // ids may have holes
  std::array<int32_t, 256> byte_ids;
  std::vector<Bpe::Merge> merges;
  bool ignore_merges = false;
  std::vector<AddedToken> added;
  std::vector<NormalForm> forms;
  std::vector<SplitStage> stages;
  std::vector<int32_t> prefix;  // ids that the template prepends
  int32_t eot = -1;
  std::map<std::string, std::string> files;  // as Tokenizer::Files
};

class Reader {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  absl::StatusOr<Parts> Read() {
    ZERO_ASSIGN_OR_RETURN(const Json root, ReadJson(path_));
    if (!root.is_object() || !Member(root, "model").is_object()) {
      return Wrong("", "has no model; it is not a tokenizer.json");
    }
    ZERO_RETURN_IF_ERROR(Model(Member(root, "model")));
    ZERO_RETURN_IF_ERROR(Added(Member(root, "added_tokens")));
    ZERO_RETURN_IF_ERROR(Normalizer(Member(root, "normalizer"), "normalizer"));
    ZERO_RETURN_IF_ERROR(
        PreTokenizer(Member(root, "pre_tokenizer"), "pre_tokenizer"));
    if (!byte_level_) {
      return Unknown("pre_tokenizer", "has no ByteLevel",
                     kSentencePieceInstead);
    }
    ZERO_RETURN_IF_ERROR(Bytes());
    ZERO_RETURN_IF_ERROR(Decoder(Member(root, "decoder")));
    ZERO_RETURN_IF_ERROR(
        PostProcessor(Member(root, "post_processor"), "post_processor"));
    ZERO_RETURN_IF_ERROR(EndOfText());
    ZERO_RETURN_IF_ERROR(Files());
    return std::move(parts_);
  }

 private:
  // ---- JSON

  static absl::StatusOr<Json> ReadJson(const std::string& path) {
    ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
    Json root;
    const absl::Status status = CatchExceptions([&] {
      root = Json::parse(text);
      return absl::OkStatus();
    });
    if (status.ok()) return root;
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is not JSON: ", status.message()));
  }

  template <typename... Words>
  absl::Status Wrong(const std::string& key, const Words&... words) const {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path_, "': ", key, key.empty() ? "" : " ", words...));
  }

  // The error for a setting that is valid but not supported.
  absl::Status Unknown(const std::string& key, absl::string_view what,
                       absl::string_view remedy = kElsewhere) const {
    return absl::UnimplementedError(absl::StrCat(
        "'", path_, "': ", key, " ", what,
        "; zero reads the byte-level BPE of GPT-2, Llama 3 and Qwen", remedy));
  }

  absl::Status UnknownType(const std::string& key, const Json& value) const {
    if (!value.is_object()) return Wrong(key, "is no object");
    return Unknown(key + ".type",
                   absl::StrCat("is \"", Text(value, "type"), "\""));
  }

  // The member of `object`, or null.
  static const Json& Member(const Json& object, const char* key) {
    static const Json& null = *new Json;
    if (!object.is_object()) return null;
    const auto it = object.find(key);
    return it == object.end() ? null : *it;
  }

  static std::string Text(const Json& object, const char* key) {
    const Json& value = Member(object, key);
    return value.is_string() ? value.get<std::string>() : "";
  }

  absl::Status Flag(const Json& object, const char* key,
                    const std::string& path, bool* flag) const {
    const Json& value = Member(object, key);
    if (value.is_null()) return absl::OkStatus();
    if (!value.is_boolean()) {
      return Wrong(absl::StrCat(path, ".", key), "is not true or false");
    }
    *flag = value.get<bool>();
    return absl::OkStatus();
  }

  // ---- The vocabulary and its merges

  absl::Status Model(const Json& model) {
    const std::string type = Text(model, "type");
    if (type == "Unigram") {
      return Unknown("model.type", "is \"Unigram\"", kSentencePieceInstead);
    }
    if (type != "BPE" && !(type.empty() && model.contains("merges"))) {
      return Unknown("model.type", absl::StrCat("is \"", type, "\""));
    }
    bool byte_fallback = false;
    ZERO_RETURN_IF_ERROR(Flag(model, "byte_fallback", "model", &byte_fallback));
    if (byte_fallback) {
      return Unknown("model.byte_fallback", "is true", kSentencePieceInstead);
    }
    for (const char* key :
         {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = Member(model, key);
      if (value.is_null() || value == "") continue;
      return Unknown(absl::StrCat("model.", key),
                     absl::StrCat("is ", value.dump()));
    }
    ZERO_RETURN_IF_ERROR(
        Flag(model, "ignore_merges", "model", &parts_.ignore_merges));
    ZERO_RETURN_IF_ERROR(Vocabulary(Member(model, "vocab")));
    return Merges(Member(model, "merges"));
  }

  absl::Status Vocabulary(const Json& vocab) {
    if (!vocab.is_object() || vocab.empty()) {
      return Wrong("model.vocab", "is not an object with tokens and their ids");
    }
    ids_.reserve(vocab.size());
    for (const auto& [token, id] : vocab.items()) {
      ZERO_RETURN_IF_ERROR(AddToken("model.vocab", token, id));
    }
    return absl::OkStatus();
  }

  absl::Status AddToken(const std::string& key, const std::string& token,
                        const Json& id) {
    const bool valid = id.is_number_unsigned() && id.get<uint64_t>() <= kMaxId;
    if (!valid) {
      return Wrong(key, "gives \"", token, "\" the id ", Dump(id),
                   "; want a whole number from 0 to ", kMaxId);
    }
    const size_t index = id.get<size_t>();
    if (index >= parts_.tokens.size()) {
      parts_.tokens.resize(index + 1);
      parts_.exists.resize(index + 1);
    }
    if (parts_.exists[index]) {
      return Wrong(key, "gives \"", token, "\" the id ", index,
                   ", which another token has");
    }
    parts_.exists[index] = true;
    parts_.tokens[index] = alphabet_.Bytes(token);
    ids_.emplace(token, static_cast<int32_t>(index));
    return absl::OkStatus();
  }

  static std::string Dump(const Json& value) {
    const std::string text =
        value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() <= 40 ? text : absl::StrCat(text.substr(0, 40), "...");
  }

  absl::Status Merges(const Json& merges) {
    if (!merges.is_array()) return Wrong("model.merges", "is no list");
    parts_.merges.reserve(merges.size());
    for (size_t i = 0; i < merges.size(); ++i) {
      const Json& merge = merges[i];
      std::string left, right;
      if (merge.is_string()) {
        const std::string& text = merge.get_ref<const std::string&>();
        const size_t space = text.find(' ');
        if (space != std::string::npos &&
            text.find(' ', space + 1) == std::string::npos) {
          left = text.substr(0, space);
          right = text.substr(space + 1);
        }
      } else if (merge.is_array() && merge.size() == 2 &&
                 merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      }
      const std::string key = absl::StrCat("model.merges[", i, "]");
      if (left.empty() || right.empty()) {
        return Wrong(key, "is ", Dump(merge), "; want two tokens");
      }
      std::array<int32_t, 3> ids;
      const std::string* const names[] = {&left, &right};
      const std::string both = left + right;
      for (size_t n = 0; n < 3; ++n) {
        const std::string& name = n < 2 ? *names[n] : both;
        const auto it = ids_.find(name);
        if (it == ids_.end()) {
          return Wrong(key, "is ", Dump(merge), ", but model.vocab has no \"",
                       name, "\"");
        }
        ids[n] = it->second;
      }
      parts_.merges.push_back({ids[0], ids[1], ids[2]});
    }
    return absl::OkStatus();
  }

  // The token of each byte that UTF-8 has.
  absl::Status Bytes() {
    parts_.byte_ids.fill(-1);
    for (const auto& [token, id] : ids_) {
      const std::string& bytes = parts_.tokens[id];
      const bool is_byte =
          bytes.size() == 1 && (token.size() == 2 || token == bytes);
      if (is_byte) parts_.byte_ids[static_cast<uint8_t>(bytes[0])] = id;
    }
    for (int b = 0; b < 0xF5; ++b) {
      if (parts_.byte_ids[b] >= 0 || b == 0xC0 || b == 0xC1) continue;
      return Unknown("model.vocab",
                     absl::StrCat("has no token for the byte ", b));
    }
    return absl::OkStatus();
  }

  // ---- The steps around them

  absl::Status Added(const Json& added) {
    if (added.is_null()) return absl::OkStatus();
    if (!added.is_array()) return Wrong("added_tokens", "is no list");
    for (size_t i = 0; i < added.size(); ++i) {
      const std::string key = absl::StrCat("added_tokens[", i, "]");
      const Json& from = added[i];
      if (!Member(from, "content").is_string()) {
        return Wrong(key + ".content", "is no text");
      }
      AddedToken token = {.content = Text(from, "content")};
      const std::pair<const char*, bool*> flags[] = {
          {"special", &token.special},
          {"single_word", &token.single_word},
          {"lstrip", &token.lstrip},
          {"rstrip", &token.rstrip},
          {"normalized", &token.normalized}};
      for (const auto& [name, flag] : flags) {
        ZERO_RETURN_IF_ERROR(Flag(from, name, key, flag));
      }
      const Json& id = Member(from, "id");
      const auto known = ids_.find(token.content);
      if (known == ids_.end()) {
        ZERO_RETURN_IF_ERROR(AddToken(key, token.content, id));
      } else if (id != known->second) {
        return Wrong(key, "gives \"", token.content, "\" the id ", Dump(id),
                     ", which has ", known->second, " already");
      }
      token.id = ids_.at(token.content);
      parts_.added.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  // Calls `read` for each part of a "Sequence", or for `value` itself.
  template <typename ReadFn>
  absl::Status Each(const Json& value, const std::string& key, const char* list,
                    const ReadFn& read) {
    if (Text(value, "type") != "Sequence") return read(value, key);
    const Json& parts = Member(value, list);
    if (!parts.is_array()) {
      return Wrong(absl::StrCat(key, ".", list), "is no list");
    }
    if (++depth_ > kMaxDepth) {
      return Wrong(key, "has sequences in sequences, ", kMaxDepth, " deep");
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      ZERO_RETURN_IF_ERROR(Each(
          parts[i], absl::StrCat(key, ".", list, "[", i, "]"), list, read));
    }
    --depth_;
    return absl::OkStatus();
  }

  absl::Status Normalizer(const Json& value, const std::string& key) {
    if (value.is_null()) return absl::OkStatus();
    return Each(value, key, "normalizers",
                [&](const Json& part, const std::string& at) -> absl::Status {
                  const auto* name =
                      absl::c_find(kNormalFormNames, Text(part, "type"));
                  if (name == std::end(kNormalFormNames)) {
                    return UnknownType(at, part);
                  }
                  parts_.forms.push_back(
                      static_cast<NormalForm>(name - kNormalFormNames));
                  return absl::OkStatus();
                });
  }

  absl::Status PreTokenizer(const Json& value, const std::string& key) {
    if (value.is_null()) return absl::OkStatus();
    return Each(value, key, "pretokenizers",
                [&](const Json& part, const std::string& at) -> absl::Status {
                  const std::string type = Text(part, "type");
                  if (byte_level_) {
                    return Unknown(at, "follows ByteLevel");
                  }
                  if (type == "ByteLevel") return ByteLevel(part, at);
                  if (type == "Split") return Split(part, at);
                  if (type == "Digits") return Digits(part, at);
                  return UnknownType(at, part);
                });
  }

  absl::Status ByteLevel(const Json& value, const std::string& key) {
    bool use_regex = true;
    SplitStage stage = {.add_prefix_space = true};
    ZERO_RETURN_IF_ERROR(Flag(value, "use_regex", key, &use_regex));
    ZERO_RETURN_IF_ERROR(
        Flag(value, "add_prefix_space", key, &stage.add_prefix_space));
    if (use_regex) {
      ZERO_ASSIGN_OR_RETURN(stage.regex, Regex::FromOniguruma(kGpt2Pattern));
    }
    byte_level_ = true;
    if (use_regex || stage.add_prefix_space) {
      parts_.stages.push_back(std::move(stage));
    }
    return absl::OkStatus();
  }

  absl::Status Split(const Json& value, const std::string& key) {
    SplitStage stage;
    const Json& pattern = Member(value, "pattern");
    const Json& regex = Member(pattern, "Regex");
    const Json& text = Member(pattern, "String");
    if (regex.is_string()) {
      auto compiled = Regex::FromOniguruma(regex.get_ref<const std::string&>());
      if (!compiled.ok()) {
        return absl::Status(
            compiled.status().code(),
            absl::StrCat("'", path_, "': ", key, ".pattern ", Dump(regex), ": ",
                         compiled.status().message(), kElsewhere));
      }
      stage.regex = *std::move(compiled);
    } else if (text.is_string() && text != "") {
      stage.regex = Regex::Literal(text.get_ref<const std::string&>());
    } else {
      return Wrong(key + ".pattern", "is ", Dump(pattern),
                   "; want a Regex or a String");
    }
    const auto* name =
        absl::c_find(kSplitBehaviorNames, Text(value, "behavior"));
    if (name == std::end(kSplitBehaviorNames)) {
      return Wrong(key + ".behavior", "is ", Dump(Member(value, "behavior")),
                   "; want one of ", absl::StrJoin(kSplitBehaviorNames, ", "));
    }
    stage.behavior = static_cast<SplitBehavior>(name - kSplitBehaviorNames);
    ZERO_RETURN_IF_ERROR(Flag(value, "invert", key, &stage.invert));
    parts_.stages.push_back(std::move(stage));
    return absl::OkStatus();
  }

  absl::Status Digits(const Json& value, const std::string& key) {
    bool individual = false;
    ZERO_RETURN_IF_ERROR(Flag(value, "individual_digits", key, &individual));
    SplitStage stage;
    stage.regex = Regex::FromPcre(individual ? "\\p{N}" : "\\p{N}+");
    parts_.stages.push_back(std::move(stage));
    return absl::OkStatus();
  }

  absl::Status Decoder(const Json& value) const {
    const bool known = value.is_null() || Text(value, "type") == "ByteLevel";
    return known ? absl::OkStatus() : UnknownType("decoder", value);
  }

  absl::Status PostProcessor(const Json& value, const std::string& key) {
    if (value.is_null()) return absl::OkStatus();
    return Each(value, key, "processors",
                [&](const Json& part, const std::string& at) -> absl::Status {
                  const std::string type = Text(part, "type");
                  if (type == "ByteLevel") return absl::OkStatus();
                  if (type == "TemplateProcessing") return Template(part, at);
                  return UnknownType(at, part);
                });
  }

  // The special tokens before the text; those after it would end a text that a
  // model should continue.
  absl::Status Template(const Json& value, const std::string& key) {
    const Json& single = Member(value, "single");
    if (!single.is_array()) return Wrong(key + ".single", "is no list");
    for (const Json& part : single) {
      if (!Member(part, "Sequence").is_null()) break;
      const std::string name = Text(Member(part, "SpecialToken"), "id");
      const auto id = ids_.find(name);
      if (id == ids_.end()) {
        return Wrong(key + ".single", "has ", Dump(part),
                     ", which is not a token of this file");
      }
      parts_.prefix.push_back(id->second);
    }
    return absl::OkStatus();
  }

  absl::Status EndOfText() {
    for (const char* name :
         {"tokenizer_config.json", "special_tokens_map.json"}) {
      const std::string file = absl::StrCat(FolderOf(path_), "/", name);
      if (!PathExists(file)) continue;
      ZERO_ASSIGN_OR_RETURN(const Json root, ReadJson(file));
      const Json& eos = Member(root, "eos_token");
      const std::string token =
          eos.is_string() ? eos.get<std::string>() : Text(eos, "content");
      if (token.empty()) continue;
      const auto id = ids_.find(token);
      if (id == ids_.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", file, "': eos_token is \"", token,
                         "\", which is not a token of ", path_));
      }
      parts_.eot = id->second;
      return absl::OkStatus();
    }
    for (const char* token : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
      const auto id = ids_.find(token);
      if (id == ids_.end()) continue;
      parts_.eot = id->second;
      return absl::OkStatus();
    }
    return Wrong("",
                 "does not say which token ends a text; write {\"eos_token\": "
                 "\"...\"} to tokenizer_config.json in its folder");
  }

  // The file and those that other programs need with it: without
  // tokenizer_config.json they would not know the end of text.
  absl::Status Files() {
    ZERO_ASSIGN_OR_RETURN(parts_.files["tokenizer.json"], ReadFile(path_));
    for (const char* name : {"tokenizer_config.json", "special_tokens_map.json",
                             "added_tokens.json", "chat_template.jinja"}) {
      const std::string file = absl::StrCat(FolderOf(path_), "/", name);
      if (!PathExists(file)) continue;
      ZERO_ASSIGN_OR_RETURN(parts_.files[name], ReadFile(file));
    }
    std::string& config = parts_.files["tokenizer_config.json"];
    if (!config.empty()) return absl::OkStatus();
    Json json = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false}};
    for (const auto& [token, id] : ids_) {
      if (id == parts_.eot) json["eos_token"] = token;
      if (!parts_.prefix.empty() && id == parts_.prefix[0]) {
        json["bos_token"] = token;
      }
    }
    config = json.dump(2) + "\n";
    return absl::OkStatus();
  }

  const std::string path_;
  const ByteAlphabet alphabet_;
  Parts parts_;
  absl::flat_hash_map<std::string, int32_t> ids_;  // as in the file
  bool byte_level_ = false;
  int depth_ = 0;
};

// ---- The tokenizer ----------------------------------------------------------

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const int length = Utf8Length(text);
    if (length <= 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

// The end of the look-ahead after a cut at `size`, never within a character.
size_t WindowEnd(absl::string_view text, size_t size) {
  if (text.size() - size <= kLookAhead) return text.size();
  size_t end = size + kLookAhead;
  while (end > size && (text[end] & 0xC0) == 0x80) --end;
  return end;
}

std::string WithReplacements(absl::string_view text) {
  std::string rest(text);
  std::string valid = TakeValidUtf8(&rest);
  if (!rest.empty()) valid += kReplacementCharacter;
  return valid;
}

class JsonTokenizer : public Tokenizer {
 public:
  JsonTokenizer(std::string path, Parts parts)
      : path_(std::move(path)),
        tokens_(std::move(parts.tokens)),
        exists_(std::move(parts.exists)),
        bpe_(parts.byte_ids, parts.merges,
             parts.ignore_merges ? Whole()
                                 : absl::flat_hash_map<std::string, int32_t>()),
        forms_(std::move(parts.forms)),
        splitter_(std::move(parts.stages)),
        prefix_(std::move(parts.prefix)),
        eot_(parts.eot),
        files_(std::move(parts.files)) {
    std::vector<AddedToken> raw, normalized;
    std::string buffer;
    for (AddedToken& token : parts.added) {
      if (token.special) tokens_[token.id].clear();
      if (token.normalized) {
        for (const NormalForm form : forms_) {
          token.content = std::string(Normalize(form, token.content, &buffer));
        }
      }
      (token.normalized ? normalized : raw).push_back(std::move(token));
    }
    tokens_[eot_].clear();
    raw_added_ = AddedTokens(std::move(raw));
    normalized_added_ = AddedTokens(std::move(normalized));
  }

  int64_t vocab_size() const override {
    return static_cast<int64_t>(tokens_.size());
  }
  int32_t eot_id() const override { return eot_; }
  std::string name() const override { return path_; }

  std::map<std::string, std::string> Files() const override { return files_; }

  std::vector<int32_t> DocumentStart() const override {
    std::vector<int32_t> ids = {eot_};
    const bool twice = !prefix_.empty() && prefix_[0] == eot_;
    ids.insert(ids.end(), prefix_.begin() + (twice ? 1 : 0), prefix_.end());
    return ids;
  }

  bool EncodePart(absl::string_view text, size_t size, bool continues,
                  std::vector<int32_t>* ids) const override {
    const auto scratch = TakeScratch();
    return EncodeText(text, size, continues, /*special_is_text=*/true,
                      scratch.get(), ids);
  }

  std::vector<int32_t> EncodePrompt(absl::string_view text) const override {
    std::vector<int32_t> ids = prefix_;
    const auto scratch = TakeScratch();
    EncodeText(text, text.size(), /*continues=*/false,
               /*special_is_text=*/false, scratch.get(), &ids);
    return ids;
  }

  std::string TokenBytes(int32_t id) const override {
    const bool known =
        id >= 0 && static_cast<size_t>(id) < tokens_.size() && exists_[id];
    return known ? tokens_[id] : kReplacementCharacter;
  }

 private:
  struct Scratch {
    RegexScratch regex;
    BpeScratch bpe;
    std::vector<AddedTokens::Segment> raw, normalized;
    std::string valid, form[2], joined;
  };
  // Returns the scratch to the pool, with its cached words.
  struct Return {
    const JsonTokenizer* tokenizer;
    void operator()(Scratch* scratch) const {
      const std::lock_guard<std::mutex> lock(tokenizer->mutex_);
      tokenizer->pool_.emplace_back(scratch);
    }
  };
  std::unique_ptr<Scratch, Return> TakeScratch() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pool_.empty()) pool_.push_back(std::make_unique<Scratch>());
    Scratch* scratch = pool_.back().release();
    pool_.pop_back();
    return {scratch, Return{this}};
  }

  absl::flat_hash_map<std::string, int32_t> Whole() const {
    absl::flat_hash_map<std::string, int32_t> whole;
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (exists_[id]) whole.emplace(tokens_[id], id);
    }
    return whole;
  }

  // Encodes text as EncodePart does.
  bool EncodeText(absl::string_view text, size_t size, bool continues,
                  bool special_is_text, Scratch* scratch,
                  std::vector<int32_t>* ids) const {
    text = text.substr(0, WindowEnd(text, size));
    if (!IsUtf8(text)) {
      scratch->valid = WithReplacements(text.substr(0, size));
      const size_t valid_size = scratch->valid.size();
      scratch->valid += WithReplacements(text.substr(size));
      text = scratch->valid;
      size = valid_size;
    }
    return EachSegment(
        raw_added_, text, size, special_is_text, scratch, &scratch->raw, ids,
        [&](absl::string_view run, size_t run_size, bool first) {
          if (!Normalized(&run, &run_size, scratch)) return false;
          return EachSegment(
              normalized_added_, run, run_size, special_is_text, scratch,
              &scratch->normalized, ids,
              [&](absl::string_view words, size_t words_size, bool second) {
                return splitter_.Split(
                    words, words_size, continues && first && second,
                    &scratch->regex, [&](absl::string_view word) {
                      bpe_.Encode(word, &scratch->bpe, ids);
                    });
              });
        });
  }

  // Appends the ids of added tokens and calls `run` for the text between them,
  // until it returns false or a token crosses `size`.
  template <typename RunFn>
  static bool EachSegment(const AddedTokens& tokens, absl::string_view text,
                          size_t size, bool special_is_text, Scratch* scratch,
                          std::vector<AddedTokens::Segment>* segments,
                          std::vector<int32_t>* ids, const RunFn& run) {
    tokens.Split(text, special_is_text, &scratch->regex, segments);
    for (const AddedTokens::Segment& segment : *segments) {
      if (segment.begin >= size) break;
      if (segment.id >= 0) {
        if (segment.end > size) return false;
        ids->push_back(segment.id);
        continue;
      }
      const size_t end = std::min(segment.end, size);
      if (!run(text.substr(segment.begin, segment.end - segment.begin),
               end - segment.begin, segment.begin == 0)) {
        return false;
      }
    }
    return true;
  }

  // Normalizes the text and what follows it. Returns false if they depend on
  // each other.
  bool Normalized(absl::string_view* text, size_t* size,
                  Scratch* scratch) const {
    if (forms_.empty()) return true;
    if (*size < text->size() && (*text)[*size - 1] != '\n') return false;
    for (const NormalForm form : forms_) {
      const absl::string_view head = text->substr(0, *size);
      const absl::string_view tail = text->substr(*size);
      const auto new_head = Normalize(form, head, &scratch->form[0]);
      const auto new_tail = Normalize(form, tail, &scratch->form[1]);
      if (new_head.data() == head.data() && new_tail.data() == tail.data()) {
        continue;
      }
      std::string joined = absl::StrCat(new_head, new_tail);
      *size = new_head.size();
      scratch->joined = std::move(joined);
      *text = scratch->joined;
    }
    return true;
  }

  const std::string path_;
  std::vector<std::string> tokens_;  // bytes by id; empty for special ones
  const std::vector<bool> exists_;
  const Bpe bpe_;
  const std::vector<NormalForm> forms_;
  const Splitter splitter_;
  const std::vector<int32_t> prefix_;
  const int32_t eot_;
  const std::map<std::string, std::string> files_;
  AddedTokens raw_added_, normalized_added_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> pool_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizerJson(
    const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(Parts parts, Reader(path).Read());
  return std::unique_ptr<Tokenizer>(
      std::make_unique<JsonTokenizer>(path, std::move(parts)));
}

}  // namespace zero
