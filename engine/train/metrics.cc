#include "engine/train/metrics.h"

#include <sys/resource.h>

#include <cerrno>

#include "engine/base/file.h"
#include "nlohmann/json.hpp"

namespace zero {
std::string ToLine(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false,
                    nlohmann::json::error_handler_t::replace);
}

nlohmann::ordered_json PeakBytes(const MemoryLedger& ledger) {
  nlohmann::ordered_json peaks;
  for (const auto& [name, bytes] : MemoryLedger::Parts(ledger.peaks())) {
    peaks[name] = bytes;
  }
  peaks["total"] = ledger.total_peak_bytes();
  return peaks;
}

int64_t PeakResidentBytes() {
  rusage usage = {};
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss * 1024 : 0;
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> MetricsWriter::Create(
    const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return FileError("open", path, errno);
  return std::unique_ptr<MetricsWriter>(new MetricsWriter(path, file));
}

MetricsWriter::~MetricsWriter() { std::fclose(file_); }

absl::Status MetricsWriter::Write(const nlohmann::ordered_json& line) {
  const std::string text = ToLine(line) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() ||
      std::fflush(file_) != 0) {
    return FileError("write", path_, errno);
  }
  return absl::OkStatus();
}

}  // namespace zero
