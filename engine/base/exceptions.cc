#include "engine/base/exceptions.h"

#include <exception>
#include <new>

namespace zero {

absl::Status CatchExceptions(const std::function<absl::Status()>& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "the system refused memory; use a smaller model or micro-batch, or "
        "raise the limit (ulimit -v)");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace zero
