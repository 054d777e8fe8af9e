// One rank's connection to the others by NCCL: the communicators of its
// channels, the run's first failure, and the thread that watches them.
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
  // When the watch saw the collective begin; used by the watch alone.
  absl::Time begun = absl::InfiniteFuture();
};

// One channel of this rank: a communicator and its sequence of collectives.
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

  // The oldest collective that this rank has issued and not finished, or null.
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

  // The channels, in the order of Rank's ends.
  const std::vector<std::unique_ptr<NcclChannel>>& channels() const {
    return channels_;
  }

  // The ranks that share this rank's GPU, including it; the GPUs of all ranks.
  int num_sharers() const { return num_sharers_; }
  int num_host_sharers() const { return num_host_sharers_; }
  int num_gpus() const { return num_gpus_; }

  void Run(NcclChannel& channel, Stream& stream, const Collective& collective);
  std::shared_ptr<void> Register(NcclChannel& channel, void* data,
                                 size_t bytes);

  // Fails the run; the first failure of any rank counts. `missing`: as for
  // StoreFailure.
  void Fail(const absl::Status& status, const std::vector<int>& missing = {});
  absl::Status status() const;
  // The missing ranks of that failure, as this rank knows them: the rank that
  // serves the store may be gone.
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

  // Makes the calls of Run. Returns false if one failed, or if the run has.
  bool Launch(NcclChannel& channel, Stream& stream,
              const Collective& collective, const NcclCall& call);
  std::unique_ptr<Event> TakeEvent();

  // The thread that watches.
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

  // Held around every NCCL call on a communicator: an abort ends such calls.
  std::mutex calls_;
  // Guards everything below, and the contents of channels_ except their
  // communicators. Where both are taken, it is taken after calls_.
  mutable std::mutex state_;
  absl::Status failure_;
  std::vector<int> missing_;
  std::vector<std::unique_ptr<Event>> idle_;
  bool closing_ = false;
  std::condition_variable close_;

  // PublishProgress's text and when it ran last; used by the watch alone.
  std::string published_;
  absl::Time published_at_ = absl::InfinitePast();
  // When the watch entered the CUDA or NCCL call it is in, by ToUnixNanos; 0 if
  // it is in none.
  const std::shared_ptr<std::atomic<int64_t>> in_driver_since_ =
      std::make_shared<std::atomic<int64_t>>(0);
  std::thread watch_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_LINK_H_
