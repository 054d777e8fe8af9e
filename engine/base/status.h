// Status macros: world errors (a file, a config, a peer) travel as
// absl::Status; caller mistakes are ZERO_CHECKs (kernels/check.h).
//
// A message says who, what was found, what was expected and the remedy.
#ifndef ZERO_ENGINE_BASE_STATUS_H_
#define ZERO_ENGINE_BASE_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace zero {

// "CONTEXT: MESSAGE", with the same code; OK stays OK.
inline absl::Status WithContext(absl::string_view context,
                                const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(context, ": ", status.message()));
}

}  // namespace zero

#define ZERO_STATUS_CONCAT_(a, b) a##b
#define ZERO_STATUS_CONCAT(a, b) ZERO_STATUS_CONCAT_(a, b)

// Returns from the enclosing function when `expression` is not OK.
#define ZERO_RETURN_IF_ERROR(expression)       \
  do {                                         \
    absl::Status zero_status = (expression);   \
    if (!zero_status.ok()) return zero_status; \
  } while (false)

// ZERO_ASSIGN_OR_RETURN(auto x, F()): x = value of F(), or returns its status.
#define ZERO_ASSIGN_OR_RETURN(lhs, expression)                              \
  ZERO_ASSIGN_OR_RETURN_IMPL(ZERO_STATUS_CONCAT(zero_status_or_, __LINE__), \
                             lhs, expression)

#define ZERO_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expression) \
  auto tmp = (expression);                               \
  if (!tmp.ok()) return std::move(tmp).status();         \
  lhs = std::move(tmp).value()

#endif  // ZERO_ENGINE_BASE_STATUS_H_
