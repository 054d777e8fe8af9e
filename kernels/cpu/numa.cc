#include "kernels/cpu/numa.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace zero::cpu {
namespace {

// The first line of a file, "" if there is none.
std::string LineOf(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The numbers of a list such as "0-3,8".
std::vector<int> NumbersOf(const std::string& list) {
  std::vector<int> numbers;
  for (const auto range : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::vector<std::string> ends = absl::StrSplit(range, '-');
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last)) {
      return {};
    }
    for (int i = first; i <= last; ++i) numbers.push_back(i);
  }
  return numbers;
}

}  // namespace

NumaNodes ReadNumaNodes(const std::string& root) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return {};
  const std::string folder = root + "/sys/devices/system/node/";
  NumaNodes nodes;
  for (const int node : NumbersOf(LineOf(folder + "online"))) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (const int core :
         NumbersOf(LineOf(absl::StrCat(folder, "node", node, "/cpulist")))) {
      if (core < CPU_SETSIZE && CPU_ISSET(core, &allowed)) {
        CPU_SET(core, &cores);
      }
    }
    if (CPU_COUNT(&cores) > 0) nodes.push_back(cores);
  }
  return nodes;
}

int NodeOfThread(const NumaNodes& nodes, int thread, int num_threads) {
  const int num_nodes = static_cast<int>(nodes.size());
  return num_nodes < 2 || num_threads < num_nodes
             ? -1
             : thread * num_nodes / num_threads;
}

void BindToNode(const NumaNodes& nodes, int thread, int num_threads) {
  const int node = NodeOfThread(nodes, thread, num_threads);
  if (node < 0) return;
  thread_local cpu_set_t bound = {};
  if (CPU_EQUAL(&bound, &nodes[node])) return;
  // The binding is advice: if the system refuses it, the run is only slower.
  if (sched_setaffinity(0, sizeof(cpu_set_t), &nodes[node]) == 0) {
    bound = nodes[node];
  }
}

}  // namespace zero::cpu
