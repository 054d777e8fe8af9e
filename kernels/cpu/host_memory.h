// What this machine's memory holds and leaves.
#ifndef ZERO_KERNELS_CPU_HOST_MEMORY_H_
#define ZERO_KERNELS_CPU_HOST_MEMORY_H_

#include <cstdint>
#include <string>

namespace zero::cpu {

// In bytes. Control groups (v2 and v1) count: those that this process is in,
// and those around them.
struct HostMemory {
  int64_t total = 0;      // the machine's, or the smallest limit of a group
  int64_t available = 0;  // to be taken; caches of files count, as they can go
  int64_t resident = 0;   // held by this process
};

// `root` stands before /proc and /sys, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_HOST_MEMORY_H_
