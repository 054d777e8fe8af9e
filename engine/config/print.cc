#include "engine/config/print.h"

#include <fnmatch.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Sections as objects; a key that the run reads is a string: its JSON text.
Json Tree(const Config& config) {
  const Config defaults;
  Json tree = Json::object();
  for (const KeySpec& key : AllKeys()) {
    if (key.get == nullptr || !key.IsRead(config)) continue;
    const std::string text = ValueText(key.get(config));
    if (key.may_be_unset && text == ValueText(key.get(defaults))) continue;
    const std::string pointer = absl::StrReplaceAll(key.path, {{".", "/"}});
    tree[Json::json_pointer("/" + pointer)] = text;
  }
  return tree;
}

// `object`, whose keys begin with `prefix`, and each value's origin.
std::string Render(const Json& object, const std::string& prefix,
                   const std::string& indent,
                   const std::map<std::string, std::string>& origins) {
  std::string out = "{\n";
  for (auto member = object.begin(); member != object.end();) {
    const std::string path = prefix + member.key();
    // Another file's runs go elsewhere.
    const auto place = origins.find("training.out_dir");
    const bool follows_file = path == "training.out_dir" &&
                              place != origins.end() &&
                              absl::StartsWith(place->second, "derived");
    std::string line = absl::StrCat(
        indent, "  ", follows_file ? "// " : "", JsonQuote(member.key()), ": ",
        member->is_object()
            ? Render(*member, path + ".", indent + "  ", origins)
            : member->get<std::string>());
    if (++member != object.end()) line += ",";
    if (const auto origin = origins.find(path); origin != origins.end()) {
      line.append(line.size() < 46 ? 46 - line.size() : 2, ' ');
      // A file may have any name; a comment ends with its line.
      absl::StrAppend(&line, "// ",
                      absl::StrReplaceAll(origin->second, {{"\n", " "}}));
    }
    absl::StrAppend(&out, line, "\n");
  }
  return absl::StrCat(out, indent, "}");
}

// ---- Schema ---------------------------------------------------------------

void AddLimits(const KeySpec& key, Json* schema) {
  if (std::isfinite(key.min)) {
    (*schema)[key.above_min ? "exclusiveMinimum" : "minimum"] = key.min;
  }
  if (std::isfinite(key.max)) {
    (*schema)[key.below_max ? "exclusiveMaximum" : "maximum"] = key.max;
  }
}

Json ValueSchema(const KeySpec& key) {
  Json schema;
  switch (key.kind) {
    case KeyKind::kBool:
      return {{"type", "boolean"}};
    case KeyKind::kInteger:
    case KeyKind::kNumber:
      schema["type"] = key.kind == KeyKind::kInteger ? "integer" : "number";
      AddLimits(key, &schema);
      return schema;
    case KeyKind::kString:
      return {{"type", "string"}};
    case KeyKind::kChoice:
      for (const std::string& choice : key.choices) {
        if (!key.IsUnbuilt(choice)) schema["enum"].push_back(choice);
      }
      return schema;
    case KeyKind::kFiles:
    case KeyKind::kStrings:
      return {{"type", {"string", "array"}},
              {"items", {{"type", "string"}}},
              {"minItems", 1},
              {"minLength", 1}};
    case KeyKind::kNumbers:
      schema = {{"type", "array"}, {"minItems", 2}, {"maxItems", 2}};
      schema["items"]["type"] = "number";
      AddLimits(key, &schema["items"]);
      return schema;
    case KeyKind::kIntegers:
      schema = {{"type", "array"}, {"minItems", 1}};
      schema["items"]["type"] = "integer";
      AddLimits(key, &schema["items"]);
      return schema;
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      return {{"type", "object"}};
  }
  return schema;
}

// A default config of a family that has `key`.
Config WhereItApplies(const KeySpec& key) {
  Config config;
  for (const ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    config.model = FamilyDefaults(family);
    if (key.Applies(config)) break;
  }
  return config;
}

// The default of a key as text. It is empty for keys without one, such as a
// model's family and sizes.
std::string DefaultText(const KeySpec& key) {
  if (key.get == nullptr || !key.derived.empty() || key.may_be_unset) return "";
  const KeyValue value = key.get(WhereItApplies(key));
  const auto* count = std::get_if<int64_t>(&value);
  const bool is_set =
      count == nullptr || static_cast<double>(*count) >= key.min;
  return is_set && key.path != "model.model_type" ? ValueText(value) : "";
}

bool MayBeNull(const KeySpec& key) {
  return absl::StartsWith(key.path, "model.") ||
         (key.kind == KeyKind::kObject && key.may_be_unset);
}

// `doc` and the values that a refused key may still have.
Json RefusedSchema(const KeySpec& key, const std::string& doc) {
  Json schema = {{"description", doc}};
  const bool disabled = key.harmless == "disabled";
  if (key.harmless.empty()) {
    schema["const"] = "auto";
  } else if (disabled) {
    schema["type"] = "object";
    schema["properties"]["enabled"]["const"] = false;
  } else {
    schema["enum"] = {Json::parse(key.harmless), "auto"};
  }
  schema["deprecated"] = true;
  return schema;
}

