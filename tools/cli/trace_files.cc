#include "tools/cli/trace_files.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/file.h"
#include "engine/base/status.h"

namespace zero {
namespace {

// How long to wait for another process to write its part, at most about 300 MB.
constexpr absl::Duration kPatience = absl::Minutes(1);

std::string PartOf(const std::string& file, int first_rank) {
  return absl::StrCat(file, ".rank", first_rank);
}

}  // namespace

TraceFiles::TraceFiles(const RunOptions& run, const std::string& file)
    : own_(file) {
  if (file.empty() || run.ranks_here == run.ranks) return;
  is_part_ = run.first_rank() > 0;
  if (is_part_) {
    own_ = PartOf(file, run.first_rank());
    return;
  }
  for (int rank = run.ranks_here; rank < run.ranks; rank += run.ranks_here) {
    parts_.push_back(PartOf(file, rank));
  }
}

absl::Status TraceFiles::Check() const {
  if (!wanted()) return absl::OkStatus();
  ZERO_RETURN_IF_ERROR(WithContext("--trace", Trace::CheckFile(own_)));
  if (is_part_) std::remove(own_.c_str());
  return absl::OkStatus();
}

absl::Status TraceFiles::Write(const Trace& trace, bool awaits,
                               Console* console) const {
  if (!wanted()) return absl::OkStatus();
  const bool several = is_part_ || !parts_.empty();
  ZERO_RETURN_IF_ERROR(WithContext(
      "--trace", trace.Write(own_, several ? Trace::Times::kOfHost
                                           : Trace::Times::kOfRun)));
  std::vector<std::string> found, missing;
  const absl::Time deadline =
      awaits ? absl::Now() + kPatience : absl::InfinitePast();
  for (const std::string& part : parts_) {
    while (!PathExists(part) && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    (PathExists(part) ? found : missing).push_back(part);
  }
  ZERO_RETURN_IF_ERROR(WithContext("--trace", Trace::Append(own_, found)));
  console->Line(
      absl::StrCat("trace in ", own_, ": open it in https://ui.perfetto.dev"));
  if (!missing.empty()) {
    console->Line(absl::StrCat(
        "note: the trace lacks the parts that other processes wrote to ",
        absl::StrJoin(missing, ", "), ", which this one does not see"));
  }
  return absl::OkStatus();
}

}  // namespace zero
