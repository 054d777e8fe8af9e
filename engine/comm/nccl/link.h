// One rank's connection to the others by NCCL: the communicators of its
// channels, the first failure of anybody, and the thread that watches.
#ifndef ZERO_ENGINE_COMM_NCCL_LINK_H_
#define ZERO_ENGINE_COMM_NCCL_LINK_H_

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/channel.h"
#include "engine/comm/communicator.h"
#include "engine/comm/nccl/nccl.h"
#include "engine/comm/progress.h"
#include "kernels/cuda/device.h"

namespace zero {

// A collective that is on a stream.
struct NcclCall {
  CollectiveMark mark;
  std::unique_ptr<Event> begin, end;
  // When the watch saw that; its own.
  absl::Time begun = absl::InfiniteFuture();
};

// A communicator of this rank: for a sequence of collectives.
struct NcclChannel {
  Channel channel;
  std::string name;          // ChannelText
  std::vector<int> members;  // ranks of the run, by their places
  int place = 0;             // of this rank
  ncclComm_t comm = nullptr;
  int64_t received_bytes = 0;   // see Communicator
  ChannelProgress progress;     // as far as the watch has seen, without a name
  CollectiveMark launching;     // by the host, which may wait for peers
  std::deque<NcclCall> flying;  // the watch alone takes some away

  // The first that this rank has issued and not finished; null: none.
  const CollectiveMark* Current() const;
};

// Threads: Run and Register by one, the rest by any.
class NcclLink : public std::enable_shared_from_this<NcclLink> {
 public:
  // See ConnectNccl.
  static absl::StatusOr<std::shared_ptr<NcclLink>> Open(
      std::shared_ptr<Store> store, cuda::CudaDevice& device,
      const NcclOptions& options);
  // Takes leave of the other ranks, or aborts after a failure.
  ~NcclLink();

  // All of them.
  const std::vector<std::unique_ptr<NcclChannel>>& channels() const {
    return channels_;
  }

  // Ranks whose GPU is this one's, it included; GPUs of all ranks.
  int num_sharers() const { return num_sharers_; }
  int num_host_sharers() const { return num_host_sharers_; }
  int num_gpus() const { return num_gpus_; }

  void Run(NcclChannel& channel, Stream& stream, const Collective& collective);
  std::shared_ptr<void> Register(NcclChannel& channel, void* data,
                                 size_t bytes);

  // The first failure of any rank counts, for all. `missing`: as StoreFailure.
  void Fail(const absl::Status& status, const std::vector<int>& missing = {});
  absl::Status status() const;
  // Of that failure; whoever keeps the store may be one of them, and gone.
  std::vector<int> missing() const;
  // See ConnectNccl.
  std::function<absl::Duration()> watch_in_driver() const;

 private:
  NcclLink(std::shared_ptr<Store> store, cuda::CudaDevice& device,
           const NcclOptions& options);

  // Start-up, in this order.
  absl::Status MeetOthers();
  absl::Status InitWorld();
  using InitFn = std::function<ncclResult_t(NcclChannel&, ncclConfig_t*)>;
  absl::Status AddChannel(Channel channel, const InitFn& init);
  ncclResult_t AwaitNccl(const NcclChannel& channel, absl::Time deadline);

  // Run: false after a failure, of this call or of the run.
  bool Launch(NcclChannel& channel, Stream& stream,
              const Collective& collective, const NcclCall& call);
  std::unique_ptr<Event> TakeEvent();

  // The watch.
  class DriverCall;
  void Watch();
  absl::Status Poll();
  absl::Status CheckErrors();
  void CheckTimeouts();
  bool HasPassed(const Event& event);
  NcclCall* FirstInFlight(NcclChannel& channel);
  void PublishProgress();
  absl::Status AwaitCause(const absl::Status& own);
  void Latch(const absl::Status& status, const std::vector<int>& missing);
  void AbortAll();
  void FailLate(const NcclChannel& channel, const CollectiveMark& call);
  std::string Inside() const;

  bool Finalize();

  const std::shared_ptr<Store> store_;
  cuda::CudaDevice& device_;
  const int rank_;
  const int world_;
  const int shards_;
  const absl::Duration timeout_;
  int num_sharers_ = 1, num_host_sharers_ = 1, num_gpus_ = 1;
  std::vector<std::unique_ptr<NcclChannel>> channels_;
  Buffer scratch_;  // see NcclPlace

  // Held around every call of NCCL on a communicator: an abort ends these.
  std::mutex calls_;
  // Guards all below, and what is in channels_ but their communicators. Taken
  // after calls_, where both are.
  mutable std::mutex state_;
  absl::Status failure_;
  std::vector<int> missing_;
  std::vector<std::unique_ptr<Event>> idle_;
  bool closing_ = false;
  std::condition_variable close_;

  absl::Time told_ = absl::InfinitePast();  // the watch's own
  std::string progress_;
  // Since when the watch is inside a call of CUDA or NCCL, by ToUnixNanos; 0:
  // it is not.
  const std::shared_ptr<std::atomic<int64_t>> in_driver_since_ =
      std::make_shared<std::atomic<int64_t>>(0);
  std::thread watch_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_LINK_H_
