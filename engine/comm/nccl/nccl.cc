#include "engine/comm/nccl/nccl.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/nccl/link.h"
#include "kernels/check.h"

namespace zero {
namespace {

// From this version on, ranks can share a GPU, if they ask for it.
constexpr int kSharedGpuVersion = NCCL_VERSION(2, 30, 0);
constexpr char kShareGpus[] = "NCCL_MULTI_RANK_GPU_ENABLE";

int VersionNumber() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclLink> link, NcclChannel& channel)
      : Communicator(channel.place, static_cast<int>(channel.members.size()),
                     BulkAlgorithm::kNative),
        link_(std::move(link)),
        channel_(channel) {}

  void Run(Stream& stream, Collective collective) override {
    ZERO_CHECK(stream.device().kind() == DeviceKind::kCuda)
        << "nccl: a stream of the " << DeviceKindName(stream.device().kind())
        << " device, want a GPU's";
    // The stream calls this at once, so `collective` may be captured by
    // reference.
    stream.Enqueue([&] { link_->Run(channel_, stream, collective); });
  }
  std::shared_ptr<void> Register(void* data, size_t bytes) override {
    return link_->Register(channel_, data, bytes);
  }
  void Abort(const absl::Status& status) override {
    ZERO_CHECK(!status.ok()) << "nccl: Abort with a status that is OK";
    link_->Fail(absl::Status(
        status.code(),
        absl::StrCat("nccl: rank ", channel_.members[channel_.place],
                     " aborted the run: ", status.message())));
  }
  absl::Status status() const override { return link_->status(); }
  int64_t received_bytes() const override { return channel_.received_bytes; }

 private:
  const std::shared_ptr<NcclLink> link_;
  NcclChannel& channel_;
};

}  // namespace

absl::StatusOr<std::string> NcclVersion() {
  const int version = VersionNumber();
  return absl::StrCat("NCCL ", version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

absl::Status CheckRanksOfGpus(int ranks, int gpus) {
  if (ranks <= gpus) return absl::OkStatus();
  const bool asked = GetEnv(kShareGpus).value_or("0") != "0";
  if (VersionNumber() >= kSharedGpuVersion && asked) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(const std::string version, NcclVersion());
  return absl::FailedPreconditionError(absl::StrCat(
      "nccl: ", ranks, " ranks on ", gpus, gpus == 1 ? " GPU" : " GPUs",
      " of this machine, but ", version, " needs a GPU for each; ",
      VersionNumber() >= kSharedGpuVersion
          ? absl::StrCat("set ", kShareGpus, "=1")
          : absl::StrCat("NCCL 2.30 can share one with ", kShareGpus, "=1"),
      ", or set communication.backend to \"local\""));
}

absl::StatusOr<std::function<absl::Duration()>> ConnectNccl(
    std::shared_ptr<Store> store, const NcclOptions& options, Rank* rank) {
  ZERO_CHECK(rank->device->kind() == DeviceKind::kCuda)
      << "nccl: the device is " << DeviceKindName(rank->device->kind());
  ZERO_ASSIGN_OR_RETURN(
      const std::shared_ptr<NcclLink> link,
      NcclLink::Open(std::move(store),
                     static_cast<cuda::CudaDevice&>(*rank->device), options));
  for (const auto& channel : link->channels()) {
    rank->end(channel->channel) =
        std::make_unique<NcclCommunicator>(link, *channel);
  }
  absl::StrAppend(&rank->kind, " ", OnGpus(link->num_gpus()));
  rank->memory.sharers = link->num_sharers();
  rank->memory.host_sharers = link->num_host_sharers();
  rank->missing = [link] { return link->missing(); };
  return link->watch_in_driver();
}

}  // namespace zero
