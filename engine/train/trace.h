// A timeline of a run in the Trace Event Format, which Perfetto
// (https://ui.perfetto.dev) and chrome://tracing open: per rank one row for
// computation (the schedule's actions), one for waiting, and one per channel
// of communication.
// Source: "Trace Event Format" (Chromium), complete events ("ph": "X").
#ifndef ZERO_ENGINE_TRAIN_TRACE_H_
#define ZERO_ENGINE_TRAIN_TRACE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/comm/communicator.h"
#include "engine/zero/executor.h"

namespace zero {

// Threads: all ranks and their streams add to one trace.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Row {
    kCompute,
    kWait,
    kGather,
    kReduce,
    kScalar,
    kUp,    // copies from the host
    kDown,  // to it
    kHost,  // and its computation
    kRead,  // from a disk
    kWrite,
  };

  // Spans beyond this are dropped, and counted: about 300 MB of text.
  static constexpr int64_t kMaxSpans = 2'000'000;

  void Add(int rank, Row row, std::string name, Clock::time_point begin,
           Clock::time_point end);

  // Wraps `inner`, of `rank`: every collective is a span in a row, from when
  // its stream reaches it to its end: "all_gather block.3". The trace must
  // outlive it. An asynchronous device is timed by events, with one wait for it
  // in 1024.
  std::unique_ptr<Communicator> Wrap(int rank, Row row,
                                     std::unique_ptr<Communicator> inner);

  // Adds the actions of `executor`, "Forward(block.3)", those of evaluation and
  // samples as "inference: Forward(block.3)", and what computation waits for:
  // "wait: gather block.3". The trace must outlive the executor.
  void Follow(int rank, Executor& executor);

  // Checks, before the run, that Write can write `path`.
  // Errors: AlreadyExists if a file is there that is not a trace; FileError.
  static absl::Status CheckFile(const std::string& path);
  // The origin of times: the first span, or, to be comparable between
  // processes, 1970 by the host's clock (to 0.25 us).
  enum class Times { kOfRun, kOfHost };
  // Writes all spans so far, however the run ended. Errors: as FileError.
  absl::Status Write(const std::string& path,
                     Times times = Times::kOfRun) const;

  // Adds the spans of `parts`, files made by Write, to those of `path`, and
  // removes the parts.
  static absl::Status Append(const std::string& path,
                             const std::vector<std::string>& parts);

 private:
  struct Span {
    int rank;
    Row row;
    std::string name;
    Clock::time_point begin, end;
  };

  mutable std::mutex mutex_;
  std::vector<Span> spans_;
  int64_t num_dropped_ = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRACE_H_
