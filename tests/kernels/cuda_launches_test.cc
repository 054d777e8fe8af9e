// Ops over lists launch a kernel for many entries of them, not one for each:
// the pieces of a large model on many ranks are small, and launches would cost
// more than their work.
#include "tests/kernels/optimizer_test_util.h"
#include "tests/support/cuda_emulator/control.h"

namespace zero {
namespace {

class CudaLaunchesTest : public testing::Test {
 protected:
  CudaLaunchesTest()
      : device_(*MakeCudaDevice(0)),
        stream_(device_->MakeStream(StreamRole::kCompute)) {}
  ~CudaLaunchesTest() override { stream_->Synchronize(); }

  // Kernels that call(ops, stream) launches.
  int64_t NumKernels(const std::function<void(Ops&, Stream&)>& call) {
    stream_->Synchronize();
    const int64_t before = emulator::NumKernels();
    call(device_->ops(), *stream_);
    stream_->Synchronize();
    return emulator::NumKernels() - before;
  }

 private:
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

// Each with one that adds the runs of its spans.
TEST_F(CudaLaunchesTest, ManySumsOfSquaresGoToALaunch) {
  const Array x = Array::Normal(DType::kF32, 1000, 1);
  TestVector<double> sums(200);
  std::vector<SquaredSpan> spans;
  for (double& sum : sums) spans.push_back({x.vector(), &sum});
  EXPECT_EQ(NumKernels([&](Ops& ops, Stream& stream) {
              ops.SumSquares(stream, {spans});
            }),
            4);
}

TEST_F(CudaLaunchesTest, ManyRangesOfAnOptimizerGoToALaunch) {
  const std::vector<UpdateRange> ranges = ManyRanges();
  ASSERT_EQ(ranges.size(), 400u);
  FlatParams params(DType::kBF16, DType::kBF16, kSpan);
  Array m(DType::kF32, kSpan), v(DType::kF32, kSpan);
  const UpdateState state = params.state(ranges);
  EXPECT_EQ(NumKernels([&](Ops& ops, Stream& stream) {
              ops.AdamW(stream, {state, m.floats(), v.floats()});
            }),
            5);
  EXPECT_EQ(NumKernels([&](Ops& ops, Stream& stream) {
              ops.Sgd(stream, {state, m.floats()});
            }),
            5);
  std::vector<TensorPart> parts;
  for (int64_t i = 0; i < 400; ++i) parts.push_back({i, 0, 400});
  TestVector<double> norms(800);
  const LambArgs lamb{{state, m.floats(), v.floats()}, parts, norms.data()};
  // Each with one that adds the runs of its ranges, or makes their ratios.
  EXPECT_EQ(NumKernels([&](Ops& ops, Stream& stream) {
              ops.LambMoments(stream, lamb);
            }),
            10);
  EXPECT_EQ(NumKernels(
                [&](Ops& ops, Stream& stream) { ops.LambApply(stream, lamb); }),
            10);
}

}  // namespace
}  // namespace zero
