// The table of every key: one row per key drives the parser, the defaults,
// `zero config`, its schema and its reference. keys.cc has the rows with a
// field, foreign_keys.cc those of other programs, key_value.cc reads values and
// key_names.cc suggests names.
#ifndef ZERO_ENGINE_CONFIG_KEYS_H_
#define ZERO_ENGINE_CONFIG_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/config/config.h"
#include "engine/config/json_text.h"

namespace zero {

// A key's value between the JSON text and its field; enums go by name.
using KeyValue =
    std::variant<bool, int64_t, double, std::string, std::vector<std::string>,
                 std::vector<double>, std::vector<int64_t>>;

enum class KeyKind {
  kBool,
  kInteger,  // also 5e8, as DeepSpeed's configs write it
  kNumber,
  kString,
  kChoice,    // one of `choices`
  kFiles,     // a path or a list of paths
  kStrings,   // a string or a list of strings
  kNumbers,   // betas: a list of two numbers
  kIntegers,  // a list of whole numbers
  kObject,    // its keys have their own rows
  kOpaque,    // an object that is not inspected
};

enum class Treatment {
  kUsed,      // ours, or DeepSpeed's and meaning the same
  kNote,      // accepted and ignored: cannot change a result here
  kRefused,   // would change something that zero does not have
  kNotBuilt,  // refused until a later version builds it
  kOldName,   // true stands for "KEY=VALUE", or a section for "KEY": its doc
};

struct KeySpec {
  std::string path;
  KeyKind kind = KeyKind::kOpaque;
  Treatment treatment = Treatment::kUsed;
  std::string doc;  // one line; for a refused or ignored key, the reason

  // kUsed leaves: access to the field.
  KeyValue (*get)(const Config&) = nullptr;
  void (*set)(Config&, const KeyValue&) = nullptr;

  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // > min instead of >= min
  bool below_max = false;  // < max instead of <= max
  std::vector<std::string> choices;
  bool any_case = false;  // choices are compared without regard to case
  // An integer key also accepts a fraction and rounds it down: Hugging Face's
  // Trainer writes some of them so.
  bool rounds_down = false;

  // Values (as JSON text without quotes) that are not built yet.
  std::vector<std::string> unbuilt;
  std::string unbuilt_reason;
  // The neutral value: with it a refused or unbuilt key is accepted, and an
  // ignored one leaves no note. "disabled" is an object with "enabled": false.
  std::string harmless;

  // The value of a key that is not given, in words; empty: the field's default.
  std::string derived;
  // The key is not printed while its value is the in-class default, which means
  // "unset". A section may be null, DeepSpeed's word for off.
  bool may_be_unset = false;
  // Null: always. Otherwise whether the key belongs to the configured family,
  // optimizer, scheduler, ...; a key that does not apply cannot be given.
  bool (*applies)(const Config&) = nullptr;
  std::string applies_to;  // for messages: "optimizer.type AdamW, Adam"
  // Reasons why a run may not read the key. It may still be given, since
  // ignoring it changes nothing: it leaves a note, has its default in Config
  // and is not printed.
  struct Unread {
    bool (*holds)(const Config&);
    const char* reason;
  };
  std::vector<Unread> unread;

  // "auto" is a separate value, not the default.
  bool says_auto = false;
  // It concerns several ranks: without effect on one rank.
  bool between_ranks = false;
  // It concerns a GPU: without effect on the CPU.
  bool of_gpu = false;

  // If a default or a meaning differs from DeepSpeed's: theirs, and why.
  std::string deepspeed;

  // "a.b.c" is "c" in the section "a.b"; sections at the top are in "".
  std::string name() const { return path.substr(path.rfind('.') + 1); }
  std::string section() const {
    const size_t dot = path.rfind('.');
    return dot == std::string::npos ? "" : path.substr(0, dot);
  }
  bool is_leaf() const { return kind != KeyKind::kObject; }
  bool IsUnbuilt(const std::string& value) const {
    return std::find(unbuilt.begin(), unbuilt.end(), value) != unbuilt.end();
  }
  bool Applies(const Config& config) const {
    return applies == nullptr || applies(config);
  }
  // The first of `unread` that holds, or null.
  const char* WhyUnread(const Config& config) const;
  // Whether a run with this config reads the key.
  bool IsRead(const Config& config) const {
    return Applies(config) && WhyUnread(config) == nullptr;
  }
};

// Keys of DeepSpeed's or Hugging Face's configs that have no field here.
struct ForeignKey {
  Treatment treatment;
  KeyKind kind;
  const char* paths;  // separated by spaces
  const char* reason;
  const char* harmless = "";
};
absl::Span<const ForeignKey> ForeignKeys();

// The whole table: used keys in the order in which a config is printed, then
// foreign ones.
const std::vector<KeySpec>& AllKeys();

// The entry of `path`, or null.
const KeySpec* FindKey(absl::string_view path);

// Checks type, range and choice; an object has no value.
// Errors: InvalidArgument, written to follow "path: ".
absl::StatusOr<KeyValue> ReadValue(const KeySpec& key, const JsonNode& node);

// Whether `node` is neutral: `harmless`, null, or "auto" in "enabled".
bool IsHarmless(const KeySpec& key, const JsonNode& node);

// JSON text of a value.
std::string ValueText(const KeyValue& value);

// "an integer >= 1", "one of "AdamW", "SGD"": the key's domain.
std::string Wanted(const KeySpec& key);

// A suggestion for an unknown key in the object `parent` ("" at the top): `;
// did you mean "..."?`; empty if none is near.
std::string NearestKey(absl::string_view parent, absl::string_view name);

// "; known here:", and the keys of the object `parent` in lines of 80 columns.
std::string KnownKeys(absl::string_view parent);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_KEYS_H_
