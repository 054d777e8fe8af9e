// From the keys that were given to a complete Config: base model, defaults,
// derived values, and the checks that need more than one key.
#ifndef ZERO_ENGINE_CONFIG_RESOLVE_H_
#define ZERO_ENGINE_CONFIG_RESOLVE_H_

#include <map>
#include <string>
#include <vector>

#include "engine/config/json_text.h"
#include "engine/config/keys.h"
#include "engine/config/load.h"

namespace zero {

// One key that the file or an override gives a value, checked by itself.
struct GivenKey {
  KeyValue value;
  JsonPlace place;  // of the value
};

struct GivenKeys {
  std::map<std::string, GivenKey> keys;  // by path
  // Where "auto" stands, by path, and where objects do: for errors about what
  // is missing there.
  std::map<std::string, JsonPlace> autos;
  std::map<std::string, JsonPlace> objects;
  // By JsonPlace::source: the file, then "--set a.b" for each override.
  std::vector<std::string> sources;
};

// Fills `loaded` (notes are appended). Problems are added to `problems`.
void ResolveConfig(const GivenKeys& given, const LoadOptions& options,
                   LoadedConfig* loaded, std::vector<JsonProblem>* problems);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_RESOLVE_H_
