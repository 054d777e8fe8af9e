// The meta device: addresses that must not be read, ops that compute nothing,
// and the workspace sizes of the device it models.
#include <atomic>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/cpu/device.h"
#include "kernels/ops.h"

namespace zero {
namespace {

class MetaOps final : public Ops {
 public:
  explicit MetaOps(Ops& model) : model_(model) {}

#define ZERO_OP(Name, Args)                                      \
  size_t Name##WorkspaceBytes(const Args& args) const override { \
    return model_.Name##WorkspaceBytes(args);                    \
  }                                                              \
  void Name(Stream&, const Args&, Workspace) override {}
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args) \
  void Name(Stream&, const Args&) override {}
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP

 private:
  Ops& model_;
};

class MetaDevice final : public Device {
 public:
  explicit MetaDevice(Device& model) : model_(model), ops_(model.ops()) {}

  DeviceKind kind() const override { return DeviceKind::kMeta; }

  DeviceInfo info() const override {
    DeviceInfo info = model_.info();
    info.name = "meta of " + info.name;
    return info;
  }

  int64_t stream_bytes() const override { return model_.stream_bytes(); }

  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    // A page between two buffers, so that no end is another's begin.
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
    return cpu::MakeStream(*this, StreamRole::kCompute, 1);
  }
  std::unique_ptr<Event> MakeEvent() override { return cpu::MakeEvent(); }
  Ops& ops() override { return ops_; }
  void Copy(Stream&, void*, const void*, size_t) override {}

 private:
  static constexpr uintptr_t kPageBytes = 4096;
  static constexpr uintptr_t kMaxBytes = uintptr_t{1} << 52;

  void Free(void*, size_t, MemoryKind) override {}

  Device& model_;
  MetaOps ops_;
  // Not a canonical address on any CPU that this runs on: reading faults.
  std::atomic<uintptr_t> next_{uintptr_t{1} << 60};
};

}  // namespace

std::unique_ptr<Device> MakeMetaDevice(Device& model) {
  return std::make_unique<MetaDevice>(model);
}

}  // namespace zero