Json LeafSchema(const KeySpec& key) {
  if (key.treatment == Treatment::kRefused) {
    return RefusedSchema(key,
                         absl::StrCat("Does not apply here: ", key.doc, "."));
  }
  if (key.treatment == Treatment::kNotBuilt) {
    return RefusedSchema(key, absl::StrCat("Not built yet: ", key.doc, "."));
  }
  const bool used = key.treatment == Treatment::kUsed;
  const bool old = key.treatment == Treatment::kOldName;
  Json schema;
  schema["description"] =
      old     ? absl::StrCat("Old name of ", key.doc, ".")
      : !used ? absl::StrCat("Accepted and ignored: ", key.doc, ".")
      : key.derived.empty() ? key.doc
                            : absl::StrCat(key.doc, " Default: ", key.derived);
  schema["anyOf"] = {ValueSchema(key), {{"const", "auto"}}};
  if (used && MayBeNull(key)) schema["anyOf"].push_back({{"type", "null"}});
  const std::string fallback = DefaultText(key);
  if (!fallback.empty()) schema["default"] = Json::parse(fallback);
  return schema;
}

void AddProperties(const std::string& parent, Json* schema) {
  (*schema)["additionalProperties"] = false;
  for (const KeySpec& key : AllKeys()) {
    if (key.section() != parent) continue;
    Json& child = (*schema)["properties"][key.name()];
    if (key.is_leaf()) {
      child = LeafSchema(key);
      continue;
    }
    child["description"] = key.doc;
    child["type"] = MayBeNull(key) ? Json{"object", "null"} : Json("object");
    AddProperties(key.path, &child);
  }
}

std::string KindText(const KeySpec& key) {
  if (key.treatment == Treatment::kNote) return "ignored";
  if (key.treatment == Treatment::kOldName) return "old name of";
  if (key.treatment == Treatment::kRefused) return "refused";
  if (key.treatment == Treatment::kNotBuilt) return "not built yet";
  return key.kind == KeyKind::kObject ? "section" : Wanted(key);
}

std::string Fallback(const KeySpec& key) {
  if (!key.derived.empty()) return key.derived;
  const std::string text = DefaultText(key);
  const bool needed = text.empty() && key.get != nullptr && !key.may_be_unset;
  return needed ? "none, but in a preset" : text;
}

// The text in lines of at most 80 columns, four of them empty.
std::string Indented(const std::string& text) {
  std::string out;
  size_t columns = 80;  // of the last line
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    const bool fits = columns + 1 + word.size() <= 80;
    absl::StrAppend(&out, fits ? " " : out.empty() ? "    " : "\n    ", word);
    columns = (fits ? columns + 1 : 4) + word.size();
  }
  return out + "\n";
}

// A key with its type, default and meaning.
std::string ReferenceText(const KeySpec& key) {
  std::string doc = key.doc;
  if (key.applies != nullptr) {
    absl::StrAppend(&doc, " Only with ", key.applies_to, ".");
  }
  const std::string fallback = Fallback(key);
  return absl::StrCat(
      key.path, "\n",
      Indented(absl::StrCat(KindText(key), fallback.empty() ? "" : "; default ",
                            fallback)),
      Indented(doc));
}

std::string Cell(const std::string& text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}});
}

}  // namespace

std::string PrintResolved(const LoadedConfig& loaded) {
  return Render(Tree(loaded.config), "", "", loaded.origins) + "\n";
}

std::string PrintResolvedJson(const Config& config) {
  return Render(Tree(config), "", "", {}) + "\n";
}

std::string PrintSchema() {
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                 {"title", "zero.cpp run"},
                 {"type", "object"}};
  AddProperties("", &schema);
  return schema.dump(2) + "\n";
}

absl::StatusOr<std::string> PrintKeyReference(absl::string_view pattern) {
  const std::vector<std::string> words =
      absl::StrSplit(pattern, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  const auto matches = [](const std::string& word, const std::string& text) {
    const std::string inside = absl::StrCat("*", word, "*");
    return fnmatch(inside.c_str(), text.c_str(), FNM_CASEFOLD) == 0;
  };
  std::string by_path, by_doc;
  for (const KeySpec& key : AllKeys()) {
    bool is_in_path = true, is_in_either = true;
    for (const std::string& word : words) {
      const bool path_has = matches(word, key.path);
      is_in_path &= path_has;
      is_in_either &= path_has || matches(word, key.doc);
    }
    if (is_in_either) (is_in_path ? by_path : by_doc) += ReferenceText(key);
  }
  if (!by_path.empty() || !by_doc.empty()) return by_path + by_doc;
  const std::string part = absl::AsciiStrToLower(pattern);
  const std::string near = NearestKey("", part.substr(part.rfind('.') + 1));
  const auto quote = [](std::string* out, const std::string& word) {
    *out += JsonQuote(word);
  };
  return absl::NotFoundError(absl::StrCat("no key's name or meaning contains ",
                                          absl::StrJoin(words, " and ", quote),
                                          near.empty() ? KnownKeys("") : near));
}

std::string PrintDifferences() {
  std::string out = "| key | here | DeepSpeed |\n|---|---|---|\n";
  for (const KeySpec& key : AllKeys()) {
    if (key.deepspeed.empty()) continue;
    absl::StrAppend(&out, "| `", key.path, "` | ", Cell(Fallback(key)), " | ",
                    Cell(key.deepspeed), " |\n");
  }
  return out;
}

}  // namespace zero
