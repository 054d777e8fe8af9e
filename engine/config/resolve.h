// Turns the given keys into a complete Config: base model, defaults, derived
// values, and checks over several keys.
#ifndef ZERO_ENGINE_CONFIG_RESOLVE_H_
#define ZERO_ENGINE_CONFIG_RESOLVE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"
#include "engine/config/load.h"

namespace zero {

// One key with a value from the file or an override, checked separately.
struct GivenKey {
  KeyValue value;
  JsonPlace place;  // of the value
};

struct GivenKeys {
  std::map<std::string, GivenKey> keys;  // by path
  // Positions of "auto", by path, and of objects: for errors about missing
  // keys.
  std::map<std::string, JsonPlace> autos;
  std::map<std::string, JsonPlace> objects;
  // The names of the texts, indexed by JsonPlace::source: the file, then "--set
  // a.b" for each override.
  std::vector<std::string> sources;
};

// Fills `loaded` (notes are appended). Problems are added to `problems`; if
// there are some already, of single keys, only the model's name is checked.
void ResolveConfig(const GivenKeys& given, const LoadOptions& options,
                   LoadedConfig* loaded, std::vector<JsonProblem>* problems);

// Shared by the parts of resolve: the given keys, the config being built, and
// the wording of messages on both.
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
  bool IsAuto(const std::string& path) const;

  // The position of `path`, or else of the object that should hold it.
  JsonPlace Place(const std::string& path) const;
  // "configs/a.json:12", or "--set".
  std::string Origin(const std::string& path) const;
  // "training.steps (line 12)", for messages about a second key.
  std::string Cite(const std::string& path) const;

  // Messages are passed as the pieces for absl::StrCat.
  template <typename... Parts>
  void Problem(const std::string& path, const Parts&... parts) {
    problems_.push_back({Place(path), path, absl::StrCat(parts...)});
  }
  template <typename... Parts>
  void Note(const Parts&... parts) {
    loaded_.notes.push_back(absl::StrCat(parts...));
  }
  // Takes the given value, if there is one.
  void Set(const std::string& path);
  void Derived(const std::string& path, absl::string_view formula);

  // Finds `path` (a file, a folder or a glob) relative to the current folder,
  // or else to the config file's.
  std::string Locate(const std::string& path) const;
  // Whether `path` exists.
  static bool Exists(const std::string& path);
  // A message that `files` are not found, where they were searched for, and the
  // remedy.
  std::string Missing(const std::vector<std::string>& files) const;
  // Reports a missing file that a run would need.
  void Lacking(const std::string& path, const std::string& message);

  const GivenKeys& given_;
  const LoadOptions& options_;
  Config& config_;
  LoadedConfig& loaded_;
  std::vector<JsonProblem>& problems_;
};

// The `model` section: a preset, a folder or a family, completed by its rules.
class ModelResolver : public ResolveContext {
 protected:
  using ResolveContext::ResolveContext;

  // Sets the preset or pretrained model, if any, that explicit keys override.
  void Base();
  // Sets the family's defaults, if there is no such model.
  void DefaultsOfFamily();
  // Why the key `model.NAME` does not belong to this family.
  std::string WrongFamily(const std::string& name,
                          const std::string& applies_to) const;
  // Derives and checks hyperparameters, the vocabulary and data's sequence
  // length. REQUIRES: all given keys are set.
  void Complete();
  // Refuses sizes whose byte counts would not fit into 64 bits, or any memory.
  void CheckSize();

  // The preset or pretrained model, if any, and its name.
  bool has_base_ = false;
  ModelConfig base_;
  std::string base_origin_;

 private:
  std::string GivenText(const std::string& path) const;
  // The family's name of a hyperparameter, given GPT-2's.
  std::string Hyper(absl::string_view gpt2_name) const;
  void Require(const std::string& path);
  // The shape of loaded weights is fixed; only dropout may be chosen.
  void CheckPretrained();
  void Vocabulary();
  void Shape();
  void Positions();
};

// The batch of a step, and each rank's share.
class BatchResolver : public ModelResolver {
 protected:
  using ModelResolver::ModelResolver;

  // Derives the missing ones of train_batch_size,
  // train_micro_batch_size_per_gpu and gradient_accumulation_steps.
  void Batch();

 private:
  // Derives all three if elasticity.enabled is true.
  void Elastic();
  bool ElasticKeys();
  void Choose(const std::string& path, int64_t value, int64_t* field);
  std::string Ranks() const;  // "4 ranks"
};

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_RESOLVE_H_
