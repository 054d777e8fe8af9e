#include <algorithm>
#include <cmath>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/nearest.h"
#include "engine/base/status.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

// ---- Reading values -------------------------------------------------------

std::string Shown(double bound) {
  return bound == std::floor(bound) && std::fabs(bound) < 1e15
             ? absl::StrCat(static_cast<int64_t>(bound))
             : JsonDouble(bound);
}

bool HasMin(const KeySpec& key) { return std::isfinite(key.min); }
bool HasMax(const KeySpec& key) { return std::isfinite(key.max); }

// "in [0, 3]", ">= 1", "> 0"; empty without limits.
std::string RangeText(const KeySpec& key) {
  if (HasMin(key) && HasMax(key)) {
    return absl::StrCat("in ", key.above_min ? "(" : "[", Shown(key.min), ", ",
                        Shown(key.max), key.below_max ? ")" : "]");
  }
  if (HasMin(key)) {
    return absl::StrCat(key.above_min ? "> " : ">= ", Shown(key.min));
  }
  return "";
}

bool InRange(const KeySpec& key, double value) {
  if (key.above_min ? value <= key.min : value < key.min) return false;
  return key.below_max ? value < key.max : value <= key.max;
}

template <typename... Parts>
absl::Status Wrong(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// "{"type": "AdamW"}": a section with its first key, which has the value that
// was given instead of the section, or else its default.
std::string Example(const KeySpec& section, const JsonNode& node) {
  for (const KeySpec& key : AllKeys()) {
    if (key.section() != section.path || key.get == nullptr) continue;
    const auto given = ReadValue(key, node);
    if (!given.ok() && key.may_be_unset) break;
    return absl::StrCat("{", JsonQuote(key.name()), ": ",
                        ValueText(given.ok() ? *given : key.get(Config())),
                        "}");
  }
  return "{ ... }";
}

// Starts with "; ", or is empty.
std::string DidYouMean(const std::string& choice) {
  return choice.empty()
             ? ""
             : absl::StrCat("; did you mean ", JsonQuote(choice), "?");
}

// The choice, "on" or "off", that true or false stands for; empty: `key` has
// none.
std::string OnOrOff(const KeySpec& key, const JsonNode& node) {
  const std::string word = JsonBrief(node);
  const bool on = word == "true" || word == "\"true\"";
  const bool off = word == "false" || word == "\"false\"";
  const std::string choice = on ? "on" : off ? "off" : "";
  return absl::c_linear_search(key.choices, choice) ? choice : "";
}

absl::Status WrongType(const KeySpec& key, const JsonNode& node) {
  const bool named = node.kind == JsonKind::kString ||
                     node.kind == JsonKind::kNumber ||
                     node.kind == JsonKind::kBool;
  const bool object =
      key.kind == KeyKind::kObject || key.kind == KeyKind::kOpaque;
  return Wrong(
      named ? absl::StrCat(JsonBrief(node), " is ") : "",
      JsonKindName(node.kind), ", want ",
      object ? absl::StrCat("an object: ", Example(key, node), ". ", key.doc)
             : Wanted(key),
      DidYouMean(OnOrOff(key, node)));
}

bool HasType(const KeySpec& key, const JsonNode& node) {
  // By KeyKind.
  constexpr JsonKind kWanted[] = {
      JsonKind::kBool,   JsonKind::kNumber, JsonKind::kNumber,
      JsonKind::kString, JsonKind::kString, JsonKind::kArray,
      JsonKind::kArray,  JsonKind::kArray,  JsonKind::kArray,
      JsonKind::kObject, JsonKind::kObject};
  static_assert(std::size(kWanted) ==
                static_cast<size_t>(KeyKind::kOpaque) + 1);
  return node.kind == kWanted[static_cast<size_t>(key.kind)] ||
         ((key.kind == KeyKind::kFiles || key.kind == KeyKind::kStrings) &&
          node.kind == JsonKind::kString);
}

absl::Status CheckNumber(const KeySpec& key, const JsonNode& node) {
  if (!InRange(key, node.number)) {
    return Wrong(JsonBrief(node), " is not ", RangeText(key));
  }
  // Kernels compute with it in fp32.
  const auto rounded = static_cast<double>(static_cast<float>(node.number));
  const bool fits = std::isfinite(rounded) &&
                    (rounded != 0 || node.number == 0) && InRange(key, rounded);
  const bool whole =
      key.kind == KeyKind::kInteger || key.kind == KeyKind::kIntegers;
  if (whole || fits) return absl::OkStatus();
  return Wrong(JsonBrief(node), " is ", JsonDouble(rounded), " in fp32, want ",
               Wanted(key));
}

absl::StatusOr<KeyValue> ReadInteger(const KeySpec& key, const JsonNode& node) {
  const double whole = std::floor(node.number);
  if (!node.is_integer && node.number != whole && !key.rounds_down) {
    return Wrong(node.text, " is not a whole number, want ", Wanted(key));
  }
  ZERO_RETURN_IF_ERROR(CheckNumber(key, node));
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (!node.is_integer && std::fabs(node.number) > kExact) {
    return Wrong(node.text.substr(0, 40), " does not fit in a 64-bit integer");
  }
  return node.is_integer ? node.integer : static_cast<int64_t>(whole);
}

// Older DeepSpeeds' names for our values.
std::string Today(const KeySpec& key, const std::string& choice) {
  const bool old = key.path == "communication_data_type" && choice == "bfp16";
  return old ? "bf16" : choice;
}

// Other programs' names for our values.
constexpr struct {
  const char *path, *theirs, *ours;
} kForeignChoices[] = {
    {"optimizer.type", "FusedAdam", "AdamW"},
    {"optimizer.type", "DeepSpeedCPUAdam", "AdamW"},
    {"optimizer.type", "CPUAdam", "AdamW"},
    {"optimizer.type", "adamw_torch", "AdamW"},
    {"optimizer.type", "adamw_torch_fused", "AdamW"},
    {"optimizer.type", "FusedLamb", "Lamb"},
    {"scheduler.type", "cosine", "WarmupCosineLR"},
    {"scheduler.type", "linear", "WarmupDecayLR"},
    {"scheduler.type", "constant", "WarmupLR"},
    {"scheduler.type", "constant_with_warmup", "WarmupLR"},
};

absl::StatusOr<KeyValue> ReadChoice(const KeySpec& key, const JsonNode& node) {
  std::vector<std::string> built;
  for (const std::string& choice : key.choices) {
    const std::string wanted = Today(key, node.text);
    if (choice == wanted ||
        (key.any_case && absl::EqualsIgnoreCase(choice, wanted))) {
      return choice;
    }
    if (!key.IsUnbuilt(choice)) built.push_back(choice);
  }
  std::string meant = OnOrOff(key, node);
  if (meant.empty()) {
    const auto near = NearestNames(node.text, key.choices, 1);
    if (!near.empty()) meant = near[0];
  }
  for (const auto& [path, theirs, ours] : kForeignChoices) {
    if (key.path == path && absl::EqualsIgnoreCase(theirs, node.text)) {
      meant = ours;
    }
  }
  return Wrong(JsonBrief(node), " is not one of ", absl::StrJoin(built, ", "),
               DidYouMean(meant));
}

absl::StatusOr<KeyValue> ReadStrings(const KeySpec& key, const JsonNode& node) {
  const bool one = node.kind == JsonKind::kString;
  if (one ? node.text.empty() : node.children.empty()) {
    return Wrong(one ? "empty" : "an empty list", ", want ", Wanted(key));
  }
  std::vector<std::string> files;
  if (one) files.push_back(node.text);
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kString || child.text.empty()) {
      return Wrong(JsonBrief(child), " in the list is not ",
                   key.kind == KeyKind::kFiles ? "a path" : "a string");
    }
    files.push_back(child.text);
  }
  return files;
}

