#include "engine/train/machine_speed.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/base/status.h"
#include "engine/base/swap_file.h"
#include "kernels/ops.h"

namespace zero {
namespace {

constexpr size_t kCopyBytes = size_t{64} << 20;
constexpr int kTrials = 5;  // the first one touches memory

// The fastest of several calls of `run` on `stream`, in seconds.
template <typename Run>
double BestSeconds(Device& device, Stream& stream, const Run& run) {
  const auto start = device.MakeEvent(), end = device.MakeEvent();
  double best_ms = 1e30;
  for (int trial = 0; trial < kTrials; ++trial) {
    stream.Record(*start);
    run();
    stream.Record(*end);
    end->Synchronize();
    best_ms = std::min(best_ms, end->MillisSince(*start));
  }
  return 1e-3 * best_ms;
}

// Measures updates by the threads of the device's host.
absl::StatusOr<double> MeasureUpdates(Device& host) {
  constexpr int64_t kElems = kCopyBytes / sizeof(float);
  std::vector<Buffer> buffers;
  std::vector<float*> arrays;
  const auto stream = host.MakeStream(StreamRole::kHost);
  for (int i = 0; i < 4; ++i) {
    ZERO_ASSIGN_OR_RETURN(Buffer buffer,
                          host.Allocate(kCopyBytes, MemoryKind::kHost));
    arrays.push_back(static_cast<float*>(buffer.data()));
    stream->Enqueue([&ops = host.ops(), &stream = *stream,
                     array = Vector{arrays.back(), DType::kF32, kElems}] {
      ops.Fill(stream, {array, 1e-3f});
    });
    buffers.push_back(std::move(buffer));
  }
  const UpdateRange range = {0, kElems, /*weight_decay=*/0.1f};
  AdamWArgs args;
  args.state = {.param = {arrays[0], DType::kF32, kElems},
                .grad = {arrays[1], DType::kF32, kElems},
                .ranges = {&range, 1}};
  args.m = arrays[2];
  args.v = arrays[3];
  args.lr = 1e-3f;
  return kElems / BestSeconds(host, *stream, [&] {
           stream->Enqueue([&] { host.ops().AdamW(*stream, args); });
         });
}

}  // namespace

MachineSpeed AssumedSpeedOf(const Device& device) {
  // Adam moves 28 bytes an element, of a host's 90 GB/s.
  if (device.kind() == DeviceKind::kCuda) {
    return {.flops_per_second = 4e14,
            .memory_bytes_per_second = 2.5e12,
            .node_bytes_per_second = 3e11,
            .bytes_per_second = 5e10,
            .ranks_per_node = 8,
            .host_bytes_per_second = 2.5e10,
            .host_updates_per_second = 3e9,
            .disk_bytes_per_second = 6e9};
  }
  // Ranks are threads of one machine.
  return {.flops_per_second = 1e11 * device.info().num_threads,
          .memory_bytes_per_second = 1e10,
          .node_bytes_per_second = 5e9,
          .bytes_per_second = 5e9,
          .ranks_per_node = INT64_MAX,
          .host_bytes_per_second = 5e9,
          .host_updates_per_second = 3e8,
          .disk_bytes_per_second = 1e9};
}

absl::StatusOr<HostSpeed> MeasureHostSpeed(Device& device) {
  ZERO_ASSIGN_OR_RETURN(const Buffer there,
                        device.Allocate(kCopyBytes, MemoryKind::kDevice));
  ZERO_ASSIGN_OR_RETURN(const Buffer here,
                        device.Allocate(kCopyBytes, MemoryKind::kHost));
  HostSpeed speed;
  const auto down = device.MakeStream(StreamRole::kDown);
  speed.down = kCopyBytes / BestSeconds(device, *down, [&] {
                 device.Copy(*down, here.data(), there.data(), kCopyBytes);
               });
  const auto up = device.MakeStream(StreamRole::kUp);
  speed.up = kCopyBytes / BestSeconds(device, *up, [&] {
               device.Copy(*up, there.data(), here.data(), kCopyBytes);
             });
  ZERO_ASSIGN_OR_RETURN(speed.updates, MeasureUpdates(device.host()));
  return speed;
}

absl::StatusOr<double> MeasureDisk(const DiskTrial& trial) {
  // Aligned for O_DIRECT; read into one half, written from the other.
  std::vector<char> storage(2 * trial.piece_bytes + kBlockAlignment, 'x');
  char* const memory = reinterpret_cast<char*>(RoundUp(
      reinterpret_cast<uintptr_t>(storage.data()), uintptr_t{kBlockAlignment}));
  const absl::Span<char> registered(memory,
                                    static_cast<size_t>(2 * trial.piece_bytes));
  SwapFileOptions options = {.folder = trial.folder,
                             .number = std::numeric_limits<int>::max(),
                             .checksums = trial.checksums};
  options.io.queue_depth = trial.queue_depth;
  ZERO_ASSIGN_OR_RETURN(
      const auto file,
      SwapFile::Create(options,
                       std::vector<int64_t>(trial.pieces, trial.piece_bytes),
                       {&registered, 1}));
  for (int i = 0; i < trial.pieces; ++i) {
    ZERO_RETURN_IF_ERROR(file->Write(i, memory));
  }
  std::vector<double> seconds;
  for (int round = 0; round < trial.rounds; ++round) {
    absl::Status read, written;
    const absl::Time start = absl::Now();
    for (int i = 0; i <= trial.pieces; ++i) {
      std::thread reader([&] {
        if (i < trial.pieces) read.Update(file->Read(i, memory));
      });
      if (i > 0) {
        written.Update(file->Write(i - 1, memory + trial.piece_bytes));
      }
      reader.join();
    }
    seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));
    ZERO_RETURN_IF_ERROR(read);
    ZERO_RETURN_IF_ERROR(written);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double OffloadSeconds(const Rehearsal& rehearsal, int64_t world,
                      const MachineSpeed& speed) {
  const Plan& plan = rehearsal.plan;
  const int64_t updated =
      plan.StateElems(plan.HostUpdatedElems(), plan.placement.optimizer);
  const int64_t of_node = std::min(world, speed.ranks_per_node);
  return (rehearsal.host_traffic.up + rehearsal.host_traffic.down) /
             speed.host_bytes_per_second +
         updated * of_node / speed.host_updates_per_second +
         (rehearsal.disk_traffic.read + rehearsal.disk_traffic.written) *
             of_node / speed.disk_bytes_per_second;
}

}  // namespace zero
