// What the parts of resolve share: the keys that were given, the config that
// is being made of them, and ways to speak about both.
#ifndef ZERO_ENGINE_CONFIG_RESOLVE_CONTEXT_H_
#define ZERO_ENGINE_CONFIG_RESOLVE_CONTEXT_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/config/resolve.h"

namespace zero {

class ResolveContext {
 public:
  ResolveContext(const GivenKeys& given, const LoadOptions& options,
                 LoadedConfig* loaded, std::vector<JsonProblem>* problems)
      : given_(given),
        options_(options),
        config_(loaded->config),
        loaded_(*loaded),
        problems_(*problems) {}

 protected:
  bool Given(const std::string& path) const;

  // Where `path` stands, or else the object that should hold it.
  JsonPlace Place(const std::string& path) const;
  // "configs/a.json:12", or "--set".
  std::string Origin(const std::string& path) const;
  // "training.steps (line 12)", for messages about a second key.
  std::string Cite(const std::string& path) const;

  void Problem(const std::string& path, std::string message);
  void Note(std::string note);
  // Takes the given value, if there is one.
  void Set(const std::string& path);
  void Derived(const std::string& path, absl::string_view formula);

  // `path` (a file, a folder or a glob) from the current folder, or else from
  // the config file's.
  std::string Locate(const std::string& path) const;
  // Whether `path` names something.
  static bool Exists(const std::string& path);
  // Why `file` is not found, and where it was looked for.
  std::string Missing(const std::string& file) const;
  // Reports that a run would need a file that is not there.
  void Lacking(const std::string& path, const std::string& message);

  const GivenKeys& given_;
  const LoadOptions& options_;
  Config& config_;
  LoadedConfig& loaded_;
  std::vector<JsonProblem>& problems_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_RESOLVE_CONTEXT_H_
