#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "engine/config/elastic_batch.h"
#include "engine/config/resolve.h"

namespace zero {
namespace {

constexpr int64_t kMaxBatch = int64_t{1} << 30;
// per_device_train_batch_size of Hugging Face's Trainer, by default.
constexpr int64_t kTrainersMicroBatch = 8;
constexpr char kBatch[] = "train_batch_size";
constexpr char kMicro[] = "train_micro_batch_size_per_gpu";
constexpr char kSteps[] = "gradient_accumulation_steps";

// "8 or 12": the multiples of `unit` around `value`.
std::string Multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  return below == 0 ? absl::StrCat(unit)
                    : absl::StrCat(below, " or ", below + unit);
}

// "4 or 6": the numbers of `worlds` around `world`, which is none of them.
std::string Nearest(const std::vector<int64_t>& worlds, int64_t world) {
  const auto above = std::lower_bound(worlds.begin(), worlds.end(), world);
  std::vector<int64_t> near;
  if (above != worlds.begin()) near.push_back(*std::prev(above));
  if (above != worlds.end()) near.push_back(*above);
  return absl::StrJoin(near, " or ");
}

}  // namespace

std::string BatchResolver::Ranks() const {
  return absl::StrCat(options_.world, options_.world == 1 ? " rank" : " ranks");
}

void BatchResolver::Batch() {
  if (config_.elasticity.enabled) return Elastic();
  const std::string batch = kBatch, micro = kMicro, steps = kSteps;
  const int64_t world = options_.world;
  int64_t& b = config_.train_batch_size;
  int64_t& m = config_.train_micro_batch_size_per_gpu;
  int64_t& s = config_.gradient_accumulation_steps;
  const bool has_b = Given(batch), has_s = Given(steps);
  bool has_m = Given(micro);
  const std::string ranks = Ranks();
  if (!has_b && !has_m) {
    if (!IsAuto(batch) && !IsAuto(micro)) {
      return Problem(batch, "missing; want ", batch,
                     " (sequences per step) or ", micro,
                     " (sequences of a rank in one pass), to which ", steps,
                     " may be added; the others follow");
    }
    m = kTrainersMicroBatch;
    has_m = true;
    Derived(micro, "that of Hugging Face's Trainer");
    Note(Origin(micro), ": ", micro, " \"auto\" is ", m,
         ", as in Hugging Face's Trainer, unless it or ", batch, " is given");
  }
  if (!has_s) {
    const int64_t pass = m * world;
    s = has_b && has_m ? b / std::max<int64_t>(pass, 1) : 1;
    if (has_b && has_m && (s == 0 || s * pass != b)) {
      return Problem(batch, b, " is not a multiple of ", Cite(micro), " ", m,
                     " * ", ranks, "; write ", Multiples(b, pass));
    }
    if (has_b && has_m) {
      Derived(steps, absl::StrCat(batch, " / (", micro, " * ranks)"));
    }
  }
  if (!has_m) {
    const int64_t share = s * world;
    m = b / share;
    if (m == 0 || m * share != b) {
      return Problem(batch, b, " is not a multiple of ",
                     has_s ? absl::StrCat(Cite(steps), " ", s, " * ") : "",
                     ranks, "; write ", Multiples(b, share));
    }
    Derived(micro, absl::StrCat(batch, " / (", steps, " * ranks)"));
  }
  const double exact = static_cast<double>(m) * static_cast<double>(s) *
                       static_cast<double>(world);
  if (exact > static_cast<double>(kMaxBatch)) {
    return Problem(has_b ? batch : micro, Cite(micro), " ", m, " * ",
                   Cite(steps), " ", s, " * ", ranks,
                   " is more than 2^30 sequences per step");
  }
  const int64_t product = m * s * world;
  if (!has_b) {
    b = product;
    Derived(batch, absl::StrCat(micro, " * ", steps, " * ranks"));
  } else if (b != product) {
    Problem(batch, b, " is not ", Cite(micro), " ", m, " * ", Cite(steps), " ",
            s, " * ", ranks, " = ", product, "; write ", product,
            ", or delete one of the "
            "three");
  }
}

// Whether the keys that choose the batch are given and agree with each other.
bool BatchResolver::ElasticKeys() {
  const ElasticityConfig& elastic = config_.elasticity;
  bool good = true;
  const auto check = [&](bool holds, const std::string& path,
                         const auto&... parts) {
    if (!holds) Problem(path, parts...);
    good &= holds;
  };
  check(elastic.max_train_batch_size > 0, "elasticity.max_train_batch_size",
        "missing; want the most sequences of a step");
  check(!elastic.micro_batch_sizes.empty(), "elasticity.micro_batch_sizes",
        "missing; want a list of what a rank may take in one pass, for "
        "example [1, 2, 4]");
  check(elastic.min_gpus <= elastic.max_gpus, "elasticity.min_gpus",
        elastic.min_gpus, " is more than ", Cite("elasticity.max_gpus"), " ",
        elastic.max_gpus);
  return good;
}

void BatchResolver::Elastic() {
  if (!ElasticKeys()) return;
  const ElasticityConfig& elastic = config_.elasticity;
  const int64_t world = options_.world;
  const ElasticBatch batch = ChooseElasticBatch(elastic);
  const std::string sizes = absl::StrJoin(elastic.micro_batch_sizes, ", ");
  if (batch.worlds.empty()) {
    return Problem(
        "elasticity.micro_batch_sizes", "of ", sizes, " no batch of at most ",
        Cite("elasticity.max_train_batch_size"), " ",
        elastic.max_train_batch_size, " is for ", elastic.min_gpus, " to ",
        elastic.max_gpus, " ranks; want smaller ones, or a larger batch");
  }
  if (!std::binary_search(batch.worlds.begin(), batch.worlds.end(), world)) {
    return Problem("elasticity.enabled", Ranks(),
                   world == 1 ? " is none" : " are none",
                   " of the numbers that can share ", batch.train_batch_size,
                   " sequences in micro-batches of ", sizes, " (min_gpus ",
                   elastic.min_gpus, ", max_gpus ", elastic.max_gpus,
                   "); start ", Nearest(batch.worlds, world));
  }
  const int64_t share = batch.train_batch_size / world;
  const int64_t micro = ElasticMicroBatch(elastic.micro_batch_sizes, share);
  Choose(kBatch, batch.train_batch_size, &config_.train_batch_size);
  Choose(kMicro, micro, &config_.train_micro_batch_size_per_gpu);
  Choose(kSteps, share / micro, &config_.gradient_accumulation_steps);
}

void BatchResolver::Choose(const std::string& path, int64_t value,
                           int64_t* field) {
  const std::string ignore = "elasticity.ignore_non_elastic_batch_info";
  const int64_t given = std::exchange(*field, value);
  if (Given(path)) {
    // A config that was printed has all three.
    if (given == value) return;
    if (!config_.elasticity.ignore_non_elastic_batch_info) {
      return Problem(path, given, ", but ", Cite("elasticity.enabled"),
                     " makes it ", value, "; delete one, or set ", ignore);
    }
    Note(Origin(path), ": ", path, " is accepted and ignored: ", ignore,
         " is true");
  }
  Derived(path, "elasticity");
}

}  // namespace zero
