#include "engine/data/regex.h"

#include <limits>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "kernels/check.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace zero {
namespace {

constexpr size_t kJitStackBytes = size_t{1} << 20;

PCRE2_SPTR Units(absl::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

const pcre2_code* Code(const std::shared_ptr<const void>& code) {
  return static_cast<const pcre2_code*>(code.get());
}

// Writes the PCRE2 pattern that matches what Oniguruma (in the syntax of Ruby,
// as in the package `tokenizers`) matches with `pattern`.
class Translator {
 public:
  explicit Translator(absl::string_view pattern) : rest_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (!rest_.empty()) {
      switch (rest_[0]) {
        case '\\':
          ZERO_RETURN_IF_ERROR(Escape());
          break;
        case '[':
          ZERO_RETURN_IF_ERROR(Class());
          break;
        case '(':
          ZERO_RETURN_IF_ERROR(Group());
          break;
        case '{':
          ZERO_RETURN_IF_ERROR(Interval());
          break;
        case '^':
        case '$':
          return Refuse(1);
        default:
          Take(1);
      }
    }
    return std::move(out_);
  }

 private:
  void Take(size_t n) {
    absl::StrAppend(&out_, rest_.substr(0, n));
    rest_.remove_prefix(std::min(n, rest_.size()));
  }

  void Replace(size_t n, absl::string_view by) {
    absl::StrAppend(&out_, by);
    rest_.remove_prefix(n);
  }

  absl::Status Refuse(size_t n) const {
    return absl::UnimplementedError(
        absl::StrCat("'", rest_.substr(0, n),
                     "' in it is not supported, since PCRE2 and Hugging Face's "
                     "Oniguruma may differ there"));
  }

  absl::Status Escape() {
    const char next = rest_.size() > 1 ? rest_[1] : '\0';
    switch (next) {
      case 's':
        Replace(2, "\\p{White_Space}");
        return absl::OkStatus();
      case 'S':
        Replace(2, "\\P{White_Space}");
        return absl::OkStatus();
      case 'p':
      case 'P':
        return Property();
      case 'd':
      case 'D':
      case 'r':
      case 'n':
      case 't':
      case 'f':
        Take(2);
        return absl::OkStatus();
      case 'x':  // a code point; \xHH is a byte in Oniguruma
        if (!absl::StartsWith(rest_.substr(2), "{")) return Refuse(2);
        Take(std::min(rest_.find('}'), rest_.size() - 1) + 1);
        return absl::OkStatus();
      default:
        if (!absl::ascii_ispunct(next)) return Refuse(2);
        Take(2);
        return absl::OkStatus();
    }
  }

  // Names of one or two letters are general categories. Longer ones are
  // scripts here, where PCRE2 would take their extensions too.
  absl::Status Property() {
    const size_t end = rest_.find('}');
    if (rest_.substr(2, 1) != "{" || end == absl::string_view::npos) {
      return Refuse(3);
    }
    absl::string_view name = rest_.substr(3, end - 3);
    if (!absl::c_all_of(name, absl::ascii_isalpha)) return Refuse(end + 1);
    absl::StrAppend(&out_, rest_.substr(0, 3), name.size() > 2 ? "sc:" : "",
                    name, "}");
    rest_.remove_prefix(end + 1);
    return absl::OkStatus();
  }

  absl::Status Class() {
    Take(absl::StartsWith(rest_, "[^") ? 2 : 1);
    if (absl::StartsWith(rest_, "]")) return Refuse(1);
    while (!rest_.empty() && rest_[0] != ']') {
      if (rest_[0] == '[') return Refuse(1);  // a class in a class
      if (absl::StartsWith(rest_, "&&")) return Refuse(2);
      if (rest_[0] == '\\') {
        ZERO_RETURN_IF_ERROR(Escape());
      } else {
        Take(1);
      }
    }
    Take(1);
    return absl::OkStatus();
  }

  absl::Status Group() {
    if (!absl::StartsWith(rest_, "(?")) {
      Take(1);
      return absl::OkStatus();
    }
    for (const char* start : {"(?:", "(?i:", "(?=", "(?!", "(?>"}) {
      if (!absl::StartsWith(rest_, start)) continue;
      Take(absl::string_view(start).size());
      return absl::OkStatus();
    }
    return Refuse(
        4);  // for one, look-behind does not see text that was cut off
  }

  // {2}, {2,} or {2,4}. A following + or ? means something else.
  absl::Status Interval() {
    const size_t end = rest_.find('}');
    if (end == absl::string_view::npos) return Refuse(1);
    absl::string_view count = rest_.substr(1, end - 1);
    const bool begins = !count.empty() && absl::ascii_isdigit(count[0]);
    const bool is_count = absl::c_all_of(
        count, [](char c) { return absl::ascii_isdigit(c) || c == ','; });
    if (!begins || !is_count) return Refuse(end + 1);
    const absl::string_view next = rest_.substr(end + 1, 1);
    if (next == "+" || next == "?") return Refuse(end + 2);
    Take(end + 1);
    return absl::OkStatus();
  }

  absl::string_view rest_;
  std::string out_;
};

}  // namespace

