// The meta device: addresses that must not be read, ops that compute nothing,
// and the workspace sizes of the device it models, which may be an absent GPU.
#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/device.h"
#include "kernels/cuda/workspace.h"
#include "kernels/ops.h"

namespace zero {
namespace {

// Bytes that a GPU's context, cuBLASLt, cuDNN and our own kernels take before
// the first allocation: those of an H200 with CUDA 13.0 and cuDNN 9.19.
constexpr int64_t kAssumedContextBytes = int64_t{540} << 20;

class MetaOps final : public Ops {
 public:
  explicit MetaOps(std::shared_ptr<const OpSizes> sizes)
      : sizes_(std::move(sizes)) {}

#define ZERO_OP(Name, Args)                                      \
  size_t Name##WorkspaceBytes(const Args& args) const override { \
    return sizes_->Name##WorkspaceBytes(args);                   \
  }                                                              \
  void Name(Stream&, const Args&, Workspace) override {}
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args) \
  void Name(Stream&, const Args&) override {}
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP
  size_t LossLogitsBytes(const LinearCrossEntropyArgs& args) const override {
    return sizes_->LossLogitsBytes(args);
  }

 private:
  std::shared_ptr<const OpSizes> sizes_;
};

// A device's description of itself.
struct Facts {
  DeviceKind kind;
  DeviceInfo info;
  DeviceMemory memory;
  std::function<int64_t(StreamRole)> stream_bytes;
};

class MetaDevice final : public Device {
 public:
  // `host`: null where the device is the host.
  MetaDevice(Facts facts, std::shared_ptr<const OpSizes> sizes,
             std::unique_ptr<Device> host)
      : facts_(std::move(facts)),
        ops_(std::move(sizes)),
        host_(std::move(host)) {}

  DeviceKind kind() const override { return facts_.kind; }
  DeviceInfo info() const override { return facts_.info; }
  DeviceMemory memory() const override { return facts_.memory; }
  int64_t stream_bytes(StreamRole role) const override {
    return facts_.stream_bytes(role);
  }

  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    // A page between two buffers, so that no end is another's beginning.
    if (bytes > kMaxBytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "meta: ", bytes, " bytes are more than any machine can address (",
          kMaxBytes, ")"));
    }
    const uintptr_t step = (bytes + 2 * kPageBytes - 1) & ~(kPageBytes - 1);
    const uintptr_t address = next_.fetch_add(step);
    return Buffer(this, kind, reinterpret_cast<void*>(address), bytes);
  }

  // Work enqueued on any role runs at once, on the caller.
  std::unique_ptr<Stream> MakeStream(StreamRole) override {
    return cpu::MakeStream(*this, StreamRole::kCompute);
  }
  std::unique_ptr<Event> MakeEvent() override { return cpu::MakeEvent(); }
  Ops& ops() override { return ops_; }
  Device& host() override { return host_ == nullptr ? *this : *host_; }
  void Copy(Stream&, void*, const void*, size_t) override {}

 private:
  static constexpr uintptr_t kPageBytes = 4096;
  static constexpr uintptr_t kMaxBytes = uintptr_t{1} << 52;

  void Free(void*, size_t, MemoryKind) override {}

  Facts facts_;
  MetaOps ops_;
  std::unique_ptr<Device> host_;
  // An address that is not canonical on any CPU that this runs on: reading it
  // faults.
  std::atomic<uintptr_t> next_{uintptr_t{1} << 60};
};

}  // namespace

std::unique_ptr<Device> MakeMetaDevice(Device& model) {
  Facts facts{DeviceKind::kMeta, model.info(), {}, [&model](StreamRole role) {
                return model.stream_bytes(role);
              }};
  facts.info.name = "meta of " + facts.info.name;
  // Not owned.
  return std::make_unique<MetaDevice>(
      std::move(facts),
      std::shared_ptr<const OpSizes>(std::shared_ptr<void>(), &model.ops()),
      &model.host() == &model ? nullptr : MakeMetaDevice(model.host()));
}

std::unique_ptr<Device> MakeAssumedGpu(const CudaOptions& options) {
  Facts facts{.kind = DeviceKind::kCuda,
              .info = {},
              .memory = {},
              .stream_bytes = cuda::StreamBytes};
  facts.info.name = "NVIDIA H100 80 GB (assumed: no GPU here)";
  facts.info.isa = "sm_90";
  facts.info.num_threads = 132;
  facts.info.memory_bytes = int64_t{81'000} << 20;
  facts.memory.context_bytes = kAssumedContextBytes;
  return std::make_unique<MetaDevice>(
      std::move(facts), std::make_shared<cuda::CudaSizes>(options),
      std::make_unique<cpu::CpuDevice>(
          cpu::CpuDevice::Options{.num_threads = 1}));
}

}  // namespace zero
