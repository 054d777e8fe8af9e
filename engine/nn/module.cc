#include "engine/nn/module.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/philox.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// FNV-1a: the same on every machine and in every version.
uint64_t NameKey(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

// A uniform number in (0, 1): 32 random bits and a half, exact in float64.
double OpenUniform(uint32_t bits) { return (bits + 0.5) * 0x1.0p-32; }

}  // namespace

Var Unit::Logits(Context&, const Var&) {
  ZERO_CHECK(false) << "unit " << name_ << " has no logits";
  return Var();
}

Parameter* Unit::AddParameter(const std::string& name, const Shape& shape,
                              Init init, bool decay) {
  auto parameter = std::make_unique<Parameter>();
  parameter->name = absl::StrCat(name_, ".", name);
  parameter->shape = parameter->stored_shape = shape;
  parameter->init = init;
  parameter->decay = decay;
  parameter->phase = phase_;
  parameters_.push_back(std::move(parameter));
  return parameters_.back().get();
}

Parameter* Unit::AddVocabulary(const std::string& name, const Shape& shape,
                               Init init) {
  constexpr int64_t kRows = 128;
  Parameter* const table = AddParameter(name, shape, init, /*decay=*/true);
  table->stored_shape = {RoundUp(shape[0], kRows), shape[1]};
  table->vocabulary = true;
  return table;
}

std::vector<Parameter*> Model::AllParameters() const {
  std::vector<Parameter*> all;
  for (const auto& unit : units_) {
    for (const auto& parameter : unit->parameters()) {
      all.push_back(parameter.get());
    }
  }
  return all;
}

int64_t Model::NumParameters() const {
  int64_t total = 0;
  for (const Parameter* parameter : AllParameters()) {
    total += parameter->shape.num_elems();
  }
  return total;
}

void InitialValues(const Parameter& parameter, uint64_t seed, int64_t begin,
                   int64_t count, float* out) {
  const Init& init = parameter.init;
  if (init.std == 0) {
    for (int64_t i = 0; i < count; ++i) out[i] = init.value;
    return;
  }
  const uint64_t key = MixKey(seed, NameKey(parameter.name));
  // One Philox block gives four words: two pairs, four normals.
  const int64_t end_block = (begin + count + 3) / 4;
#pragma omp parallel for schedule(static)
  for (int64_t block = begin / 4; block < end_block; ++block) {
    const PhiloxBlock bits = Philox(key, static_cast<uint64_t>(block), 0);
    for (int pair = 0; pair < 2; ++pair) {
      const double radius =
          std::sqrt(-2.0 * std::log(OpenUniform(bits.x[2 * pair])));
      const double angle = 2.0 * M_PI * OpenUniform(bits.x[2 * pair + 1]);
      const double values[2] = {radius * std::cos(angle),
                                radius * std::sin(angle)};
      for (int j = 0; j < 2; ++j) {
        const int64_t i = block * 4 + 2 * pair + j - begin;
        if (i >= 0 && i < count) {
          out[i] = static_cast<float>(init.std * values[j]);
        }
      }
    }
  }
}

}  // namespace zero
