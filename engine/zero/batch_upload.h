// Batches and weights on their way to the device, through two buffers of host
// memory: one is filled while the other is being sent.
#ifndef ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_
#define ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

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

  // Copies the next batch into `arena`; `batch`'s memory may then be freed.
  // Waits if the host is two batches ahead of the device.
  void Load(const HostBatch& batch, Arena& arena);
  const BatchView& next() const { return next_; }
  // Replaces the batch in use, whose memory is freed, by the next one.
  const BatchView& Use() {
    used_memory_ = std::move(next_memory_);
    return next_;
  }
  // Frees the memory of all batches.
  void Drop() { used_memory_ = next_memory_ = Tensor(); }

  // Calls `fill` with a host buffer and then `launch`, whose kernels may read
  // it. The buffer is reused two calls later.
  void Stage(const std::function<void(void* host)>& fill,
             const std::function<void(const void* host)>& launch);

 private:
  struct Staging {
    Buffer memory;
    std::unique_ptr<Event> sent;
  };
  Staging& Next() { return buffers_[num_staged_++ % buffers_.size()]; }

  Device* device_;
  Stream* compute_;
  std::array<Staging, kNumBuffers> buffers_;
  size_t num_staged_ = 0;
  int64_t bytes_ = 0;
  BatchView next_;
  Tensor next_memory_, used_memory_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_BATCH_UPLOAD_H_
