#include "engine/config/load.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"
#include "engine/config/resolve.h"

namespace zero {
namespace {

constexpr size_t kMaxTextBytes = 1 << 20;

// For texts that may be no config.
constexpr char kIfData[] =
    "; if this is data, name it as data.train in a JSON config, such as "
    "configs/gpt2_tiny.json";

// Reads one text and its overrides into GivenKeys, checking key by key.
class Loader {
 public:
  Loader(std::string file, const LoadOptions& options) : options_(options) {
    given_.sources.push_back(std::move(file));
  }

  absl::StatusOr<LoadedConfig> Load(absl::string_view text) {
    JsonNode root;
    if (!ParseJsonText(text, 0, &root, &problems_)) {
      if (!absl::EndsWith(given_.sources[0], ".json")) {
        problems_.back().message += kIfData;
      }
      return Failure();
    }
    if (root.kind != JsonKind::kObject) {
      Problem(root.place, "", "found ", JsonKindName(root.kind),
              ", want an object: { ... }");
      return Failure();
    }
    if (!options_.model_dir.empty()) ReplaceModel(&root);
    for (const std::string& text : options_.overrides) Override(text, &root);
    if (!problems_.empty()) return Failure();
    given_.objects[""] = root.place;
    Visit(root, "");
    ReadOldNames();
    ResolveConfig(given_, options_, &loaded_, &problems_);
    if (!problems_.empty()) return Failure();
    return std::move(loaded_);
  }

 private:
  template <typename... Parts>
  void Problem(const JsonPlace& place, const std::string& path,
               const Parts&... parts) {
    problems_.push_back({place, path, absl::StrCat(parts...)});
  }

  // One line per problem, in the order of the text.
  absl::Status Failure() {
    std::stable_sort(problems_.begin(), problems_.end(),
                     [](const JsonProblem& a, const JsonProblem& b) {
                       const auto key = [](const JsonProblem& p) {
                         return std::make_tuple(p.place.source, p.place.line,
                                                p.place.column);
                       };
                       return key(a) < key(b);
                     });
    std::vector<std::string> lines;
    for (const JsonProblem& problem : problems_) {
      lines.push_back(Line(problem));
    }
    const std::string text = absl::StrJoin(lines, "\n");
    return num_unbuilt_ == problems_.size() ? absl::UnimplementedError(text)
                                            : absl::InvalidArgumentError(text);
  }

  std::string Line(const JsonProblem& problem) const {
    const std::string& source = given_.sources[problem.place.source];
    // The key to set; an override of its neighbour or section may have made it
    // necessary.
    if (absl::StartsWith(source, "--set ") && !problem.path.empty()) {
      return absl::StrCat("--set ", problem.path, ": ", problem.message);
    }
    std::string line = source;
    if (problem.place.source == 0) {
      absl::StrAppend(&line, ":", problem.place.line, ":",
                      problem.place.column);
    }
    if (!problem.path.empty()) absl::StrAppend(&line, ": ", problem.path);
    return absl::StrCat(line, ": ", problem.message);
  }

  // ---- Overrides ----------------------------------------------------------

  // The folder of --model instead of the config's model.
  void ReplaceModel(JsonNode* root) {
    JsonNode* model = Member(root, "model", 0);
    if (model->kind != JsonKind::kObject) return;
    auto& keys = model->children;
    keys.erase(std::remove_if(keys.begin(), keys.end(),
                              [](const JsonNode& node) {
                                return !IsOfTraining(node.key);
                              }),
               keys.end());
    given_.sources.push_back("--model");
    const int source = static_cast<int>(given_.sources.size()) - 1;
    JsonNode* dir = Member(model, "from_pretrained", source);
    dir->kind = JsonKind::kString;
    dir->text = options_.model_dir;
  }

