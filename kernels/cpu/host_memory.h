// Used and available memory of this machine.
#ifndef ZERO_KERNELS_CPU_HOST_MEMORY_H_
#define ZERO_KERNELS_CPU_HOST_MEMORY_H_

#include <cstdint>
#include <string>

namespace zero::cpu {

// In bytes. Limited by control groups (v2 and v1): this process's and the
// enclosing ones.
struct HostMemory {
  int64_t total = 0;      // the machine's, or the smallest limit of a group
  int64_t available = 0;  // available, including file caches
  int64_t resident = 0;   // held by this process
};

// `root` is prepended to /proc and /sys, for tests.
HostMemory ReadHostMemory(const std::string& root = "");

// HostMemory::resident at the first call. `zero` calls this first of all, so
// that every command counts the same program: later, a command's data and
// kernels would be in it too.
int64_t ResidentAtStart();

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_HOST_MEMORY_H_
