// A failing GPU, seen from above: the fake runtime fails where a test asks it
// to.
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/check.h"
#include "kernels/device.h"
#include "tests/support/cuda_emulator/control.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string MessageOf(const absl::Status& status) {
  return std::string(status.message());
}

// The DeviceError that fn throws.
template <class Fn>
std::string ErrorOf(Fn fn) {
  try {
    fn();
  } catch (const cuda::DeviceError& error) {
    return error.what();
  }
  return "";
}

TEST(CudaFaultsTest, NoGpuAndOldDriverSayWhatToDo) {
  emulator::SetDeviceCount(0);
  const absl::Status none = MakeCudaDevice(0).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(none),
              AllOf(HasSubstr("cuda:0"), HasSubstr("driver finds none"),
                    HasSubstr("--device cpu")));
  EXPECT_EQ(NumCudaDevices(), 0);
  emulator::SetDeviceCount(2);
  emulator::FailCall("cudaGetDeviceCount", 1, cudaErrorInsufficientDriver);
  EXPECT_THAT(MessageOf(MakeCudaDevice(0).status()),
              AllOf(HasSubstr("driver here is for CUDA"),
                    HasSubstr("update it, or use --device cpu")));
}

TEST(CudaFaultsTest, OpeningADeviceThatFailsIsAStatus) {
  emulator::FailCall("cudaMemGetInfo", 1, cudaErrorLaunchFailure);
  const absl::Status status = MakeCudaDevice(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(MessageOf(status),
              AllOf(HasSubstr("cudaMemGetInfo"), HasSubstr("device.cc:"),
                    HasSubstr("cudaErrorLaunchFailure")));
}

TEST(CudaFaultsTest, MemoryThatIsUsedUpIsResourceExhausted) {
  const auto device = MakeCudaDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  emulator::FailCall("cudaMalloc", 1, cudaErrorMemoryAllocation);
  emulator::FailCall("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
  const absl::Status there =
      (*device)->Allocate(1234, MemoryKind::kDevice).status();
  EXPECT_EQ(there.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(there), HasSubstr("1234 bytes of device memory"));
  const absl::Status here =
      (*device)->Allocate(1234, MemoryKind::kHost).status();
  EXPECT_EQ(here.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(here), HasSubstr("1234 bytes of pinned host memory; "
                                         "free memory of this machine"));
}

TEST(CudaFaultsTest, AnAllocationThatFailsOtherwiseNamesItsCall) {
  const auto device = MakeCudaDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  for (const auto& [call, kind] :
       {std::pair("cudaMalloc", MemoryKind::kDevice),
        std::pair("cudaHostAlloc", MemoryKind::kHost)}) {
    emulator::FailCall(call, 1, cudaErrorLaunchFailure);
    EXPECT_THAT(ErrorOf([&, kind = kind] {
                  (*device)->Allocate(1234, kind).IgnoreError();
                }),
                HasSubstr(absl::StrCat("cuda:0: ", call, " at device.cc:")));
  }
}

TEST(CudaFaultsTest, HostWorkThatCannotBeEnqueuedIsAnErrorAndHurtsNothing) {
  const auto device = MakeCudaDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  emulator::FailCall("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
  EXPECT_THAT(ErrorOf([&] { (*device)->MakeStream(StreamRole::kHost); }),
              HasSubstr("pinned host memory"));
  for (const char* call : {"cudaLaunchHostFunc", "cuStreamWaitValue32"}) {
    const auto stream = (*device)->MakeStream(StreamRole::kHost);
    int done = 0;
    stream->Enqueue([&] { ++done; });
    emulator::FailCall(call, 1, cudaErrorLaunchFailure);
    EXPECT_THAT(ErrorOf([&] { stream->Enqueue([&] { ++done; }); }),
                HasSubstr(call));
    stream->Synchronize();
    EXPECT_GE(done, 1);
  }
}

TEST(CudaFaultsTest, FaultOfAKernelIsAnErrorThatNamesCallAndDevice) {
  const auto device = MakeCudaDevice(1);
  ASSERT_TRUE(device.ok()) << device.status();
  const auto stream = (*device)->MakeStream(StreamRole::kCompute);
  const auto event = (*device)->MakeEvent();
  stream->Synchronize();
  emulator::FailCall("cudaStreamSynchronize", 1, cudaErrorIllegalAddress);
  EXPECT_THAT(ErrorOf([&] { stream->Synchronize(); }),
              AllOf(HasSubstr("cuda:1: cudaStreamSynchronize"),
                    HasSubstr("illegal memory access"),
                    HasSubstr("cudaErrorIllegalAddress")));
  stream->Record(*event);
  emulator::FailCall("cudaEventQuery", 1, cudaErrorLaunchFailure);
  EXPECT_THAT(ErrorOf([&] { event->IsDone(); }), HasSubstr("cudaEventQuery"));
}

}  // namespace
}  // namespace zero