absl::StatusOr<KeyValue> ReadNumbers(const KeySpec& key, const JsonNode& node) {
  if (node.children.size() != 2) {
    return Wrong("a list of ", node.children.size(), ", want ", Wanted(key));
  }
  std::vector<double> numbers;
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kNumber) return WrongType(key, child);
    ZERO_RETURN_IF_ERROR(CheckNumber(key, child));
    numbers.push_back(child.number);
  }
  return numbers;
}

absl::StatusOr<KeyValue> ReadIntegers(const KeySpec& key,
                                      const JsonNode& node) {
  if (node.children.empty()) return Wrong("an empty list, want ", Wanted(key));
  std::vector<int64_t> numbers;
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kNumber) return WrongType(key, child);
    ZERO_ASSIGN_OR_RETURN(const KeyValue number, ReadInteger(key, child));
    numbers.push_back(std::get<int64_t>(number));
  }
  return numbers;
}

std::string Text(bool v) { return v ? "true" : "false"; }
std::string Text(int64_t v) { return absl::StrCat(v); }
std::string Text(double v) { return JsonDouble(v); }
std::string Text(const std::string& v) { return JsonQuote(v); }
template <typename T>
std::string Text(const std::vector<T>& items) {
  const auto write = [](std::string* out, const T& item) {
    out->append(Text(item));
  };
  return absl::StrCat("[", absl::StrJoin(items, ", ", write), "]");
}

}  // namespace