  // The member `key` of `object`, made (as an empty object) if needed.
  static JsonNode* Member(JsonNode* object, absl::string_view key, int source) {
    for (JsonNode& child : object->children) {
      if (child.key == key) return &child;
    }
    JsonNode& child = object->children.emplace_back();
    child.kind = JsonKind::kObject;
    child.key = std::string(key);
    child.place.source = child.key_place.source = source;
    return &child;
  }

  void Override(const std::string& text, JsonNode* root) {
    const size_t equals = text.find('=');
    const std::string path = text.substr(0, equals);
    given_.sources.push_back(
        absl::StrCat("--set ", path.empty() ? text : path));
    JsonPlace place;
    place.source = static_cast<int>(given_.sources.size()) - 1;
    const std::vector<std::string> names = absl::StrSplit(path, '.');
    if (equals == std::string::npos ||
        std::count(names.begin(), names.end(), "") > 0) {
      return Problem(place, path,
                     "want KEY=VALUE, for example "
                     "training.steps=100");
    }
    JsonNode* node = root;
    std::string at;
    for (const std::string& name : names) {
      const KeySpec* section = FindKey(at);
      absl::StrAppend(&at, at.empty() ? "" : ".", name);
      if (node->kind == JsonKind::kNull && section != nullptr &&
          section->may_be_unset) {
        node->kind = JsonKind::kObject;
      }
      if (node->kind != JsonKind::kObject) {
        return Problem(place, path, "\"", node->key, "\" is ",
                       JsonKindName(node->kind), ", not an object with keys");
      }
      node = Member(node, name, place.source);
    }
    JsonNode value;
    if (!OverrideValue(text.substr(equals + 1), path, place, &value)) return;
    value.key = node->key;
    value.key_place = place;
    *node = std::move(value);
  }

  // JSON, a list of numbers without its brackets, or a bare string if the text
  // is not JSON or the key takes a string.
  bool OverrideValue(std::string text, const std::string& path,
                     const JsonPlace& place, JsonNode* value) {
    const KeySpec* key = FindKey(path);
    const bool takes_numbers =
        key != nullptr &&
        (key->kind == KeyKind::kNumbers || key->kind == KeyKind::kIntegers);
    if (takes_numbers && text[0] != '[' && absl::StrContains(text, ",")) {
      text = absl::StrCat("[", text, "]");
    }
    if (text.empty() && key != nullptr && key->kind != KeyKind::kString) {
      Problem(place, path, "nothing follows the =, want ", Wanted(*key));
      return false;
    }
    const bool takes_text =
        key != nullptr &&
        (key->kind == KeyKind::kString || key->kind == KeyKind::kFiles ||
         key->kind == KeyKind::kStrings || key->kind == KeyKind::kChoice);
    std::vector<JsonProblem> trouble;
    const bool is_json = ParseJsonText(text, place.source, value, &trouble);
    // Text intended as JSON; a glob may begin with a brace.
    const absl::string_view tried = takes_text ? "[\"" : "{[\"-0123456789";
    if (!is_json && !text.empty() &&
        tried.find(text[0]) != absl::string_view::npos) {
      Problem(place, path, trouble[0].message);
      return false;
    }
    const bool wants_text = takes_text && (value->kind == JsonKind::kNumber ||
                                           value->kind == JsonKind::kBool);
    if (!is_json || wants_text) {
      *value = JsonNode();
      value->kind = JsonKind::kString;
      value->text = text;
    }
    value->place = place;
    return true;
  }

  // ---- Keys ---------------------------------------------------------------

  void Visit(const JsonNode& object, const std::string& parent) {
    for (const JsonNode& node : object.children) {
      const std::string path =
          absl::StrCat(parent, parent.empty() ? "" : ".", node.key);
      if (node.key.find('.') != std::string::npos) {
        Problem(node.key_place, path,
                "unknown key; in a file, write one object per dot");
        continue;
      }
      const KeySpec* key = FindKey(path);
      // Parameters of a type that is unknown or not built have unknown names.
      if (node.key == "params" && TypeIsRefused(object, parent)) continue;
      if (key == nullptr) {
        std::string hint = NearestKey(parent, node.key);
        // The list is long, so it is printed once per object.
        if (hint.empty() && listed_.insert(parent).second) {
          hint = KnownKeys(parent);
        }
        Problem(node.key_place, path, "unknown key", hint);
      } else if (IsAuto(*key, node)) {
        // null is None in DeepSpeed's and Hugging Face's configs.
        if (node.kind != JsonKind::kNull) given_.autos[path] = node.place;
      } else {
        Key(*key, node);
      }
    }
  }

