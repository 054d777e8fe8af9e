// JSON with // and /* */ comments, read into a tree with the position of every
// key and value.
//
// A parser of our own, for its messages: nlohmann-json 3.11 gives no positions
// for values, keeps the last of duplicate keys and explains a syntax error in
// terms of its lexer.
#ifndef ZERO_ENGINE_CONFIG_JSON_TEXT_H_
#define ZERO_ENGINE_CONFIG_JSON_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zero {

// Line and column count from 1; a column is one UTF-8 character. `source`
// numbers the text, for callers that read several.
struct JsonPlace {
  int source = 0;
  int line = 1;
  int column = 1;
};

enum class JsonKind { kNull, kBool, kNumber, kString, kArray, kObject };

// "null", "a boolean", "a number", "a string", "an array", "an object".
const char* JsonKindName(JsonKind kind);

struct JsonNode {
  JsonKind kind = JsonKind::kNull;
  JsonPlace place;
  bool boolean = false;
  double number = 0;
  bool is_integer = false;  // written without . or e, and fits in 64 bits
  int64_t integer = 0;
  std::string text;  // a string's value; a number as it was written
  std::string key;   // in an object: this member's key and its position
  JsonPlace key_place;
  std::vector<JsonNode> children;  // of an array or an object

  // The member `key` of an object, or null.
  const JsonNode* Find(absl::string_view name) const;
};

// `path` is the JSON path, "a.b[2].c"; "" for the whole text.
struct JsonProblem {
  JsonPlace place;
  std::string path;
  std::string message;
};

// Parses `text` into `root`. Duplicate keys are reported and the first is
// kept; a syntax error is reported and ends the parse, with `root` undefined.
// Returns false if anything was added to `problems`.
bool ParseJsonText(absl::string_view text, int source, JsonNode* root,
                   std::vector<JsonProblem>* problems);

// JSON texts of values. A double is written with the fewest digits that read
// back to the same bits, and with a '.' or an 'e'.
std::string JsonQuote(absl::string_view text);
std::string JsonDouble(double value);

// A node in one line for messages, cut after 40 characters.
std::string JsonBrief(const JsonNode& node);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_JSON_TEXT_H_
