// Batches and weights on their way to the device, through two buffers of host
// memory: one is filled while the other is being sent.
#ifndef ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_
#define ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "engine/autograd/context.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/step.h"
#include "kernels/device.h"

namespace zero {

class BatchUpload {
 public:
  static constexpr int kNumBuffers = 2;  // host buffers, bytes() each

  BatchUpload(Device& device, Stream& compute)
      : device_(&device), compute_(&compute) {}

  // Makes both buffers at least this large.
  absl::Status Reserve(int64_t bytes);
  // Large enough for each of the batches.
  absl::Status Reserve(absl::Span<const HostBatch> batches);
  int64_t bytes() const { return bytes_; }

  // Copies the batch into `arena` and points `view` there; `batch`'s memory may
  // then be freed. Waits if the host is two batches ahead of the device.
  void Upload(const HostBatch& batch, Arena& arena, BatchView* view);
  // Frees the last batch's memory.
  void Drop() { memory_ = Tensor(); }

  // Calls `fill` with a host buffer and then `launch`, whose kernels may read
  // it. The buffer is reused two calls later.
  void Stage(const std::function<void(void* host)>& fill,
             const std::function<void(const void* host)>& launch);

 private:
  struct Staging {
    Buffer memory;
    std::unique_ptr<Event> sent;
  };
  Staging& Next() { return buffers_[next_++ % buffers_.size()]; }

  Device* device_;
  Stream* compute_;
  std::array<Staging, kNumBuffers> buffers_;
  size_t next_ = 0;
  int64_t bytes_ = 0;
  Tensor memory_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_
