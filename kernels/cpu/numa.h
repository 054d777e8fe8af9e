// NUMA nodes: which cores are near which memory.
#ifndef ZERO_KERNELS_CPU_NUMA_H_
#define ZERO_KERNELS_CPU_NUMA_H_

#include <sched.h>

#include <string>
#include <vector>

namespace zero::cpu {

// By node, the cores that this process may run on; nodes without any are left
// out.
using NumaNodes = std::vector<cpu_set_t>;

// Empty if the system names none. `root` is prepended to /sys, for tests.
NumaNodes ReadNumaNodes(const std::string& root = "");

// The node of thread `thread` of a team: neighbours share one. -1: there is
// nothing to choose, or there are fewer threads than nodes.
int NodeOfThread(const NumaNodes& nodes, int thread, int num_threads);

// Keeps the calling thread on its node, whose memory the kernel then gives it.
// A system call only when that changes.
void BindToNode(const NumaNodes& nodes, int thread, int num_threads);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_NUMA_H_
