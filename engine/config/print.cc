#include "engine/config/print.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

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

std::string Limits(const KeySpec& key) {
  std::string out;
  const auto bound = [](double value) { return JsonDouble(value); };
  if (std::isfinite(key.min)) {
    absl::StrAppend(&out, ", \"",
                    key.above_min ? "exclusiveMinimum" : "minimum",
                    "\": ", bound(key.min));
  }
  if (std::isfinite(key.max)) {
    absl::StrAppend(&out, ", \"",
                    key.below_max ? "exclusiveMaximum" : "maximum",
                    "\": ", bound(key.max));
  }
  return out;
}

// The schema of a value, without braces.
std::string ValueSchema(const KeySpec& key) {
  switch (key.kind) {
    case KeyKind::kBool:
      return "\"type\": \"boolean\"";
    case KeyKind::kInteger:
      return absl::StrCat(
          "\"type\": \"integer\"", Limits(key),
          key.unbuilt.empty()
              ? ""
              : absl::StrCat(", \"not\": {\"enum\": [",
                             absl::StrJoin(key.unbuilt, ", "), "]}"));
    case KeyKind::kNumber:
      return "\"type\": \"number\"" + Limits(key);
    case KeyKind::kString:
      return "\"type\": \"string\"";
    case KeyKind::kChoice: {
      std::vector<std::string> names;
      for (const std::string& choice : key.choices) {
        if (!key.IsUnbuilt(choice)) {
          names.push_back(JsonQuote(choice));
        }
      }
      return absl::StrCat("\"enum\": [", absl::StrJoin(names, ", "), "]");
    }
    case KeyKind::kFiles:
      return "\"type\": [\"string\", \"array\"], \"items\": {\"type\": "
             "\"string\"}, \"minItems\": 1, \"minLength\": 1";
    case KeyKind::kNumbers:
      return absl::StrCat(
          "\"type\": \"array\", \"minItems\": 2, \"maxItems\": 2, "
          "\"items\": {\"type\": \"number\"",
          Limits(key), "}");
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      return "\"type\": \"object\"";
  }
  return "";
}

std::string DefaultText(const KeySpec& key) {
  if (key.get == nullptr || !key.derived.empty() || key.may_be_unset) return "";
  if (key.path == "model.model_type" || key.path == "model.n_embd") return "";
  return ValueText(key.get(Config()));
}

// What a refused key may still be, as a schema without braces.
std::string HarmlessSchema(const KeySpec& key) {
  if (key.harmless.empty()) return "\"const\": \"auto\"";
  if (key.harmless == "disabled") {
    return "\"type\": \"object\", \"properties\": {\"enabled\": {\"const\": "
           "false}}";
  }
  if (key.harmless == "none") {
    return "\"type\": \"object\", \"properties\": {\"device\": {\"const\": "
           "\"none\"}}";
  }
  return absl::StrCat("\"enum\": [", key.harmless, ", \"auto\"]");
}

std::string LeafSchema(const KeySpec& key) {
  std::string doc = key.doc;
  if (!key.derived.empty()) absl::StrAppend(&doc, " Default: ", key.derived);
  std::string schema;
  switch (key.treatment) {
    case Treatment::kUsed: {
      const bool is_null = key.path.rfind("model.", 0) == 0;
      schema = absl::StrCat("\"anyOf\": [{", ValueSchema(key),
                            "}, {\"const\": \"auto\"}",
                            is_null ? ", {\"type\": \"null\"}" : "", "]");
      const std::string fallback = DefaultText(key);
      if (!fallback.empty()) {
        absl::StrAppend(&schema, ", \"default\": ", fallback);
      }
      break;
    }
    case Treatment::kNote:
      doc = absl::StrCat("Accepted and ignored: ", doc, ".");
      schema = absl::StrCat("\"anyOf\": [{", ValueSchema(key),
                            "}, {\"const\": \"auto\"}]");
      break;
    case Treatment::kRefused:
      doc = absl::StrCat("Does not apply here: ", doc, ".");
      schema = HarmlessSchema(key) + ", \"deprecated\": true";
      break;
    case Treatment::kNotBuilt:
      doc = absl::StrCat("Not built yet: ", doc, ".");
      schema = HarmlessSchema(key) + ", \"deprecated\": true";
      break;
  }
  return absl::StrCat("{\"description\": ", JsonQuote(doc), ", ", schema, "}");
}

