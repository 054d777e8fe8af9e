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

  size_t LinearWorkspaceBytes(const LinearArgs& args) const override {
    return model_.LinearWorkspaceBytes(args);
  }
  size_t LinearBackwardInputWorkspaceBytes(
      const LinearBackwardInputArgs& args) const override {
    return model_.LinearBackwardInputWorkspaceBytes(args);
  }
  size_t LinearBackwardWeightWorkspaceBytes(
      const LinearBackwardWeightArgs& args) const override {
    return model_.LinearBackwardWeightWorkspaceBytes(args);
  }
  size_t LinearCrossEntropyWorkspaceBytes(
      const LinearCrossEntropyArgs& args) const override {
    return model_.LinearCrossEntropyWorkspaceBytes(args);
  }
  size_t AttentionForwardWorkspaceBytes(
      const AttentionForwardArgs& args) const override {
    return model_.AttentionForwardWorkspaceBytes(args);
  }
  size_t AttentionBackwardWorkspaceBytes(
      const AttentionBackwardArgs& args) const override {
    return model_.AttentionBackwardWorkspaceBytes(args);
  }
  size_t NormBackwardWorkspaceBytes(
      const NormBackwardArgs& args) const override {
    return model_.NormBackwardWorkspaceBytes(args);
  }
  size_t EmbeddingBackwardWorkspaceBytes(
      const EmbeddingBackwardArgs& args) const override {
    return model_.EmbeddingBackwardWorkspaceBytes(args);
  }

  void Linear(Stream&, const LinearArgs&, Workspace) override {}
  void LinearBackwardInput(Stream&, const LinearBackwardInputArgs&,
                           Workspace) override {}
  void LinearBackwardWeight(Stream&, const LinearBackwardWeightArgs&,
                            Workspace) override {}
  void LinearCrossEntropy(Stream&, const LinearCrossEntropyArgs&,
                          Workspace) override {}
  void AttentionForward(Stream&, const AttentionForwardArgs&,
                        Workspace) override {}
  void AttentionBackward(Stream&, const AttentionBackwardArgs&,
                         Workspace) override {}
  void LayerNormForward(Stream&, const NormForwardArgs&) override {}
  void LayerNormBackward(Stream&, const NormBackwardArgs&, Workspace) override {
  }
  void RmsNormForward(Stream&, const NormForwardArgs&) override {}
  void RmsNormBackward(Stream&, const NormBackwardArgs&, Workspace) override {}
  void Rotary(Stream&, const RotaryArgs&) override {}
  void EmbeddingForward(Stream&, const EmbeddingForwardArgs&) override {}
  void EmbeddingBackward(Stream&, const EmbeddingBackwardArgs&,
                         Workspace) override {}
  void GeluForward(Stream&, const GeluForwardArgs&) override {}
  void GeluBackward(Stream&, const GeluBackwardArgs&) override {}
  void SwigluForward(Stream&, const SwigluForwardArgs&) override {}
  void SwigluBackward(Stream&, const SwigluBackwardArgs&) override {}
  void Dropout(Stream&, const DropoutArgs&) override {}
  void Add(Stream&, const AddArgs&) override {}
  void Cast(Stream&, const CastArgs&) override {}
  void Fill(Stream&, const FillArgs&) override {}
  void SumSquares(Stream&, const SumSquaresArgs&) override {}
  void Sum(Stream&, const SumArgs&) override {}
  void CountNonFinite(Stream&, const CountNonFiniteArgs&) override {}
  void Clip(Stream&, const ClipArgs&) override {}
  void SumRanks(Stream&, const SumRanksArgs&) override {}
  void AdamW(Stream&, const AdamWArgs&) override {}
  void Sgd(Stream&, const SgdArgs&) override {}
  void LambMoments(Stream&, const LambArgs&) override {}
  void LambApply(Stream&, const LambArgs&) override {}

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
