#include "engine/train/metrics.h"

#include <sys/resource.h>

#include <cerrno>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/file.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

std::string Quoted(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', /*ensure_ascii=*/false,
            nlohmann::json::error_handler_t::replace);
}

}  // namespace

JsonLine& JsonLine::Put(absl::string_view key, absl::string_view json) {
  absl::StrAppend(&body_, body_.empty() ? "" : ", ", Quoted(key), ": ", json);
  return *this;
}

JsonLine& JsonLine::Add(absl::string_view key, double value) {
  if (!std::isfinite(value)) return Put(key, "null");
  std::string text = absl::StrFormat("%.17g", value);
  // Without a point it would read back as an integer, and -0 as 0.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return Put(key, text);
}

JsonLine& JsonLine::Add(absl::string_view key, int64_t value) {
  return Put(key, absl::StrCat(value));
}

JsonLine& JsonLine::Add(absl::string_view key, bool value) {
  return Put(key, value ? "true" : "false");
}

JsonLine& JsonLine::Add(absl::string_view key, absl::string_view value) {
  return Put(key, Quoted(value));
}

JsonLine& JsonLine::AddObject(absl::string_view key, const JsonLine& object) {
  return Put(key, object.ToString());
}

std::string JsonLine::ToString() const { return absl::StrCat("{", body_, "}"); }

JsonLine PeakBytes(const MemoryLedger& ledger) {
  JsonLine line;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    if (ledger.peak_bytes(category) == 0) continue;
    line.Add(MemoryCategoryName(category), ledger.peak_bytes(category));
  }
  return line.Add("total", ledger.total_peak_bytes());
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

absl::Status MetricsWriter::Write(const JsonLine& line) {
  const std::string text = line.ToString() + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() ||
      std::fflush(file_) != 0) {
    return FileError("write", path_, errno);
  }
  return absl::OkStatus();
}

}  // namespace zero
