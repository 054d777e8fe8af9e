#include "kernels/cpu/host_memory.h"

#include <algorithm>
#include <fstream>
#include <functional>

namespace zero::cpu {
namespace {

// The number after `name` at the beginning of a line of the file; 0: none.
int64_t NumberOf(const std::string& file, const std::string& name) {
  std::ifstream in(file);
  std::string line;
  while (std::getline(in, line)) {
    if (line.compare(0, name.size(), name) != 0) continue;
    return std::atoll(line.c_str() + name.size());
  }
  return 0;
}

// Files of a control group's memory.
struct GroupFiles {
  const char *limit, *usage, *inactive;
};
constexpr GroupFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                            "total_inactive_file "};
constexpr GroupFiles kV2 = {"/memory.max", "/memory.current", "inactive_file "};

// Calls `look` with the folder of every memory group of this process, and of
// the enclosing ones.
void ForEachGroup(const std::string& root,
                  const std::function<void(const std::string& folder,
                                           const GroupFiles& files)>& look) {
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // "ID:CONTROLLERS:/PATH", v2: "0::"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers =
        line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",";
    if (!v2 && controllers.find("memory,") == std::string::npos) continue;
    const std::string top = root + "/sys/fs/cgroup" + (v2 ? "" : "/memory");
    std::string path = line.substr(second + 1);
    while (!path.empty()) {
      look(top + path, v2 ? kV2 : kV1);
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
    look(top, v2 ? kV2 : kV1);  // a container sees its own group there
  }
}

}  // namespace

HostMemory ReadHostMemory(const std::string& root) {
  constexpr int64_t kKiB = 1024;
  const std::string meminfo = root + "/proc/meminfo";
  HostMemory memory{
      .total = kKiB * NumberOf(meminfo, "MemTotal:"),
      .available = kKiB * NumberOf(meminfo, "MemAvailable:"),
      .resident = kKiB * NumberOf(root + "/proc/self/status", "VmRSS:")};
  ForEachGroup(root, [&](const std::string& folder, const GroupFiles& files) {
    const int64_t limit = NumberOf(folder + files.limit, "");  // "max": 0
    if (limit <= 0) return;
    memory.total = std::min(memory.total, limit);
    const int64_t held = NumberOf(folder + files.usage, "") -
                         NumberOf(folder + "/memory.stat", files.inactive);
    memory.available =
        std::min(memory.available, std::max<int64_t>(limit - held, 0));
  });
  return memory;
}

int64_t ResidentAtStart() {
  static const int64_t bytes = ReadHostMemory().resident;
  return bytes;
}

}  // namespace zero::cpu
