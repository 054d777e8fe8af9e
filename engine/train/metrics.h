// metrics.jsonl: one JSON object per line, appended as the run goes.
#ifndef ZERO_ENGINE_TRAIN_METRICS_H_
#define ZERO_ENGINE_TRAIN_METRICS_H_

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tensor/ledger.h"

namespace zero {

// Builds one flat or nested JSON object in the order of the calls. Doubles are
// printed so that they read back to the same bits; NaN and infinities, which
// JSON has not, become null.
class JsonLine {
 public:
  JsonLine& Add(absl::string_view key, double value);
  JsonLine& Add(absl::string_view key, int64_t value);
  JsonLine& Add(absl::string_view key, bool value);
  JsonLine& Add(absl::string_view key, absl::string_view value);
  JsonLine& Add(absl::string_view key, const char* value) {
    return Add(key, absl::string_view(value));
  }
  JsonLine& AddObject(absl::string_view key, const JsonLine& object);
  std::string ToString() const;

 private:
  JsonLine& Put(absl::string_view key, absl::string_view json);
  std::string body_;
};

// Peak bytes per category (those that are not zero) and "total".
JsonLine PeakBytes(const MemoryLedger& ledger);

// Memory of the process at its peak, as the operating system counts it: ranks
// that are its threads, libraries and mapped files together.
int64_t PeakResidentBytes();

class MetricsWriter {
 public:
  // Replaces the file. Errors: as FileError.
  static absl::StatusOr<std::unique_ptr<MetricsWriter>> Create(
      const std::string& path);
  ~MetricsWriter();

  // Appends a line and hands it to the operating system at once, so that a
  // killed run keeps every step. Errors: disk full.
  absl::Status Write(const JsonLine& line);

 private:
  MetricsWriter(std::string path, std::FILE* file)
      : path_(std::move(path)), file_(file) {}
  std::string path_;
  std::FILE* file_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_METRICS_H_