bool IsChildOf(const KeySpec& key, const std::string& parent) {
  const size_t prefix = parent.empty() ? 0 : parent.size() + 1;
  return key.path.size() > prefix &&
         key.path.compare(0, prefix, parent.empty() ? "" : parent + ".") == 0 &&
         key.path.find('.', prefix) == std::string::npos;
}

void AppendProperties(const std::string& parent, int depth, std::string* out) {
  const std::string indent(static_cast<size_t>(2 * depth), ' ');
  absl::StrAppend(out, indent, "\"additionalProperties\": false,\n", indent,
                  "\"properties\": {");
  const char* comma = "";
  for (const KeySpec& key : AllKeys()) {
    if (!IsChildOf(key, parent)) continue;
    const size_t prefix = parent.empty() ? 0 : parent.size() + 1;
    absl::StrAppend(out, comma, "\n", indent, "  ",
                    JsonQuote(key.path.substr(prefix)), ": ");
    comma = ",";
    if (key.kind != KeyKind::kObject) {
      absl::StrAppend(out, LeafSchema(key));
      continue;
    }
    const bool may_be_null = key.path.rfind("model.", 0) == 0;
    absl::StrAppend(
        out, "{\n", indent, "    \"description\": ", JsonQuote(key.doc), ",\n",
        indent,
        "    \"type\": ", may_be_null ? "[\"object\", \"null\"]" : "\"object\"",
        ",\n");
    AppendProperties(key.path, depth + 2, out);
    absl::StrAppend(out, "\n", indent, "  }");
  }
  absl::StrAppend(out, "\n", indent, "}");
}

std::string KindText(const KeySpec& key) {
  switch (key.treatment) {
    case Treatment::kNote:
      return "ignored";
    case Treatment::kRefused:
      return "refused";
    case Treatment::kNotBuilt:
      return "not built yet";
    case Treatment::kUsed:
      break;
  }
  return key.kind == KeyKind::kObject ? "section" : Wanted(key);
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
  std::string out =
      "{\n"
      "  \"$schema\": \"https://json-schema.org/draft/2020-12/schema\",\n"
      "  \"title\": \"zero.cpp run\",\n"
      "  \"type\": \"object\",\n";
  AppendProperties("", 1, &out);
  return out + "\n}\n";
}

std::string PrintKeyReference() {
  std::string out = "| key | value | default | meaning |\n|---|---|---|---|\n";
  for (const KeySpec& key : AllKeys()) {
    std::string fallback = DefaultText(key);
    if (!key.derived.empty()) fallback = key.derived;
    std::string doc = key.doc;
    if (key.applies != nullptr) {
      absl::StrAppend(&doc, " Only with ", key.applies_to, ".");
    }
    absl::StrAppend(&out, "| `", key.path, "` | ", Cell(KindText(key)), " | ",
                    Cell(fallback), " | ", Cell(doc), " |\n");
  }
  return out;
}

std::string PrintDifferences() {
  std::string out = "| key | here | DeepSpeed |\n|---|---|---|\n";
  for (const KeySpec& key : AllKeys()) {
    if (key.deepspeed.empty()) continue;
    std::string fallback = DefaultText(key);
    if (!key.derived.empty()) fallback = key.derived;
    absl::StrAppend(&out, "| `", key.path, "` | ", Cell(fallback), " | ",
                    Cell(key.deepspeed), " |\n");
  }
  return out;
}

}  // namespace zero
