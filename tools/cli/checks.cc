#include "tools/cli/checks.h"

#include <cmath>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zero {
namespace {

// "a number >= 0", "a whole number in [1, 1024]".
template <typename T>
std::string Wanted(absl::string_view kind, T min, T max, T unlimited) {
  if (min == std::numeric_limits<T>::lowest()) return std::string(kind);
  return max == unlimited ? absl::StrCat(kind, " >= ", min)
                          : absl::StrCat(kind, " in [", min, ", ", max, "]");
}

// A number of [min, max], or of (min, max] where `open`. The empty description
// keeps the help text as it is.
template <typename T>
CLI::Validator Check(T min, T max, bool open, std::string wanted) {
  const auto check = [=](const std::string& text) {
    T value = 0;
    bool accepts;
    if constexpr (std::is_integral_v<T>) {
      accepts = absl::SimpleAtoi(text, &value);
    } else {
      accepts = absl::SimpleAtod(text, &value) && std::isfinite(value);
    }
    accepts =
        accepts && value >= min && value <= max && !(open && value == min);
    return accepts ? std::string()
                   : absl::StrCat("\"", text, "\" is not ", wanted);
  };
  return CLI::Validator(check, "");
}

}  // namespace

CLI::Validator WholeNumber(int64_t min, int64_t max) {
  return Check(
      min, max, false,
      Wanted("a whole number", min, max, std::numeric_limits<int64_t>::max()));
}

CLI::Validator Number(double min, double max) {
  return Check(
      min, max, false,
      Wanted("a number", min, max, std::numeric_limits<double>::infinity()));
}

CLI::Validator NumberAbove(double min, double max) {
  return Check(min, max, true,
               absl::StrCat("a number in (", min, ", ", max, "]"));
}

}  // namespace zero
