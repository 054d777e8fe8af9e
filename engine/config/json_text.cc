#include "engine/config/json_text.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/base/utf8.h"

namespace zero {
namespace {

// Deeper text is not a config, and recursion must not overflow the stack.
constexpr int kMaxDepth = 64;

bool IsWordChar(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '+' || c == '-';
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Parser {
 public:
  Parser(absl::string_view text, int source, std::vector<JsonProblem>* problems)
      : text_(text), problems_(problems) {
    here_.source = source;
    if (text_.substr(0, 3) == "\xEF\xBB\xBF") text_.remove_prefix(3);
  }

  bool Parse(JsonNode* root) {
    const size_t before = problems_->size();
    if (SkipBlanks()) {
      if (AtEnd()) {
        Fail("the text is empty, want an object: { ... }");
      } else if (ParseValue(root, 0) && SkipBlanks() && !AtEnd()) {
        Fail("there is ", Found(), " after the end of the value; delete it");
      }
    }
    return problems_->size() == before;
  }

 private:
  bool AtEnd() const { return pos_ >= text_.size(); }
  char Peek() const { return AtEnd() ? '\0' : text_[pos_]; }

  void Advance() {
    const unsigned char c = text_[pos_++];
    if (c == '\n') {
      ++here_.line;
      here_.column = 1;
    } else if ((c & 0xC0) != 0x80) {
      ++here_.column;
    }
  }

  template <typename... Parts>
  bool FailAt(const JsonPlace& place, const Parts&... parts) {
    problems_->push_back({place, path_, absl::StrCat(parts...)});
    return false;
  }
  template <typename... Parts>
  bool Fail(const Parts&... parts) {
    return FailAt(here_, parts...);
  }

  // The text at the cursor, for a message.
  std::string Found() const {
    if (AtEnd()) return "the end of the text";
    const char c = text_[pos_];
    if (!IsWordChar(c)) {
      if (c == '\'') return "a '";
      const int n = Utf8Length(text_.substr(pos_));
      if (n <= 0 || static_cast<unsigned char>(c) < 0x20) {
        return absl::StrCat("the byte ", static_cast<unsigned char>(c));
      }
      return absl::StrCat("'", text_.substr(pos_, static_cast<size_t>(n)), "'");
    }
    return absl::StrCat("'", Word().substr(0, 40), "'");
  }

  absl::string_view Word() const {
    size_t end = pos_;
    while (end < text_.size() && IsWordChar(text_[end])) ++end;
    return text_.substr(pos_, end - pos_);
  }

  bool SkipBlanks() {
    while (!AtEnd()) {
      const char c = Peek();
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        Advance();
      } else if (text_.substr(pos_, 2) == "//") {
        while (!AtEnd() && Peek() != '\n') Advance();
      } else if (text_.substr(pos_, 2) == "/*") {
        const JsonPlace start = here_;
        const size_t end = text_.find("*/", pos_ + 2);
        if (end == absl::string_view::npos) {
          return FailAt(start, "this comment is never closed; want */");
        }
        while (pos_ < end + 2) Advance();
      } else {
        break;
      }
    }
    return true;
  }

  bool ParseValue(JsonNode* node, int depth) {
    node->place = here_;
    if (depth > kMaxDepth) {
      return Fail("nested deeper than ", kMaxDepth, " levels");
    }
    switch (Peek()) {
      case '{':
      case '[':
        return ParseContainer(node, depth);
      case '"':
        node->kind = JsonKind::kString;
        return ParseString(&node->text);
      case '\'':
        return Fail("strings need double quotes: \"...\"");
      default:
        return ParseWord(node);
    }
  }

  bool ParseContainer(JsonNode* node, int depth) {
    const bool is_object = Peek() == '{';
    node->kind = is_object ? JsonKind::kObject : JsonKind::kArray;
    const char close = is_object ? '}' : ']';
    const JsonPlace open = here_;
    Advance();
    while (true) {
      if (!SkipBlanks()) return false;
      if (Peek() == close && !AtEnd()) {
        if (node->children.empty()) break;
        return FailAt(comma_, "a comma before ", absl::string_view(&close, 1),
                      "; delete it");
      }
      if (AtEnd()) return FailTruncated(close, open);
      JsonNode child;
      const size_t path_size = path_.size();
      if (is_object) {
        if (!ParseKey(open, &child)) return false;
        absl::StrAppend(&path_, path_.empty() ? "" : ".", child.key);
      } else {
        absl::StrAppend(&path_, "[", node->children.size(), "]");
      }
      if (!ParseValue(&child, depth + 1)) return false;
      const JsonNode* const first = node->Find(child.key);
      if (first != nullptr) {
        FailAt(child.key_place, "given twice, first in line ",
               first->key_place.line, "; delete one");
      } else {
        node->children.push_back(std::move(child));
      }
      path_.resize(path_size);
      if (!ParseSeparator(close, open)) return false;
      if (closed_) return true;
    }
    Advance();
    return true;
  }

  bool ParseKey(const JsonPlace& open, JsonNode* child) {
    child->key_place = here_;
    if (Peek() != '"') {
      if (Peek() == '\'' || IsWordChar(Peek())) {
        return Fail("found ", Found(),
                    ", want a key in double quotes: \"...\"");
      }
      return Fail("found ", Found(), ", want a key or }");
    }
    if (!ParseString(&child->key) || !SkipBlanks()) return false;
    if (AtEnd()) return FailTruncated('}', open);
    if (Peek() != ':') {
      return Fail("found ", Found(), " after the key \"", child->key,
                  "\", want a colon");
    }
    Advance();
    if (!SkipBlanks()) return false;
    if (AtEnd()) return FailTruncated('}', open);
    return true;
  }

  // After a value: a comma, or the bracket that closes (sets closed_).
  bool ParseSeparator(char close, const JsonPlace& open) {
    closed_ = false;
    if (!SkipBlanks()) return false;
    if (AtEnd()) return FailTruncated(close, open);
    if (Peek() == ',') {
      comma_ = here_;
      Advance();
      return true;
    }
    if (Peek() != close) {
      return Fail("found ", Found(), " after a value, want , or ",
                  absl::string_view(&close, 1));
    }
    Advance();
    closed_ = true;
    return true;
  }

  bool FailTruncated(char close, const JsonPlace& open) {
    return Fail(absl::StrCat(
        "the text ends inside the ", close == '}' ? "object" : "array",
        " that was opened at ", open.line, ":", open.column,
        "; want a closing ", absl::string_view(&close, 1)));
  }

  bool ParseString(std::string* out) {
    const JsonPlace start = here_;
    Advance();
    while (true) {
      if (AtEnd() || Peek() == '\n') {
        return FailAt(start, "this string is never closed; want a \"");
      }
      const unsigned char c = Peek();
      if (c == '"') break;
      if (c == '\\') {
        if (!ParseEscape(out)) return false;
        continue;
      }
      const int n = Utf8Length(text_.substr(pos_));
      if (n <= 0) return Fail("this byte is not UTF-8");
      if (c < 0x20) {
        return Fail("control character ", c, " in a string; write \\u00",
                    absl::Hex(c, absl::kZeroPad2));
      }
      for (int i = 0; i < n; ++i) {
        out->push_back(Peek());
        Advance();
      }
    }
    Advance();
    return true;
  }

  bool ParseEscape(std::string* out) {
    // "\n", "\u00e9", or a surrogate pair.
    for (const size_t size : {2, 6, 12}) {
      const auto one = nlohmann::json::parse(
          absl::StrCat("\"", text_.substr(pos_, size), "\""), nullptr,
          /*allow_exceptions=*/false);
      if (one.is_discarded()) continue;
      out->append(one.get_ref<const std::string&>());
      for (size_t i = 0; i < size; ++i) Advance();
      return true;
    }
    const absl::string_view start = text_.substr(pos_, 6);
    const bool is_half =
        start.size() == 6 && start[1] == 'u' &&
        std::all_of(start.begin() + 2, start.end(), absl::ascii_isxdigit);
    return Fail(is_half ? "half of a surrogate pair"
                        : "not an escape; want \\\" \\\\ \\/ \\b \\f \\n "
                          "\\r \\t or \\uXXXX");
  }

  // The replacement for a word of other languages.
  static const char* Remedy(absl::string_view word) {
    if (word == "True") return "; JSON writes true";
    if (word == "False") return "; JSON writes false";
    if (word == "None") return "; JSON writes null";
    constexpr absl::string_view kNotFinite[] = {"NaN", "nan",  "Infinity",
                                                "inf", "+inf", "+Infinity"};
    const bool finite = std::find(std::begin(kNotFinite), std::end(kNotFinite),
                                  word) == std::end(kNotFinite);
    return finite ? ", want a value" : "; numbers must be finite";
  }

  bool ParseWord(JsonNode* node) {
    const absl::string_view word = Word();
    if (word == "true" || word == "false") {
      node->kind = JsonKind::kBool;
      node->boolean = word == "true";
    } else if (word == "null") {
      node->kind = JsonKind::kNull;
    } else if (!word.empty() && (IsDigit(word[0]) || word[0] == '-')) {
      if (!ParseNumber(word, node)) return false;
    } else {
      return Fail("found ", Found(), Remedy(word));
    }
    for (size_t i = 0; i < word.size(); ++i) Advance();
    return true;
  }

  bool ParseNumber(absl::string_view word, JsonNode* node) {
    const char* end = word.data() + word.size();
    const auto real = std::from_chars(word.data(), end, node->number);
    if (real.ec == std::errc::result_out_of_range) {
      return Fail(word.substr(0, 40), " does not fit in a 64-bit float");
    }
    if (!nlohmann::json::accept(word)) {
      return Fail("'", word.substr(0, 40), "' is not a JSON number");
    }
    node->kind = JsonKind::kNumber;
    node->text = std::string(word);
    const auto whole = std::from_chars(word.data(), end, node->integer);
    node->is_integer = whole.ec == std::errc() && whole.ptr == end;
    return true;
  }

  absl::string_view text_;
  std::vector<JsonProblem>* problems_;
  size_t pos_ = 0;
  JsonPlace here_;
  JsonPlace comma_;      // of the last comma
  bool closed_ = false;  // by the last ParseSeparator
  std::string path_;
};

}  // namespace

const char* JsonKindName(JsonKind kind) {
  constexpr const char* kNames[] = {"null",     "a boolean", "a number",
                                    "a string", "an array",  "an object"};
  static_assert(std::size(kNames) ==
                static_cast<size_t>(JsonKind::kObject) + 1);
  return kNames[static_cast<size_t>(kind)];
}

const JsonNode* JsonNode::Find(absl::string_view name) const {
  if (kind != JsonKind::kObject) return nullptr;
  for (const JsonNode& child : children) {
    if (child.key == name) return &child;
  }
  return nullptr;
}

bool ParseJsonText(absl::string_view text, int source, JsonNode* root,
                   std::vector<JsonProblem>* problems) {
  return Parser(text, source, problems).Parse(root);
}

std::string JsonQuote(absl::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/false,
                                   nlohmann::json::error_handler_t::replace);
}

std::string JsonDouble(double value) { return nlohmann::json(value).dump(); }

std::string JsonBrief(const JsonNode& node) {
  switch (node.kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return node.boolean ? "true" : "false";
    case JsonKind::kNumber:
      return node.text;
    case JsonKind::kString: {
      const std::string quoted = JsonQuote(node.text);
      if (quoted.size() <= 40) return quoted;
      size_t cut = 36;
      while (cut > 0 && (quoted[cut] & 0xC0) == 0x80) --cut;
      return quoted.substr(0, cut) + "...\"";
    }
    case JsonKind::kArray:
      return node.children.empty() ? "[]" : "[...]";
    case JsonKind::kObject:
      return node.children.empty() ? "{}" : "{...}";
  }
  return "?";
}

}  // namespace zero
