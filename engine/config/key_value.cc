#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/nearest.h"
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

// The reason why `node` is not what the key wants; always false.
bool WrongType(const KeySpec& key, const JsonNode& node, std::string* error) {
  const bool named = node.kind == JsonKind::kString ||
                     node.kind == JsonKind::kNumber ||
                     node.kind == JsonKind::kBool;
  *error = absl::StrCat(named ? absl::StrCat(JsonBrief(node), " is ") : "",
                        JsonKindName(node.kind), ", want ", Wanted(key));
  const bool object =
      key.kind == KeyKind::kObject || key.kind == KeyKind::kOpaque;
  if (object) absl::StrAppend(error, ". ", key.doc);
  return false;
}

bool HasType(const KeySpec& key, const JsonNode& node) {
  // Of each KeyKind.
  constexpr JsonKind kWanted[] = {
      JsonKind::kBool,   JsonKind::kNumber, JsonKind::kNumber,
      JsonKind::kString, JsonKind::kString, JsonKind::kArray,
      JsonKind::kArray,  JsonKind::kObject, JsonKind::kObject};
  static_assert(std::size(kWanted) ==
                static_cast<size_t>(KeyKind::kOpaque) + 1);
  return node.kind == kWanted[static_cast<size_t>(key.kind)] ||
         (key.kind == KeyKind::kFiles && node.kind == JsonKind::kString);
}

bool ReadNumber(const KeySpec& key, const JsonNode& node, std::string* error) {
  if (!InRange(key, node.number)) {
    *error = absl::StrCat(JsonBrief(node), " is not ", RangeText(key));
    return false;
  }
  // Kernels compute with it in fp32.
  const auto rounded = static_cast<double>(static_cast<float>(node.number));
  const bool fits = std::isfinite(rounded) &&
                    (rounded != 0 || node.number == 0) && InRange(key, rounded);
  if (key.kind == KeyKind::kInteger || fits) return true;
  *error = absl::StrCat(JsonBrief(node), " is ", JsonDouble(rounded),
                        " in fp32, want ", Wanted(key));
  return false;
}

bool ReadInteger(const KeySpec& key, const JsonNode& node, int64_t* value,
                 std::string* error) {
  if (!node.is_integer && node.number != std::floor(node.number)) {
    *error =
        absl::StrCat(node.text, " is not a whole number, want ", Wanted(key));
    return false;
  }
  if (!ReadNumber(key, node, error)) return false;
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (!node.is_integer && std::fabs(node.number) > kExact) {
    *error = absl::StrCat(node.text.substr(0, 40),
                          " does not fit in a 64-bit integer");
    return false;
  }
  *value = node.is_integer ? node.integer : static_cast<int64_t>(node.number);
  return true;
}

bool ReadChoice(const KeySpec& key, const JsonNode& node, std::string* value,
                std::string* error) {
  std::vector<std::string> built;
  for (const std::string& choice : key.choices) {
    if (choice == node.text ||
        (key.any_case && absl::EqualsIgnoreCase(choice, node.text))) {
      *value = choice;
      return true;
    }
    if (!key.IsUnbuilt(choice)) built.push_back(choice);
  }
  *error = absl::StrCat(JsonBrief(node), " is not one of ",
                        absl::StrJoin(built, ", "));
  const auto near = NearestNames(node.text, key.choices, 1);
  if (!near.empty()) {
    absl::StrAppend(error, "; did you mean ", JsonQuote(near[0]), "?");
  }
  return false;
}

bool ReadFiles(const KeySpec& key, const JsonNode& node,
               std::vector<std::string>* value, std::string* error) {
  const bool one = node.kind == JsonKind::kString;
  if (one ? node.text.empty() : node.children.empty()) {
    *error =
        absl::StrCat(one ? "empty" : "an empty list", ", want ", Wanted(key));
    return false;
  }
  if (one) value->push_back(node.text);
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kString || child.text.empty()) {
      *error = absl::StrCat(JsonBrief(child), " in the list is not a path");
      return false;
    }
    value->push_back(child.text);
  }
  return true;
}

bool ReadNumbers(const KeySpec& key, const JsonNode& node,
                 std::vector<double>* value, std::string* error) {
  if (node.children.size() != 2) {
    *error = absl::StrCat("a list of ", node.children.size(), ", want ",
                          Wanted(key));
    return false;
  }
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kNumber) return WrongType(key, child, error);
    if (!ReadNumber(key, child, error)) return false;
    value->push_back(child.number);
  }
  return true;
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

bool ReadValue(const KeySpec& key, const JsonNode& node, KeyValue* value,
               std::string* error) {
  if (!HasType(key, node)) return WrongType(key, node, error);
  switch (key.kind) {
    case KeyKind::kBool:
      *value = node.boolean;
      return true;
    case KeyKind::kInteger:
      return ReadInteger(key, node, &value->emplace<int64_t>(), error);
    case KeyKind::kNumber:
      *value = node.number;
      return ReadNumber(key, node, error);
    case KeyKind::kString:
      *value = node.text;
      return true;
    case KeyKind::kChoice:
      return ReadChoice(key, node, &value->emplace<std::string>(), error);
    case KeyKind::kFiles:
      return ReadFiles(key, node, &value->emplace<std::vector<std::string>>(),
                       error);
    case KeyKind::kNumbers:
      return ReadNumbers(key, node, &value->emplace<std::vector<double>>(),
                         error);
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      return true;
  }
  return false;
}

bool IsHarmless(const KeySpec& key, const JsonNode& node) {
  if (key.harmless.empty()) return false;
  double number = 0;
  switch (node.kind) {
    case JsonKind::kBool:
      return key.harmless == (node.boolean ? "true" : "false");
    case JsonKind::kNumber:
      return absl::SimpleAtod(key.harmless, &number) && node.number == number;
    case JsonKind::kObject: {
      const JsonNode* device = node.Find("device");
      if (key.harmless == "none") {
        return device == nullptr || device->text == "none";
      }
      const JsonNode* enabled = node.Find("enabled");
      return key.harmless == "disabled" &&
             (enabled == nullptr ||
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
                                    "a list of two numbers",
                                    "an object: { ... }",
                                    "an object: { ... }"};
  static_assert(std::size(kNouns) == static_cast<size_t>(KeyKind::kOpaque) + 1);
  const std::string range = RangeText(key);
  return absl::StrCat(kNouns[static_cast<size_t>(key.kind)],
                      range.empty() ? "" : " ", range);
}

}  // namespace zero