  static bool TypeIsRefused(const JsonNode& object, const std::string& parent) {
    const KeySpec* key = FindKey(absl::StrCat(parent, ".type"));
    const JsonNode* type = object.Find("type");
    if (key == nullptr || type == nullptr || IsAuto(*key, *type)) return false;
    const auto value = ReadValue(*key, *type);
    if (!value.ok()) return true;
    const auto* name = std::get_if<std::string>(&*value);
    return name != nullptr && key->IsUnbuilt(*name);
  }

  // "auto" asks for the default, or what follows from other keys; null for the
  // default.
  static bool IsAuto(const KeySpec& key, const JsonNode& node) {
    if (node.kind == JsonKind::kNull) return key.set != nullptr;
    return node.kind == JsonKind::kString && node.text == "auto" &&
           key.kind != KeyKind::kObject && !key.says_auto;
  }

  void Key(const KeySpec& key, const JsonNode& node) {
    if (node.kind == JsonKind::kNull) return;  // as if it were absent
    if (key.treatment == Treatment::kRefused ||
        key.treatment == Treatment::kNotBuilt) {
      if (!IsHarmless(key, node)) Refuse(key, node);
      return;
    }
    absl::StatusOr<KeyValue> value = ReadValue(key, node);
    if (!value.ok()) {
      return Problem(node.place, key.path, value.status().message());
    }
    if (key.treatment == Treatment::kNote) {
      if (key.path == "$schema" || IsHarmless(key, node)) return;
      loaded_.notes.push_back(
          absl::StrCat(Origin(node.place), ": ", key.path,
                       " is accepted and ignored: ", key.doc));
      return;
    }
    if (key.treatment == Treatment::kOldName) {
      if (key.kind == KeyKind::kOpaque || std::get<bool>(*value)) {
        old_names_.emplace_back(&key, &node);
      }
      return;
    }
    if (key.kind == KeyKind::kObject) {
      given_.objects[key.path] = node.key_place;
      return Visit(node, key.path);
    }
    const auto* named = std::get_if<std::string>(&*value);
    const std::string text = named != nullptr ? *named : ValueText(*value);
    if (key.IsUnbuilt(text)) {
      ++num_unbuilt_;
      return Problem(node.place, key.path, JsonBrief(node),
                     " is not built yet: ", key.unbuilt_reason);
    }
    given_.keys[key.path] = {*std::move(value), node.place};
  }

  // An old name sets the key that replaced it. If that key is given too, both
  // must say the same.
  void ReadOldNames() {
    for (const auto& [key, node] : std::exchange(old_names_, {})) {
      if (key->kind == KeyKind::kOpaque) {
        ReadOldSection(*key, *node);
        continue;
      }
      const std::vector<std::string> stands_for = absl::StrSplit(key->doc, '=');
      const KeyValue value = FindKey(stands_for[0])->kind == KeyKind::kBool
                                 ? KeyValue(stands_for[1] == "true")
                                 : KeyValue(stands_for[1]);
      const JsonPlace& place = node->place;
      const auto [given, added] =
          given_.keys.try_emplace(stands_for[0], value, place);
      if (added || given->second.value == value) continue;
      Problem(place, key->path, "it is an old name of ", key->doc, ", but ",
              Origin(given->second.place), " says ",
              ValueText(given->second.value), "; delete one");
    }
  }

