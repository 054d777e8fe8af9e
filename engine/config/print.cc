#include "engine/config/print.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// A leaf ready to print: path, JSON text, comment.
struct PrintedLine {
  std::vector<std::string> names;
  std::string text;
  std::string comment;
};

std::vector<PrintedLine> Lines(
    const Config& config, const std::map<std::string, std::string>* origins) {
  const Config defaults;
  std::vector<PrintedLine> lines;
  for (const KeySpec& key : AllKeys()) {
    if (key.get == nullptr) continue;
    if (!key.IsRead(config)) continue;
    const std::string text = ValueText(key.get(config));
    if (key.may_be_unset && text == ValueText(key.get(defaults))) continue;
    PrintedLine line;
    line.names = absl::StrSplit(key.path, '.');
    line.text = text;
    if (origins != nullptr) {
      const auto it = origins->find(key.path);
      // A file may have any name; a comment ends with its line.
      if (it != origins->end()) {
        line.comment = absl::StrReplaceAll(it->second, {{"\n", " "}});
      }
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

// Number of objects that two paths share.
size_t Shared(const PrintedLine& a, const PrintedLine& b) {
  const size_t limit = std::min(a.names.size(), b.names.size()) - 1;
  size_t n = 0;
  while (n < limit && a.names[n] == b.names[n]) ++n;
  return n;
}

std::string Render(const std::vector<PrintedLine>& lines) {
  std::string out = "{\n";
  const auto indent = [](size_t depth) {
    return std::string(2 * (depth + 1), ' ');
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    const PrintedLine& line = lines[i];
    const size_t depth = line.names.size() - 1;
    for (size_t d = i == 0 ? 0 : Shared(lines[i - 1], line); d < depth; ++d) {
      absl::StrAppend(&out, indent(d), JsonQuote(line.names[d]), ": {\n");
    }
    const bool last = i + 1 == lines.size();
    const size_t stays = last ? 0 : Shared(line, lines[i + 1]);
    std::string text =
        absl::StrCat(indent(depth), JsonQuote(line.names.back()), ": ",
                     line.text, !last && stays == depth ? "," : "");
    if (!line.comment.empty()) {
      text.append(text.size() < 46 ? 46 - text.size() : 2, ' ');
      absl::StrAppend(&text, "// ", line.comment);
    }
    absl::StrAppend(&out, text, "\n");
    for (size_t d = depth; d > stays; --d) {
      absl::StrAppend(&out, indent(d - 1), "}",
                      !last && d == stays + 1 ? "," : "", "\n");
    }
  }
  return out + "}\n";
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
      return {{"type", {"string", "array"}},
              {"items", {{"type", "string"}}},
              {"minItems", 1},
              {"minLength", 1}};
    case KeyKind::kNumbers:
      schema = {{"type", "array"}, {"minItems", 2}, {"maxItems", 2}};
      schema["items"]["type"] = "number";
      AddLimits(key, &schema["items"]);
      return schema;
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      return {{"type", "object"}};
  }
  return schema;
}

std::string DefaultText(const KeySpec& key) {
  if (key.get == nullptr || !key.derived.empty() || key.may_be_unset) return "";
  if (key.path == "model.model_type" || key.path == "model.n_embd") return "";
  return ValueText(key.get(Config()));
}

bool MayBeNull(const KeySpec& key) {
  return absl::StartsWith(key.path, "model.");
}

// `doc` and the values that a refused key may still have.
Json RefusedSchema(const KeySpec& key, const std::string& doc) {
  Json schema = {{"description", doc}};
  const bool disabled = key.harmless == "disabled";
  if (key.harmless.empty()) {
    schema["const"] = "auto";
  } else if (disabled || key.harmless == "none") {
    schema["type"] = "object";
    auto& member = schema["properties"][disabled ? "enabled" : "device"];
    member["const"] = disabled ? Json(false) : Json("none");
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
  Json schema;
  schema["description"] =
      !used ? absl::StrCat("Accepted and ignored: ", key.doc, ".")
      : key.derived.empty() ? key.doc
                            : absl::StrCat(key.doc, " Default: ", key.derived);
  schema["anyOf"] = {ValueSchema(key), {{"const", "auto"}}};
  if (used && MayBeNull(key)) schema["anyOf"].push_back({{"type", "null"}});
  const std::string fallback = DefaultText(key);
  if (!fallback.empty()) schema["default"] = Json::parse(fallback);
  return schema;
}

bool IsChildOf(const KeySpec& key, const std::string& parent) {
  const size_t dot = key.path.rfind('.');
  return parent == (dot == std::string::npos ? "" : key.path.substr(0, dot));
}

void AddProperties(const std::string& parent, Json* schema) {
  (*schema)["additionalProperties"] = false;
  for (const KeySpec& key : AllKeys()) {
    if (!IsChildOf(key, parent)) continue;
    Json& child =
        (*schema)["properties"][key.path.substr(key.path.rfind('.') + 1)];
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
  if (key.treatment == Treatment::kRefused) return "refused";
  if (key.treatment == Treatment::kNotBuilt) return "not built yet";
  return key.kind == KeyKind::kObject ? "section" : Wanted(key);
}

std::string Fallback(const KeySpec& key) {
  return key.derived.empty() ? DefaultText(key) : key.derived;
}

std::string Cell(const std::string& text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}});
}

}  // namespace

std::string PrintResolved(const LoadedConfig& loaded) {
  return Render(Lines(loaded.config, &loaded.origins));
}

std::string PrintResolvedJson(const Config& config) {
  return Render(Lines(config, nullptr));
}

std::string PrintSchema() {
  Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                 {"title", "zero.cpp run"},
                 {"type", "object"}};
  AddProperties("", &schema);
  return schema.dump(2) + "\n";
}

std::string PrintKeyReference() {
  std::string out = "| key | value | default | meaning |\n|---|---|---|---|\n";
  for (const KeySpec& key : AllKeys()) {
    std::string doc = key.doc;
    if (key.applies != nullptr) {
      absl::StrAppend(&doc, " Only with ", key.applies_to, ".");
    }
    absl::StrAppend(&out, "| `", key.path, "` | ", Cell(KindText(key)), " | ",
                    Cell(Fallback(key)), " | ", Cell(doc), " |\n");
  }
  return out;
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
