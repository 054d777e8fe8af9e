// How fast a machine computes, copies and sends, assumed or measured: for
// estimates of a run's cost.
#ifndef ZERO_ENGINE_TRAIN_MACHINE_SPEED_H_
#define ZERO_ENGINE_TRAIN_MACHINE_SPEED_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/train/session.h"
#include "kernels/device.h"

namespace zero {

// Ranks of a node are closer to one another than to others.
struct MachineSpeed {
  double flops_per_second;
  double memory_bytes_per_second;  // a device reads and writes of its own
  double node_bytes_per_second, bytes_per_second;  // within a node; between two
  int64_t ranks_per_node;
  double host_bytes_per_second;    // each way between a device and its host
  double host_updates_per_second;  // elements of a node's host, by AdamW
  double disk_bytes_per_second;    // reads and writes of a node's disk
  // Where the rates of the host and of the disk come from, in words for people.
  std::string host_origin = "assumed", disk_origin = "assumed";

  // The rate between consecutive ranks.
  double BytesPerSecond(int64_t ranks) const {
    return ranks <= ranks_per_node ? node_bytes_per_second : bytes_per_second;
  }
};

// Round figures for such a device, not measured.
MachineSpeed AssumedSpeedOf(const Device& device);

// Copies to the host and back, and AdamW there, by all threads of `device`: the
// best of a few tenths of a second, on 64 MiB, more than any cache holds.
struct HostSpeed {
  double down = 0, up = 0;  // bytes per second
  double updates = 0;       // elements per second, fp32 with both moments
};
absl::StatusOr<HostSpeed> MeasureHostSpeed(Device& device);

// A file of states on a disk, used as in an update: a piece is read while the
// previous one is written.
struct DiskTrial {
  std::string folder;
  int64_t piece_bytes = int64_t{64} << 20;  // about a block of GPT-2's states
  int pieces = 16;
  int queue_depth = 8;
  bool checksums = true;
  int rounds = 1;
};
// Seconds in which all pieces are read and written once: the median. A run may
// have its files in the folder.
// Errors: those of SwapFile.
absl::StatusOr<double> MeasureDisk(const DiskTrial& trial);

// Seconds that offload adds to a step of such a run without overlap: copies,
// the host's update, shared by the ranks of a node, and its disk.
double OffloadSeconds(const Rehearsal& rehearsal, int64_t world,
                      const MachineSpeed& speed);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_MACHINE_SPEED_H_
