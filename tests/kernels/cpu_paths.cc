// The ways of the CPU: every SIMD target with every number of threads and,
// for products of 16-bit operands, converted or native.
#include "kernels/cpu/cpu_ops.h"
// cpu_ops.h comes before Highway.
#include <cstdlib>

#include "hwy/targets.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/pair_product.h"
#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

// All targets of this machine, including scalars. Under tsan the best one:
// sharing between threads does not depend on the vector width. Under asan the
// widest, a middle one and scalars: out-of-bounds accesses depend on that
// width.
std::vector<int64_t> SimdTargets() {
  std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
#if defined(__SANITIZE_THREAD__)
  targets.resize(1);
#elif defined(__SANITIZE_ADDRESS__)
  if (targets.size() > 3) {
    targets = {targets.front(), targets[targets.size() / 2], targets.back()};
  }
#endif
  return targets;
}

std::vector<int> ThreadCounts() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return {2};
#else
  return {1, 2};
#endif
}

// Calls fn(path) on a device of each of `modes`.
void ForEach(const std::vector<cpu::LowPrecision>& modes,
             const std::function<void(const Path&)>& fn) {
  for (const int64_t target : SimdTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    for (const int threads : ThreadCounts()) {
      for (const cpu::LowPrecision mode : modes) {
        cpu::CpuDevice::Options options;
        options.num_threads = threads;
        options.low_precision = mode;
        cpu::CpuDevice device(options);
        const auto stream = device.MakeStream(StreamRole::kCompute);
        const bool native = mode == cpu::LowPrecision::kNative;
        const std::string name = std::string(hwy::TargetName(target)) + ", " +
                                 std::to_string(threads) + " threads" +
                                 (modes.size() == 1 ? ""
                                  : native          ? ", native"
                                                    : ", converted");
        SCOPED_TRACE(name);
        fn({name, device, device.ops(), *stream, native,
            native && !cpu::PairIsas().empty()});
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace

void* AllocateTestMemory(size_t bytes) { return std::malloc(bytes); }
void FreeTestMemory(void* data) { std::free(data); }

void ForEachPath(const std::function<void(const Path&)>& fn) {
  ForEach({cpu::LowPrecision::kAuto}, fn);
}

void ForEachMatmulPath(const std::function<void(const Path&)>& fn) {
  const bool has_native =
      cpu::MatmulCache(1, cpu::LowPrecision::kNative).IsNative(DType::kBF16);
  std::vector<cpu::LowPrecision> modes = {cpu::LowPrecision::kConvert};
  if (has_native) modes.push_back(cpu::LowPrecision::kNative);
  ForEach(modes, fn);
}

void OnPath(const std::function<void(const Path&)>& fn) {
  const std::unique_ptr<Device> device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const bool native = cpu::CpuOps(1).HasNativeBf16();
  fn({"best", *device, device->ops(), *stream, native,
      native && !cpu::PairIsas().empty()});
}

}  // namespace zero
