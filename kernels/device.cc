#include "kernels/device.h"

#include <utility>

namespace zero {

const char* DeviceKindName(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda";
    case DeviceKind::kMeta:
      return "meta";
  }
  return "?";
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      kind_(other.kind_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) device_->Free(data_, bytes_, kind_);
    device_ = std::exchange(other.device_, nullptr);
    kind_ = other.kind_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) device_->Free(data_, bytes_, kind_);
}

void Device::CopyRows(Stream& stream, void* dst, size_t dst_stride,
                      const void* src, size_t src_stride, size_t row_bytes,
                      size_t num_rows) {
  for (size_t i = 0; i < num_rows; ++i) {
    Copy(stream, static_cast<char*>(dst) + i * dst_stride,
         static_cast<const char*>(src) + i * src_stride, row_bytes);
  }
}

}  // namespace zero
