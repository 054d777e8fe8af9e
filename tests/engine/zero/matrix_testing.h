// The equality matrix: all choices that must not change a bit, and its points.
// A spanning subset is in matrix_test.cc, the product in tests/matrix.
#ifndef ZERO_TESTS_ENGINE_ZERO_MATRIX_TESTING_H_
#define ZERO_TESTS_ENGINE_ZERO_MATRIX_TESTING_H_

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"

namespace zero {

// Odd widths, one table for embedding and head, and a vocabulary that no number
// of ranks divides.
inline ModelConfig OddConfig(ModelFamily family) {
  ModelConfig config = TinyConfig(family);
  const bool is_gpt2 = family == ModelFamily::kGpt2;
  config.tie_word_embeddings = true;
  if (!is_gpt2) config.vocab_size = kManyWords;
  config.num_hidden_layers = 3;
  config.hidden_size = 33;
  config.num_attention_heads = 3;
  config.num_key_value_heads = is_gpt2 ? 3 : 1;
  config.head_dim = is_gpt2 ? 11 : 10;
  config.intermediate_size = 41;
  config.resid_pdrop = 0.1;
  return config;
}

// A stage, and the home of its states.
struct MatrixStates {
  int stage;
  StateHomes homes = {};
  double host_share = 1;
  const char* name = "";
};
inline constexpr MatrixStates kMatrixStates[] = {
    {.stage = 0},
    {.stage = 1},
    {.stage = 2},
    {.stage = 3},
    {.stage = 2,
     .homes = {.optimizer = Home::kHost},
     .host_share = 0.5,
     .name = ", half of the optimizer on the host"},
    {.stage = 2,
     .homes = {.optimizer = Home::kNvme},
     .name = ", optimizer on a disk"},
    {.stage = 3,
     .homes = {.parameters = Home::kNvme, .optimizer = Home::kNvme},
     .name = ", all on a disk"}};

// For the files of all jobs, one after the other.
inline const std::string& MatrixDiskFolder() {
  static const TempDir folder;
  return folder.path();
}

// A point of the matrix: a value on every axis.
struct MatrixPoint {
  enum Axis {
    kFamily,
    kDType,
    kWorld,
    // The axes below must not change a bit.
    kStates,
    kBucket,
    kOverlap,
    kRecompute,
    kDelays,
    kNumAxes
  };
  static constexpr std::array<int, kNumAxes> kSizes = {
      2,
      2,
      4,
      static_cast<int>(std::size(kMatrixStates)),
      3,
      2,
      static_cast<int>(std::size(kRecomputeLevels)),
      2};

  std::array<int, kNumAxes> at = {};

  ModelFamily family() const {
    return at[kFamily] == 0 ? ModelFamily::kGpt2 : ModelFamily::kLlama;
  }
  DType dtype() const { return at[kDType] == 0 ? DType::kF32 : DType::kBF16; }
  int world() const { return at[kWorld] + 1; }
  const MatrixStates& states() const { return kMatrixStates[at[kStates]]; }

  // The same model, precision and number of ranks, and the first value on all
  // other axes.
  MatrixPoint base() const {
    MatrixPoint base = *this;
    for (int axis = kStates; axis < kNumAxes; ++axis) base.at[axis] = 0;
    return base;
  }

  std::string ToString() const {
    return absl::StrCat(
        ModelFamilyName(family()), ", ", DTypeName(dtype()), ", ", world(),
        " ranks, stage ", states().stage, states().name, ", bucket ",
        BucketElems(), at[kOverlap] ? "" : ", ",
        at[kOverlap] ? ", no overlap" : "overlap", ", recompute ",
        kRecomputeNames[at[kRecompute]], at[kDelays] ? ", delays" : "");
  }

  // All three blocks in one bucket, or two, or each in its own.
  int64_t BucketElems() const {
    constexpr int64_t kElems[] = {1 << 20, 16'000, 1};
    return kElems[at[kBucket]];
  }

  // Twenty steps; freed memory is poisoned in all jobs.
  Job ToJob() const {
    Job job;
    job.config = OddConfig(family());
    job.world = world();
    job.steps = 20;
    job.rows = family() != ModelFamily::kGpt2;
    job.options.param_dtype = dtype();
    job.options = AtStage(job.options, states().stage);
    job.options.plan.homes = states().homes;
    job.options.plan.host_share = states().host_share;
    job.options.swap.path = MatrixDiskFolder();
    job.options.plan.reduce_bucket_elems = BucketElems();
    job.options.plan.gather_bucket_elems = BucketElems();
    job.options.overlap = at[kOverlap] == 0;
    job.options.recompute = kRecomputeLevels[at[kRecompute]];
    if (at[kDelays] == 1) AddDelays(&job);
    return job;
  }
};

// All points, in the order of their axes.
inline std::vector<MatrixPoint> AllMatrixPoints() {
  std::vector<MatrixPoint> points = {MatrixPoint()};
  for (int axis = 0; axis < MatrixPoint::kNumAxes; ++axis) {
    std::vector<MatrixPoint> more;
    for (const MatrixPoint& point : points) {
      for (int value = 0; value < MatrixPoint::kSizes[axis]; ++value) {
        more.push_back(point);
        more.back().at[axis] = value;
      }
    }
    points = std::move(more);
  }
  return points;
}

}  // namespace zero

#endif  // ZERO_TESTS_ENGINE_ZERO_MATRIX_TESTING_H_
