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

bool IsNumber(const std::string& text, double* value) {
  return absl::SimpleAtod(text, value) && std::isfinite(*value);
}

// The empty description keeps the help text as it is.
CLI::Validator Check(std::function<bool(const std::string&)> accepts,
                     std::string wanted) {
  return CLI::Validator(
      [accepts = std::move(accepts),
       wanted = std::move(wanted)](const std::string& text) {
        return accepts(text) ? std::string()
                             : absl::StrCat("\"", text, "\" is not ", wanted);
      },
      "");
}

}  // namespace

CLI::Validator WholeNumber(int64_t min, int64_t max) {
  return Check(
      [=](const std::string& text) {
        int64_t value = 0;
        return absl::SimpleAtoi(text, &value) && value >= min && value <= max;
      },
      Wanted("a whole number", min, max, std::numeric_limits<int64_t>::max()));
}

CLI::Validator Number(double min, double max) {
  return Check(
      [=](const std::string& text) {
        double value = 0;
        return IsNumber(text, &value) && value >= min && value <= max;
      },
      Wanted("a number", min, max, std::numeric_limits<double>::infinity()));
}

CLI::Validator NumberAbove(double min, double max) {
  return Check(
      [=](const std::string& text) {
        double value = 0;
        return IsNumber(text, &value) && value > min && value <= max;
      },
      absl::StrCat("a number in (", min, ", ", max, "]"));
}

}  // namespace zero
