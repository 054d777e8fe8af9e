#include "engine/train/divergence.h"

#include <cmath>
#include <vector>

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/file.h"
#include "engine/base/status.h"

namespace zero {
namespace {

bool HasFixedScale(const Config& config) {
  return config.fp16.enabled && config.fp16.scaler.static_scale > 0;
}

std::string Remedy(const Config& config) {
  return absl::StrCat(
      HasFixedScale(config)
          ? "Lower fp16.loss_scale, or set it to 0 for a scale that adapts; "
            "else lower "
          : "Lower ",
      "optimizer.params.lr, lengthen the warm-up, set gradient_clipping, or "
      "look at the data");
}

}  // namespace

absl::Status CheckUnused(const Executor& executor, const Config& config,
                         Console* console) {
  const std::vector<std::string>& unused = executor.unused_parameters();
  if (!unused.empty() && !config.zero_optimization.ignore_unused_parameters) {
    return absl::FailedPreconditionError(
        absl::StrCat("no gradient reaches ", absl::StrJoin(unused, ", "),
                     "; freeze or remove them, or set "
                     "zero_optimization.ignore_unused_parameters to true"));
  }
  for (const std::string& name : unused) {
    console->Line(
        absl::StrCat("note: no gradient reaches ", name, "; it only decays"));
  }
  return absl::OkStatus();
}

absl::Status CheckSkips(const Config& config, const RunRecord& record,
                        Console* console) {
  const int64_t skips = record.consecutive_skips;
  if (skips == 0) return absl::OkStatus();
  const std::string& culprit = record.last.output.non_finite;
  // Squares are summed in fp64, so only the norm itself can be too large.
  const std::string reason =
      culprit.empty()
          ? "all gradients are finite, but their norm is beyond fp32 (3.4e38)"
          : "the gradient of " + culprit + " is not finite";
  // A streak is reported when it begins and whenever its length has doubled.
  if (absl::has_single_bit(static_cast<uint64_t>(skips))) {
    console->Line(absl::StrFormat(
        "step %d skipped%s: %s%s", record.step,
        skips == 1 ? "" : absl::StrFormat(", the last %d in a row", skips),
        reason,
        config.fp16.enabled && !HasFixedScale(config)
            ? absl::StrFormat("; loss scale now %g", record.scaler.scale)
            : ""));
  }
  if (skips < config.training.max_consecutive_skips) return absl::OkStatus();
  return absl::AbortedError(absl::StrFormat(
      "step %d: %s%s. training.max_consecutive_skips is %d. %s", record.step,
      skips == 1 ? "skipped: "
                 : absl::StrCat(
                       skips, " steps in a row were skipped; in the last one "),
      reason, config.training.max_consecutive_skips, Remedy(config)));
}

absl::Status CheckFinite(Executor& executor, const Config& config,
                         const RunRecord& record) {
  if (record.step == 0) return absl::OkStatus();
  const auto diverged = [&](const std::string& what) {
    const bool stays = PathExists(config.training.out_dir + "/final");
    return absl::AbortedError(absl::StrCat(
        "the run diverged: ", what, " at its last step, ", record.step,
        stays ? "; an earlier final/ stays. " : ". ", Remedy(config)));
  };
  // A single bad batch is skipped, even at the last step. Two skips in a row
  // may be the model's fault: finite weights can be ruined.
  if (!std::isfinite(record.last.output.loss) &&
      record.consecutive_skips != 1) {
    return diverged(absl::StrCat("the loss is ", record.last.output.loss));
  }
  // A skip that only lowers the fp16 scale is part of training.
  const LossScalerOptions& scaler = config.fp16.scaler;
  const bool scale_can_fall = config.fp16.enabled && scaler.static_scale == 0 &&
                              record.scaler.scale > scaler.min_loss_scale;
  if (record.consecutive_skips > 1 && !scale_can_fall) {
    return diverged(absl::StrCat(record.consecutive_skips,
                                 " steps in a row were skipped, counted"));
  }
  if (record.last_eval_step == record.step &&
      !std::isfinite(record.validation_loss)) {
    return diverged(
        absl::StrCat("the validation loss is ", record.validation_loss));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string culprit,
                        executor.states().FirstNonFiniteParameter());
  if (!culprit.empty()) return diverged(culprit + " is not finite");
  return absl::OkStatus();
}

absl::Status Rescue(const absl::Status& status, Session& session,
                    const RunRecord& record, RunFolder* folder) {
  if (status.ok() || !session.rank().status().ok() || record.step == 0) {
    return status;
  }
  const absl::StatusOr<std::string> bad =
      session.executor().states().FirstNonFiniteParameter();
  if (!bad.ok() || !bad->empty()) return status;
  const absl::Status saved = folder->SaveWeights("final.failed");
  if (saved.ok() && folder->weights().empty()) return status;  // not wanted
  return absl::Status(
      status.code(),
      saved.ok()
          ? absl::StrCat(status.message(), "; the weights after step ",
                         record.step, " are in ",
                         session.config().training.out_dir, "/",
                         folder->weights())
          : absl::StrCat(status.message(),
                         "; the weights are lost as well: ", saved.message()));
}

}  // namespace zero
