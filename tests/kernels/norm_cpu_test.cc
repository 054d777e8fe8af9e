#include "tests/kernels/norm_checks.h"

namespace zero::norm_test {
namespace {

TEST(NormCpuTest, BitsDoNotDependOnTheNumberOfThreads) {
  const Layout l = {5000, 1, 72, 0};
  const Norm norm = {true, true};
  Array dy = Array::Normal(DType::kF32, l.size(), 1);
  Array sum = Array::Normal(DType::kF32, l.size(), 2);
  Array weight = Array::Normal(DType::kF32, l.width, 3);
  std::vector<Grads> grads;
  for (const int threads : {1, 2, 3}) {
    const auto device = MakeCpuDevice(threads);
    const auto stream = device->MakeStream(StreamRole::kCompute);
    grads.push_back(Backward({"", *device, device->ops(), *stream}, norm, l, dy,
                             sum, weight, nullptr, false, DType::kF32, false,
                             0));
    EXPECT_TRUE(grads[0].dx.SameBits(grads.back().dx));
    EXPECT_TRUE(grads[0].dweight.SameBits(grads.back().dweight));
    EXPECT_TRUE(grads[0].dbias.SameBits(grads.back().dbias));
  }
}

}  // namespace
}  // namespace zero::norm_test
