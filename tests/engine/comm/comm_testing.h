// Helpers for the tests of engine/comm: ranks with a device and a stream, and
// typed arrays that read and write doubles.
#ifndef ZERO_TESTS_ENGINE_COMM_COMM_TESTING_H_
#define ZERO_TESTS_ENGINE_COMM_COMM_TESTING_H_

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/comm/local.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "tests/support/run_ranks.h"

namespace zero {

// The context of one rank: one compute thread, one stream, one channel.
struct RankContext {
  int rank;
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Stream> stream;  // destroyed before the memory of its work
};

// The group of each process, in order.
using Groups = std::vector<std::shared_ptr<LocalGroup>>;

inline LocalGroup& GroupOf(const Groups& groups, int rank) {
  const int world = groups.front()->world();
  return *groups[rank / (world / static_cast<int>(groups.size()))];
}

// Runs fn on every rank of all processes, on the calling thread's stream
// (kCompute) or a worker stream; returns fn's result, or else its group's
// status.
inline absl::Status RunOnGroups(
    const Groups& groups, StreamRole role,
    const std::function<absl::Status(RankContext&)>& fn) {
  return RunRanks(groups.front()->world(), [&](int rank) -> absl::Status {
    RankContext context;
    context.rank = rank;
    context.device = MakeCpuDevice(1);
    context.comm = GroupOf(groups, rank).Connect(rank, "test");
    context.stream = context.device->MakeStream(role);
    absl::Status status = fn(context);
    context.stream->Synchronize();
    status.Update(context.comm->status());
    return status;
  });
}
inline absl::Status RunOnGroup(
    const std::shared_ptr<LocalGroup>& group, StreamRole role,
    const std::function<absl::Status(RankContext&)>& fn) {
  return RunOnGroups({group}, role, fn);
}

// `size` elements of a dtype, integers among them, zero at first.
class Values {
 public:
  Values(DType dtype, int64_t size)
      : dtype_(dtype), size_(size), bytes_(size * DTypeBytes(dtype)) {}

  // value(i) for every i, rounded to the dtype.
  static Values Of(DType dtype, int64_t size,
                   const std::function<double(int64_t)>& value) {
    Values values(dtype, size);
    for (int64_t i = 0; i < size; ++i) values.Set(i, value(i));
    return values;
  }

  int64_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  void* data() { return bytes_.data(); }
  // The address of element i.
  void* at(int64_t i) { return bytes_.data() + i * DTypeBytes(dtype_); }

  double operator[](int64_t i) const {
    switch (dtype_) {
      case DType::kF32:
        return Get<float>(i);
      case DType::kBF16:
        return BF16ToF32(Get<uint16_t>(i));
      case DType::kF16:
        return F16ToF32(Get<uint16_t>(i));
      case DType::kF64:
        return Get<double>(i);
      case DType::kI32:
        return Get<int32_t>(i);
      case DType::kI64:
        return static_cast<double>(Get<int64_t>(i));
      case DType::kU8:
        return Get<uint8_t>(i);
      case DType::kU16:
        return Get<uint16_t>(i);
    }
    return 0;
  }
  void Set(int64_t i, double value) {
    const float f = static_cast<float>(value);
    switch (dtype_) {
      case DType::kF32:
        return Put(i, f);
      case DType::kBF16:
        return Put(i, F32ToBF16(f));
      case DType::kF16:
        return Put(i, F32ToF16(f));
      case DType::kF64:
        return Put(i, value);
      case DType::kI32:
        return Put(i, static_cast<int32_t>(value));
      case DType::kI64:
        return Put(i, static_cast<int64_t>(value));
      case DType::kU8:
        return Put(i, static_cast<uint8_t>(value));
      case DType::kU16:
        return Put(i, static_cast<uint16_t>(value));
    }
  }

  bool operator==(const Values& other) const {
    return dtype_ == other.dtype_ && bytes_ == other.bytes_;
  }

 private:
  template <class T>
  T Get(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void Put(int64_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }

  DType dtype_;
  int64_t size_;
  std::vector<char> bytes_;
};

inline constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16,
                                    DType::kF64};

// Elements of each piece: empty, odd, around vectors, and larger.
inline const std::vector<int64_t> kPieces = {1, 0, 31, 64, 33, 1023, 5000};

// Small integers that differ by rank, segment and element: exact in every
// dtype (bf16 counts to 256), and so are their sums over 5 ranks.
inline double Number(int rank, size_t segment, int64_t i) {
  return static_cast<double>((7 * rank + 3 * segment + i) % 41) - 20;
}

// Memory for the running sums of a reduce-scatter, filled with values that no
// sum may read.
struct Staging {
  Staging(const Communicator& comm, DType dtype, int64_t elems)
      : bytes(comm.StagingBytes(dtype, elems), '\xff') {}
  operator Workspace() { return {bytes.data(), bytes.size()}; }
  std::vector<char> bytes;
};

}  // namespace zero

#endif  // ZERO_TESTS_ENGINE_COMM_COMM_TESTING_H_
