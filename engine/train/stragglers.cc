#include "engine/train/stragglers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace zero {
namespace {

// The median of `value(rank)`, without `left_out`.
template <typename Value>
double MedianOfOthers(int world, int left_out, const Value& value) {
  std::vector<double> values;
  for (int rank = 0; rank < world; ++rank) {
    if (rank != left_out) values.push_back(value(rank));
  }
  return Median(std::move(values));
}

// The median of all ranks' values but the one at `place`. The values are
// sorted, so no rank's median costs a sort.
double MedianWithout(const std::vector<double>& sorted, size_t place) {
  const size_t size = sorted.size() - 1;
  const auto at = [&](size_t i) { return sorted[i < place ? i : i + 1]; };
  return size % 2 == 1 ? at(size / 2) : (at(size / 2 - 1) + at(size / 2)) / 2;
}

std::vector<bool> SlowRanks(const std::vector<OwnTimes>& of_ranks,
                            double factor) {
  std::vector<double> sorted;
  for (const OwnTimes& times : of_ranks) sorted.push_back(times.total());
  std::sort(sorted.begin(), sorted.end());
  std::vector<bool> slow;
  for (const OwnTimes& times : of_ranks) {
    const double own = times.total();
    const size_t place =
        std::lower_bound(sorted.begin(), sorted.end(), own) - sorted.begin();
    const double others = MedianWithout(sorted, place);
    slow.push_back(others > 0 && own > factor * others);
  }
  return slow;
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + middle, values.end());
  if (values.size() % 2 == 1) return values[middle];
  const double below =
      *std::max_element(values.begin(), values.begin() + middle);
  return (below + values[middle]) / 2;
}

StepPart StepPartOf(absl::string_view name) {
  for (const StepPart part : kStepParts) {
    if (name == StepPartName(part)) return part;
  }
  return StepPart::kCompute;
}

std::string StragglerText(const Straggler& straggler) {
  return absl::StrFormat(
      "rank %d on %s takes %.1f times as long as the other ranks for its own "
      "work; the largest difference is in %s",
      straggler.rank, straggler.host, straggler.factor,
      StepPartName(straggler.part));
}

std::vector<Straggler> StragglerDetector::Add(int64_t step,
                                              std::vector<OwnTimes> of_ranks) {
  const int world = static_cast<int>(of_ranks.size());
  if (factor_ == 0 || world < 2) return {};
  sums_.resize(world);
  double longest = 0;
  for (int rank = 0; rank < world; ++rank) {
    for (const StepPart part : kStepParts) {
      sums_[rank][part] += of_ranks[rank][part];
    }
    longest = std::max(longest, sums_[rank].total());
  }
  if (longest < kLeastMs) return {};
  of_ranks = std::exchange(sums_, {});
  num_slow_.resize(world);
  named_.resize(world);
  slow_.push_back(SlowRanks(of_ranks, factor_));
  steps_.push_back(std::move(of_ranks));
  for (int rank = 0; rank < world; ++rank) {
    num_slow_[rank] += slow_.back()[rank] ? 1 : 0;
    if (slow_.size() > kSteps) num_slow_[rank] -= slow_.front()[rank] ? 1 : 0;
  }
  if (slow_.size() > kSteps) {
    slow_.pop_front();
    steps_.pop_front();
  }
  std::vector<Straggler> found;
  for (int rank = 0; rank < world; ++rank) {
    if (named_[rank] || num_slow_[rank] < kSlowSteps) continue;
    named_[rank] = true;
    const auto typical = [&](int one, const auto& of) {
      std::vector<double> values;
      for (const auto& ranks : steps_) values.push_back(of(ranks[one]));
      return Median(std::move(values));
    };
    const auto compare = [&](const auto& of) {
      return std::pair(typical(rank, of),
                       MedianOfOthers(world, rank, [&](int other) {
                         return typical(other, of);
                       }));
    };
    const auto [own, others] =
        compare([](const OwnTimes& times) { return times.total(); });
    Straggler straggler{.rank = rank, .step = step, .factor = own / others};
    double most = 0;
    for (const StepPart part : kStepParts) {
      const auto [mine, theirs] =
          compare([part](const OwnTimes& times) { return times[part]; });
      if (mine - theirs <= most) continue;
      most = mine - theirs;
      straggler.part = part;
    }
    found.push_back(straggler);
  }
  return found;
}

}  // namespace zero
