#include "engine/tensor/shape.h"

#include "absl/strings/str_cat.h"

namespace zero {

std::string Shape::ToString() const {
  std::string text = "[";
  for (int i = 0; i < num_dims_; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", dims_[i]);
  }
  return text + "]";
}

std::ostream& operator<<(std::ostream& os, const Shape& shape) {
  return os << shape.ToString();
}

}  // namespace zero
