#include "engine/train/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "nlohmann/json.hpp"

namespace zero {
std::string ToLine(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false,
                    nlohmann::json::error_handler_t::replace);
}

std::vector<std::pair<std::string, nlohmann::ordered_json>> Flatten(
    const nlohmann::ordered_json& value) {
  std::vector<std::pair<std::string, nlohmann::ordered_json>> flat;
  if (!value.is_object()) return flat;
  for (const auto& [name, inner] : value.items()) {
    if (!inner.is_object()) {
      flat.emplace_back(name, inner);
      continue;
    }
    for (auto& [rest, leaf] : Flatten(inner)) {
      flat.emplace_back(absl::StrCat(name, ".", rest), std::move(leaf));
    }
  }
  return flat;
}

std::vector<JsonDifference> Differences(const nlohmann::ordered_json& a,
                                        const nlohmann::ordered_json& b) {
  std::map<std::string, JsonDifference> all;
  const auto add = [&](const nlohmann::ordered_json& value,
                       std::string JsonDifference::*side) {
    for (const auto& [name, leaf] : Flatten(value)) {
      all.try_emplace(name, JsonDifference{name, "not set", "not set"})
              .first->second.*
          side = leaf.dump();
    }
  };
  add(a, &JsonDifference::a);
  add(b, &JsonDifference::b);
  std::vector<JsonDifference> differences;
  for (auto& [name, one] : all) {
    if (one.a != one.b) differences.push_back(std::move(one));
  }
  return differences;
}

nlohmann::ordered_json PeakBytes(const MemoryLedger& ledger) {
  nlohmann::ordered_json peaks;
  for (const auto& [name, bytes] : MemoryLedger::Parts(ledger.at_peak())) {
    peaks[name] = bytes;
  }
  peaks["total"] = ledger.total_peak_bytes();
  return peaks;
}

int64_t PeakResidentBytes() {
  // getrusage's survives exec, so it includes the peak of the program that
  // started this one: only for systems that do not tell VmHWM.
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") status >> kib;
  }
  rusage usage = {};
  if (kib == 0 && ::getrusage(RUSAGE_SELF, &usage) == 0) kib = usage.ru_maxrss;
  return kib * 1024;
}

int64_t ResidentFileBytes() {
  // Pages: of the address space, resident, resident and of files; proc(5).
  std::ifstream statm("/proc/self/statm");
  int64_t space = 0, resident = 0, of_files = 0;
  statm >> space >> resident >> of_files;
  return of_files * ::sysconf(_SC_PAGESIZE);
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Create(
    const std::string& path, const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) absl::StrAppend(&text, line, "\n");
  if (!text.empty()) ZERO_RETURN_IF_ERROR(WriteFileAtomically(path, text));
  std::FILE* file = std::fopen(path.c_str(), text.empty() ? "w" : "a");
  if (file == nullptr) return FileError("cannot open", path, errno);
  return std::unique_ptr<MetricsWriter>(new MetricsWriter(path, file));
}

MetricsWriter::~MetricsWriter() { std::fclose(file_); }

absl::Status MetricsWriter::Write(const nlohmann::ordered_json& line) {
  return Append(ToLine(line) + "\n");
}

absl::Status MetricsWriter::Sync() {
  // A pipe or a device has nothing to sync.
  if (::fsync(::fileno(file_)) == 0 || errno == EINVAL) return absl::OkStatus();
  return FileError("cannot write", path_, errno);
}

absl::Status MetricsWriter::Append(absl::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size() ||
      std::fflush(file_) != 0) {
    return FileError("cannot write", path_, errno);
  }
  return absl::OkStatus();
}

}  // namespace zero