struct RegexScratch::Parts {
  pcre2_match_data* data = pcre2_match_data_create(/*pairs=*/1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack =
      pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr);

  Parts() {
    ZERO_CHECK(data != nullptr && context != nullptr && stack != nullptr);
    pcre2_jit_stack_assign(context, nullptr, stack);
    // A long match is slow, not wrong.
    pcre2_set_match_limit(context, std::numeric_limits<uint32_t>::max());
    pcre2_set_depth_limit(context, std::numeric_limits<uint32_t>::max());
    pcre2_set_heap_limit(context, std::numeric_limits<uint32_t>::max());
  }
  ~Parts() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

RegexScratch::RegexScratch() : parts_(std::make_unique<Parts>()) {}
RegexScratch::~RegexScratch() = default;

absl::StatusOr<Regex> Regex::Compile(absl::string_view pattern,
                                     unsigned options) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  // `.` and (?!...) know one line break, as in Oniguruma.
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  pcre2_code* code = pcre2_compile(Units(pattern), pattern.size(), options,
                                   &error, &offset, context);
  pcre2_compile_context_free(context);
  if (code == nullptr) {
    char words[256] = "";
    pcre2_get_error_message(error, reinterpret_cast<PCRE2_UCHAR*>(words),
                            sizeof(words));
    return absl::InvalidArgumentError(
        absl::StrCat("it is not a regular expression: ", words));
  }
  // On an unknown CPU, PCRE2 interprets the pattern.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return Regex(std::shared_ptr<const void>(code, [](const void* it) {
    pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(it)));
  }));
}

absl::StatusOr<Regex> Regex::FromOniguruma(absl::string_view pattern) {
  ZERO_ASSIGN_OR_RETURN(const std::string translated,
                        Translator(pattern).Run());
  return Compile(translated, PCRE2_UTF | PCRE2_UCP);
}

Regex Regex::FromPcre(absl::string_view pattern) {
  auto regex = Compile(pattern, PCRE2_UTF | PCRE2_UCP);
  ZERO_CHECK(regex.ok()) << regex.status();
  return *std::move(regex);
}

Regex Regex::Literal(absl::string_view text) {
  auto regex = Compile(text, PCRE2_UTF | PCRE2_LITERAL);
  ZERO_CHECK(regex.ok()) << regex.status();
  return *std::move(regex);
}

bool Regex::Find(absl::string_view text, size_t from, RegexScratch* scratch,
                 Match* match) const {
  const RegexScratch::Parts& parts = *scratch->parts_;
  const auto find = [&](uint32_t options) {
    return pcre2_match(Code(code_), Units(text), text.size(), from,
                       PCRE2_NO_UTF_CHECK | options, parts.data, parts.context);
  };
  int result = find(0);
  // Without JIT the stack is the heap.
  if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = find(PCRE2_NO_JIT);
  if (result == PCRE2_ERROR_NOMATCH) return false;
  ZERO_CHECK_GE(result, 0);
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(parts.data);
  *match = {ends[0], ends[1]};
  return true;
}

}  // namespace zero
