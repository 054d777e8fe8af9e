// A GPU as a Device: CUDA streams, events and stream-ordered work; pinned host
// memory. Only calls whose name says so synchronize.
#ifndef ZERO_KERNELS_CUDA_DEVICE_H_
#define ZERO_KERNELS_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/workspace.h"
#include "kernels/device.h"

namespace zero::cuda {

// REQUIRES: `stream` was made by a CudaDevice.
cudaStream_t HandleOf(Stream& stream);
void* ScratchOf(Stream& stream);  // device memory, kScratchBytes

// REQUIRES: `event` was made by a CudaDevice.
cudaEvent_t HandleOf(Event& event);

class CudaDevice final : public Device {
 public:
  // Errors: NotFound, and what the driver says, with the remedy.
  static absl::StatusOr<std::unique_ptr<Device>> Open(
      int index, const CudaOptions& options, int host_threads);
  ~CudaDevice() override;

  // Makes this device current on the calling thread: every thread that calls
  // a CUDA function of its own (NCCL) does this first.
  void MakeCurrent() const;
  int index() const { return index_; }

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  DeviceInfo info() const override;
  std::vector<std::string> notes() const override { return ops_.notes(); }
  DeviceMemory memory() const override;
  int64_t stream_bytes(StreamRole role) const override {
    return StreamBytes(role);
  }
  bool asynchronous() const override { return true; }
  bool Reaches(const Device& other) const override;
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override;
  std::unique_ptr<Stream> MakeStream(StreamRole role) override;
  std::unique_ptr<Event> MakeEvent() override;
  Ops& ops() override { return ops_; }
  Device& host() override { return *host_; }
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override;
  void CopyRows(Stream& stream, void* dst, size_t dst_stride, const void* src,
                size_t src_stride, size_t row_bytes, size_t num_rows) override;
  void PushRange(const char* name) override;
  void PopRange() override;

 private:
  CudaDevice(int index, const CudaOptions& options, int host_threads,
             int64_t context_bytes);
  void Free(void* data, size_t bytes, MemoryKind kind) override;

  int index_;
  int64_t context_bytes_;
  CudaOps ops_;
  std::unique_ptr<Device> host_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_DEVICE_H_
