// The equality matrix: every choice that must not change a bit, and points of
// it. A spanning subset is in matrix_test.cc, the product in tests/matrix.
#ifndef ZERO_TESTS_ENGINE_ZERO_MATRIX_TESTING_H_
#define ZERO_TESTS_ENGINE_ZERO_MATRIX_TESTING_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/comm/communicator.h"
#include "tests/engine/zero/job_testing.h"

namespace zero {

// Every rank and stream waits a little before and behind every collective, and
// every rank before and behind every action; each as long as its own counter
// says. Sets `job`'s wrap and prepare.
inline void AddDelays(Job* job) {
  class Delays {
   public:
    explicit Delays(uint32_t seed) : state_(seed) {}
    std::chrono::microseconds Next() {
      state_ = state_ * 1664525u + 1013904223u;
      return std::chrono::microseconds((state_ >> 24) / 2);
    }

   private:
    uint32_t state_;
  };
  class Delaying final : public Communicator {
   public:
    Delaying(std::unique_ptr<Communicator> inner, uint32_t seed)
        : Communicator(inner->rank(), inner->world(), inner->algorithm()),
          inner_(std::move(inner)),
          delays_(seed) {}
    void Run(Stream& stream, Collective collective) override {
      Sleep(stream);
      inner_->Run(stream, std::move(collective));
      Sleep(stream);
    }
    void Abort(const absl::Status& status) override { inner_->Abort(status); }
    absl::Status status() const override { return inner_->status(); }

   private:
    void Sleep(Stream& stream) {
      stream.Enqueue(
          [delay = delays_.Next()] { std::this_thread::sleep_for(delay); });
    }
    const std::unique_ptr<Communicator> inner_;
    Delays delays_;
  };
  job->wrap = [](int rank, const std::string& channel, auto end) {
    return std::make_unique<Delaying>(std::move(end), 100 * rank + channel[0]);
  };
  job->prepare = [](const Rank& rank, Rig& rig) {
    rig->set_hook([delays = Delays(rank.rank())](const Action&, bool) mutable {
      std::this_thread::sleep_for(delays.Next());
    });
  };
}

// Odd widths, one table for embedding and head, and a vocabulary (61) that no
// number of ranks divides.
inline ModelConfig OddConfig(ModelFamily family) {
  ModelConfig config = TinyConfig(family);
  const bool is_gpt2 = family == ModelFamily::kGpt2;
  config.tie_word_embeddings = true;
  config.num_hidden_layers = 3;
  config.hidden_size = 33;
  config.num_attention_heads = 3;
  config.num_key_value_heads = is_gpt2 ? 3 : 1;
  config.head_dim = is_gpt2 ? 11 : 10;
  config.intermediate_size = 41;
  config.resid_pdrop = 0.1;
  return config;
}

// A place in the matrix: which value of every axis.
struct MatrixPoint {
  enum Axis {
    kFamily,
    kDType,
    kWorld,
    // What follows must not change a bit.
    kStage,
    kBucket,
    kOverlap,
    kRecompute,
    kDelays,
    kNumAxes
  };
  static constexpr std::array<int, kNumAxes> kSizes = {2, 2, 4, 4, 3, 2, 2, 2};

  std::array<int, kNumAxes> at = {};

  ModelFamily family() const {
    return at[kFamily] == 0 ? ModelFamily::kGpt2 : ModelFamily::kLlama;
  }
  DType dtype() const { return at[kDType] == 0 ? DType::kF32 : DType::kBF16; }
  int world() const { return at[kWorld] + 1; }

  // The same model, precision and number of ranks, and the first of all else.
  MatrixPoint base() const {
    MatrixPoint base = *this;
    for (int axis = kStage; axis < kNumAxes; ++axis) base.at[axis] = 0;
    return base;
  }

  std::string ToString() const {
    return absl::StrCat(
        ModelFamilyName(family()), ", ", DTypeName(dtype()), ", ", world(),
        " ranks, stage ", at[kStage], ", bucket ", BucketElems(),
        at[kOverlap] ? "" : ", ", at[kOverlap] ? ", no overlap" : "overlap",
        at[kRecompute] ? ", recompute" : "", at[kDelays] ? ", delays" : "");
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
    job.options.param_dtype = dtype();
    job.options = AtStage(job.options, at[kStage]);
    job.options.reduce_bucket_elems = BucketElems();
    job.options.gather_bucket_elems = BucketElems();
    job.options.overlap = at[kOverlap] == 0;
    job.options.recompute = at[kRecompute] == 1;
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
