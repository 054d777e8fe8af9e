#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "tools/cli/commands.h"
#include "tools/cli/signals.h"

namespace zero {
namespace {

constexpr char kPayload[] = "zero/exit_code";

}  // namespace

int ExitCodeOf(const absl::Status& status) {
  int code = status.ok() ? 0 : absl::IsCancelled(status) ? StopExitCode() : 1;
  if (const auto own = status.GetPayload(kPayload)) {
    ZERO_CHECK(absl::SimpleAtoi(std::string(*own), &code));
  }
  return code;
}

absl::Status WithExitCode(absl::Status status, int code) {
  status.SetPayload(kPayload, absl::Cord(absl::StrCat(code)));
  return status;
}

}  // namespace zero
