#include "models/catalog.h"

#include "absl/strings/str_cat.h"
#include "engine/base/nearest.h"
#include "models/hf_config.h"

namespace zero {
namespace {

class Catalog : public ModelCatalog {
 public:
  std::vector<std::string> PresetNames() const override {
    std::vector<std::string> names;
    for (const ModelPreset& preset : ModelPresets()) {
      names.push_back(preset.name);
    }
    return names;
  }

  absl::StatusOr<ModelConfig> Preset(absl::string_view name) const override {
    for (const ModelPreset& preset : ModelPresets()) {
      if (name == preset.name) return preset.config;
    }
    std::string message = absl::StrCat("no preset \"", name, "\";");
    const auto nearest = NearestNames(name, PresetNames(), 1);
    if (!nearest.empty()) {
      absl::StrAppend(&message, " did you mean \"", nearest[0], "\"?");
    }
    return absl::NotFoundError(
        absl::StrCat(message, " `zero models` lists them"));
  }

  absl::StatusOr<ModelConfig> Pretrained(absl::string_view dir) const override {
    return ReadHfConfig(std::string(dir));
  }
};

}  // namespace

std::unique_ptr<ModelCatalog> MakeModelCatalog() {
  return std::make_unique<Catalog>();
}

}  // namespace zero
