// The `model` section: a preset, a folder or a family, completed by its rules.
#ifndef ZERO_ENGINE_CONFIG_RESOLVE_MODEL_H_
#define ZERO_ENGINE_CONFIG_RESOLVE_MODEL_H_

#include <string>

#include "engine/config/resolve_context.h"

namespace zero {

class ModelResolver : public ResolveContext {
 public:
  explicit ModelResolver(const ResolveContext& context)
      : ResolveContext(context) {}

  // Sets the model that explicit keys override.
  void Base();
  // Why the key `model.NAME` does not belong to this family.
  std::string WrongFamily(const std::string& name,
                          const std::string& applies_to) const;
  // Derives and checks hyperparameters, the vocabulary and data's sequence
  // length. REQUIRES: all given keys are set.
  void Complete();
  // Refuses sizes whose byte counts would not fit into 64 bits, or any memory.
  void CheckSize();

  // The preset or pretrained model, if there is one, and its name.
  bool has_base() const { return has_base_; }
  const ModelConfig& base() const { return base_; }
  const std::string& base_origin() const { return base_origin_; }

 private:
  std::string GivenText(const std::string& path) const;
  void DefaultsOfFamily();
  // The family's name of a hyperparameter, given GPT-2's.
  std::string Hyper(absl::string_view gpt2_name) const;
  void Require(const std::string& path);
  // The shape of loaded weights is what it is; only dropout may be chosen.
  void CheckPretrained();
  void Vocabulary();
  void Shape();
  void Positions();

  bool has_base_ = false;
  ModelConfig base_;
  std::string base_origin_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_RESOLVE_MODEL_H_