absl::StatusOr<KeyValue> ReadValue(const KeySpec& key, const JsonNode& node) {
  if (!HasType(key, node)) return WrongType(key, node);
  switch (key.kind) {
    case KeyKind::kBool:
      return node.boolean;
    case KeyKind::kInteger:
      return ReadInteger(key, node);
    case KeyKind::kNumber:
      ZERO_RETURN_IF_ERROR(CheckNumber(key, node));
      return node.number;
    case KeyKind::kString:
      return node.text;
    case KeyKind::kChoice:
      return ReadChoice(key, node);
    case KeyKind::kFiles:
    case KeyKind::kStrings:
      return ReadStrings(key, node);
    case KeyKind::kNumbers:
      return ReadNumbers(key, node);
    case KeyKind::kIntegers:
      return ReadIntegers(key, node);
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      break;
  }
  return KeyValue();
}

bool IsHarmless(const KeySpec& key, const JsonNode& node) {
  if (node.kind == JsonKind::kNull) return true;  // DeepSpeed's word for off
  if (key.harmless.empty()) return false;
  double number = 0;
  switch (node.kind) {
    case JsonKind::kBool:
      return key.harmless == (node.boolean ? "true" : "false");
    case JsonKind::kNumber:
      return absl::SimpleAtod(key.harmless, &number) && node.number == number;
    case JsonKind::kObject: {
      const JsonNode* enabled = node.Find("enabled");
      return key.harmless == "disabled" &&
             (enabled == nullptr || enabled->text == "auto" ||
              (enabled->kind == JsonKind::kBool && !enabled->boolean));
    }
    default:
      return false;
  }
}

std::string ValueText(const KeyValue& value) {
  return std::visit([](const auto& v) { return Text(v); }, value);
}

std::string Wanted(const KeySpec& key) {
  if (key.kind == KeyKind::kChoice) {
    return absl::StrCat("one of \"", absl::StrJoin(key.choices, "\", \""),
                        "\"");
  }
  constexpr const char* kNouns[] = {"true or false",
                                    "a whole number",
                                    "a number",
                                    "a string",
                                    "",
                                    "a path, a glob or a list of them",
                                    "a string or a list of them",
                                    "a list of two numbers",
                                    "a list of whole numbers",
                                    "an object: { ... }",
                                    "an object: { ... }"};
  static_assert(std::size(kNouns) == static_cast<size_t>(KeyKind::kOpaque) + 1);
  const std::string range = RangeText(key);
  return absl::StrCat(kNouns[static_cast<size_t>(key.kind)],
                      range.empty() ? "" : " ", range);
}

}  // namespace zero
