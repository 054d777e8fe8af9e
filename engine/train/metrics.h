// metrics.jsonl: one JSON object per line, appended as the run goes.
#ifndef ZERO_ENGINE_TRAIN_METRICS_H_
#define ZERO_ENGINE_TRAIN_METRICS_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/ledger.h"
#include "nlohmann/json_fwd.hpp"

namespace zero {

// One line of JSON. Doubles read back to the same bits; NaN and infinities,
// which JSON lacks, are null.
std::string ToLine(const nlohmann::ordered_json& value);

// The values of nested objects, by "a.b.c", in order.
std::vector<std::pair<std::string, nlohmann::ordered_json>> Flatten(
    const nlohmann::ordered_json& value);

// The differences of two flattened objects, by name, sorted; values as JSON
// text, or "not set".
struct JsonDifference {
  std::string name, a, b;
};
std::vector<JsonDifference> Differences(const nlohmann::ordered_json& a,
                                        const nlohmann::ordered_json& b);

// Peak bytes per nonzero category and "total".
nlohmann::ordered_json PeakBytes(const MemoryLedger& ledger);

// Peak memory of the process, as the operating system counts it: with all its
// ranks, libraries and mapped files.
int64_t PeakResidentBytes();

// The process's current memory for code, libraries and other files.
int64_t ResidentFileBytes();

class MetricsWriter {
 public:
  // Replaces the file by one that begins with `lines`, atomically: a crash
  // leaves the earlier one. Errors: as FileError.
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Create(
      const std::string& path, const std::vector<std::string>& lines = {});
  ~MetricsWriter();

  // Appends a line and hands it to the operating system at once, so that a
  // killed run keeps every step. Errors: disk full.
  absl::Status Write(const nlohmann::ordered_json& line);
  // The same for raw bytes.
  absl::Status Append(absl::string_view bytes);
  // Makes the lines durable.
  absl::Status Sync();

 private:
  MetricsWriter(std::string path, std::FILE* file)
      : path_(std::move(path)), file_(file) {}
  std::string path_;
  std::FILE* file_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_METRICS_H_