  // Reads a section that is given under another name or in another place.
  void ReadOldSection(const KeySpec& key, const JsonNode& node) {
    const auto [given, added] =
        given_.objects.try_emplace(key.doc, node.key_place);
    if (added) return Visit(node, key.doc);
    Problem(node.key_place, key.path, "it stands for \"", key.doc,
            "\", but that is given as well (", Origin(given->second),
            "); delete one");
  }

  void Refuse(const KeySpec& key, const JsonNode& node) {
    const bool unbuilt = key.treatment == Treatment::kNotBuilt;
    num_unbuilt_ += unbuilt;
    Problem(node.key_place, key.path,
            unbuilt ? "not built yet: " : "does not apply here: ", key.doc);
  }

  std::string Origin(const JsonPlace& place) const {
    const std::string& source = given_.sources[place.source];
    return place.source == 0 ? absl::StrCat(source, ":", place.line) : source;
  }

  const LoadOptions& options_;
  GivenKeys given_;
  LoadedConfig loaded_;
  std::vector<JsonProblem> problems_;
  std::vector<std::pair<const KeySpec*, const JsonNode*>> old_names_;
  std::set<std::string> listed_;  // objects whose KnownKeys were named
  size_t num_unbuilt_ = 0;
};

// How a model differs from `own`, the config's: "model_type "llama", not
// "gpt2"", or the first hyperparameters that differ. Empty: nothing.
std::string OtherModel(const LoadedConfig& loaded, const LoadedConfig& own) {
  constexpr size_t kMost = 3;
  const bool same_family =
      loaded.config.model.family == own.config.model.family;
  std::vector<std::string> others;
  for (const KeySpec& key : AllKeys()) {
    const bool compared =
        key.get != nullptr && key.section() == "model" &&
        key.kind != KeyKind::kString && !IsOfTraining(key.name()) &&
        (same_family ? key.Applies(own.config) && key.path != "model.model_type"
                     : key.path == "model.model_type");
    if (!compared || key.get(loaded.config) == key.get(own.config)) continue;
    // Values derived from the tokenizer or the sequence length are ignored.
    const auto origin = own.origins.find(key.path);
    if (origin != own.origins.end() &&
        absl::StartsWith(origin->second, "derived")) {
      continue;
    }
    others.push_back(absl::StrCat(key.name(), " ",
                                  ValueText(key.get(loaded.config)), ", not ",
                                  ValueText(key.get(own.config))));
  }
  const size_t more = others.size() - std::min(others.size(), kMost);
  others.resize(others.size() - more);
  if (more > 0) others.push_back(absl::StrCat(more, " more"));
  return absl::StrJoin(others, "; ");
}

// Adds a note if --model differs from the config's model.
void NoteOtherModel(absl::string_view text, const std::string& file,
                    const LoadOptions& options, LoadedConfig* loaded) {
  LoadOptions own = options;
  own.model_dir.clear();
  own.missing_files = MissingFiles::kIgnored;
  const auto without = Loader(file, own).Load(text);
  if (!without.ok()) return;  // the config has no model without it
  const std::string other = OtherModel(*loaded, *without);
  if (other.empty()) return;
  loaded->notes.insert(
      loaded->notes.begin(),
      absl::StrCat("--model ", options.model_dir, " replaces another model in ",
                   file, ": ", other));
}

}  // namespace

absl::StatusOr<LoadedConfig> LoadConfig(const std::string& file,
                                        const LoadOptions& options) {
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  return ParseConfig(text, file, options);
}

absl::StatusOr<LoadedConfig> ParseConfig(absl::string_view text,
                                         const std::string& file,
                                         const LoadOptions& options) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": larger than ", kMaxTextBytes,
                     " bytes, too large for a config", kIfData));
  }
  auto loaded = Loader(file, options).Load(text);
  if (loaded.ok() && !options.model_dir.empty()) {
    NoteOtherModel(text, file, options, &*loaded);
  }
  return loaded;
}

}  // namespace zero
