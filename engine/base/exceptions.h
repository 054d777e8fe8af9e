// The engine's own errors are statuses; exceptions of libraries and the system
// end here.
#ifndef ZERO_ENGINE_BASE_EXCEPTIONS_H_
#define ZERO_ENGINE_BASE_EXCEPTIONS_H_

#include <functional>

#include "absl/status/status.h"

namespace zero {

// Runs `work` and turns an exception into its status: ResourceExhausted, with
// the remedy, for memory that the system refuses, else Internal with its text.
// Every thread needs one, since an exception ends with its thread.
absl::Status CatchExceptions(const std::function<absl::Status()>& work);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_EXCEPTIONS_H_
