// The part of the equality matrix that `ninja check` has time for: a subset in
// which any two values of two axes meet.
#include <array>
#include <map>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/zero/matrix_testing.h"

namespace zero {
namespace {

// (axis, value) and (axis, value).
using Pair = std::array<int, 4>;

std::set<Pair> PairsOf(const MatrixPoint& point) {
  std::set<Pair> pairs;
  for (int a = 0; a < MatrixPoint::kNumAxes; ++a) {
    for (int b = a + 1; b < MatrixPoint::kNumAxes; ++b) {
      pairs.insert({a, point.at[a], b, point.at[b]});
    }
  }
  return pairs;
}

// Always one of the remaining points with the most new pairs.
std::vector<MatrixPoint> SpanningPoints() {
  const std::vector<MatrixPoint> all = AllMatrixPoints();
  std::set<Pair> missing;
  for (const MatrixPoint& point : all) missing.merge(PairsOf(point));
  std::vector<MatrixPoint> points;
  while (!missing.empty()) {
    const MatrixPoint* best = nullptr;
    size_t most = 0;
    for (const MatrixPoint& point : all) {
      size_t num_new = 0;
      for (const Pair& pair : PairsOf(point)) num_new += missing.count(pair);
      if (num_new <= most) continue;
      most = num_new;
      best = &point;
    }
    for (const Pair& pair : PairsOf(*best)) missing.erase(pair);
    points.push_back(*best);
  }
  return points;
}

TEST(MatrixTest, ASpanningSubsetGivesTheBitsOfStageZero) {
  const std::vector<MatrixPoint> points = SpanningPoints();
  // The two largest axes alone have 28 pairs.
  EXPECT_GE(points.size(), 28u);
  std::map<std::array<int, MatrixPoint::kNumAxes>, Outcome> bases;
  for (const MatrixPoint& point : points) {
    SCOPED_TRACE(point.ToString());
    Outcome& base = bases[point.base().at];
    if (base.losses.empty()) base = Train(point.base().ToJob());
    EXPECT_EQ(Train(point.ToJob()), base);
  }
}

TEST(MatrixTest, TheBucketSizesMakeThreePlans) {
  for (int family = 0; family < 2; ++family) {
    MatrixPoint point;
    point.at[MatrixPoint::kFamily] = family;
    std::vector<size_t> num_buckets;
    for (int bucket = 0; bucket < 3; ++bucket) {
      point.at[MatrixPoint::kBucket] = bucket;
      const Job job = point.ToJob();
      const auto model = MakeModel(job.config);
      num_buckets.push_back(
          MakePlan(DescribeUnits(*model),
                   job.options.plan_options(3, 3, job.algorithm))
              .reduce_buckets.size());
    }
    // Head and embedding are buckets of their own, and GPT-2's positions.
    EXPECT_EQ(num_buckets,
              (std::vector<size_t>{3, 4, family == 0 ? size_t{6} : 5}));
  }
}

// The comparison would be worthless if every job gave these bits.
TEST(MatrixTest, WhatMayChangeBitsDoes) {
  const Outcome base = Train(MatrixPoint().ToJob());
  for (int axis :
       {MatrixPoint::kFamily, MatrixPoint::kDType, MatrixPoint::kWorld}) {
    MatrixPoint other;
    other.at[axis] = 1;
    EXPECT_NE(Train(other.ToJob()).losses, base.losses) << other.ToString();
  }
}

}  // namespace
}  // namespace zero
