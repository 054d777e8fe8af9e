#include "engine/zero/schedule.h"

#include "absl/strings/str_cat.h"

namespace zero {
namespace {

const char* KindName(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "Forward";
    case ActionKind::kForwardBackward:
      return "ForwardBackward";
    case ActionKind::kBackward:
      return "Backward";
    case ActionKind::kNorm:
      return "Norm";
    case ActionKind::kUpdate:
      return "Update";
  }
  return "?";
}

}  // namespace

std::string ActionName(const Action& action, const Plan& plan) {
  if (action.unit < 0) return KindName(action.kind);
  return absl::StrCat(KindName(action.kind), "(", plan.units[action.unit].name,
                      ")");
}

std::vector<Action> MakeSchedule(const Plan& plan, int64_t micro_steps) {
  const int num_units = static_cast<int>(plan.units.size());
  const int last = num_units - 1;
  std::vector<Action> actions;
  for (int64_t micro = 0; micro < micro_steps; ++micro) {
    for (int u = 0; u < last; ++u) {
      actions.push_back({ActionKind::kForward, u, micro});
    }
    actions.push_back({ActionKind::kForwardBackward, last, micro});
    for (int u = last - 1; u >= 0; --u) {
      actions.push_back({ActionKind::kBackward, u, micro});
    }
  }
  actions.push_back({ActionKind::kNorm});
  for (int u = 0; u < num_units; ++u) {
    actions.push_back({ActionKind::kUpdate, u});
  }
  return actions;
}

}  // namespace zero
