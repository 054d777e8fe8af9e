// Every point of the equality matrix, 20 steps each.
// `ninja check-matrix` runs it.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/zero/matrix_testing.h"

namespace zero {
namespace {

// One model, precision and number of ranks.
class StagesMatrixTest : public testing::TestWithParam<MatrixPoint> {};

TEST_P(StagesMatrixTest, EveryChoiceGivesTheBitsOfStageZero) {
  const Outcome base = Train(GetParam().ToJob());
  for (const MatrixPoint& point : AllMatrixPoints()) {
    if (point.base().at != GetParam().at) continue;
    SCOPED_TRACE(point.ToString());
    EXPECT_EQ(Train(point.ToJob()), base);
  }
}

std::vector<MatrixPoint> Bases() {
  std::vector<MatrixPoint> bases;
  for (const MatrixPoint& point : AllMatrixPoints()) {
    if (point.base().at == point.at) bases.push_back(point);
  }
  return bases;
}

INSTANTIATE_TEST_SUITE_P(All, StagesMatrixTest, testing::ValuesIn(Bases()),
                         [](const testing::TestParamInfo<MatrixPoint>& info) {
                           const MatrixPoint& point = info.param;
                           return absl::StrCat(ModelFamilyName(point.family()),
                                               "_", DTypeName(point.dtype()),
                                               "_", point.world(), "_ranks");
                         });

}  // namespace
}  // namespace zero
