// The engine's own errors are statuses. Exceptions of libraries and of the
// standard library are caught here and become statuses.
#ifndef ZERO_ENGINE_BASE_EXCEPTIONS_H_
#define ZERO_ENGINE_BASE_EXCEPTIONS_H_

#include <functional>

#include "absl/status/status.h"

namespace zero {

// Runs `work` and turns an exception into a status: ResourceExhausted, with the
// remedy, if memory ran out, else Internal with the exception's text. Every
// thread needs its own call: an uncaught exception ends the program.
absl::Status CatchExceptions(const std::function<absl::Status()>& work);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_EXCEPTIONS_H_
