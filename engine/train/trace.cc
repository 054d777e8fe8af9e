#include "engine/train/trace.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/train/metrics.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

constexpr absl::string_view kBegin =
    "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";

constexpr absl::string_view kEnd = "\n]}\n";

// The names of rows, in the order of Trace::Row.
constexpr const char* kRowNames[] = {
    "compute",           "waiting for communication",
    "gather parameters", "reduce gradients",
    "agree on numbers",  "from the host",
    "to the host",       "host",
    "from the disk",     "to the disk"};

Trace::Row RowOf(StreamRole stream) {
  switch (stream) {
    case StreamRole::kUp:
      return Trace::Row::kUp;
    case StreamRole::kDown:
      return Trace::Row::kDown;
    case StreamRole::kHost:
      return Trace::Row::kHost;
    case StreamRole::kRead:
      return Trace::Row::kRead;
    case StreamRole::kWrite:
      return Trace::Row::kWrite;
    default:
      return Trace::Row::kCompute;
  }
}

double Micros(Trace::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

class TracingCommunicator final : public CommunicatorWrapper {
 public:
  TracingCommunicator(Trace* trace, int process, Trace::Row row,
                      std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)),
        trace_(trace),
        process_(process),
        row_(row) {}

  ~TracingCommunicator() override {
    // A failed device reports its failure again.
    CatchExceptions([this] {
      Collect();
      return absl::OkStatus();
    }).IgnoreError();
  }

  void Run(Stream& stream, Collective collective) override {
    if (stream.device().asynchronous()) {
      return RunTimed(stream, std::move(collective));
    }
    auto begin = std::make_shared<Trace::Clock::time_point>();
    stream.Enqueue([begin] { *begin = Trace::Clock::now(); });
    std::string name = NameOf(collective);
    inner_->Run(stream, std::move(collective));
    stream.Enqueue([trace = trace_, process = process_, row = row_, begin,
                    name = std::move(name)] {
      trace->Add(process, row, name, *begin, Trace::Clock::now());
    });
  }

 private:
  // A collective of an asynchronous device.
  struct Timed {
    std::string name;
    std::shared_ptr<Event> anchor;  // done at `anchored` by the host's clock
    Trace::Clock::time_point anchored;
    std::unique_ptr<Event> begin, end;
  };
  // Times since an event are fp32 milliseconds: it must be recent.
  static constexpr int64_t kPerAnchor = 1024;

  static std::string NameOf(const Collective& collective) {
    return absl::StrCat(CollectiveKindName(collective.kind), " ",
                        collective.name);
  }

  void RunTimed(Stream& stream, Collective collective) {
    Collect();
    Device& device = stream.device();
    if (num_timed_++ % kPerAnchor == 0) {
      anchor_ = device.MakeEvent();
      stream.Record(*anchor_);
      anchor_->Synchronize();
      anchored_ = Trace::Clock::now();
    }
    Timed timed{NameOf(collective), anchor_, anchored_, device.MakeEvent(),
                device.MakeEvent()};
    stream.Record(*timed.begin);
    inner_->Run(stream, std::move(collective));
    stream.Record(*timed.end);
    timed_.push_back(std::move(timed));
  }

  // Adds the collectives that are done.
  void Collect() {
    while (!timed_.empty() && timed_.front().end->IsDone()) {
      const Timed& timed = timed_.front();
      const auto time_of = [&](const Event& event) {
        return timed.anchored +
               std::chrono::duration_cast<Trace::Clock::duration>(
                   std::chrono::duration<double, std::milli>(
                       event.MillisSince(*timed.anchor)));
      };
      trace_->Add(process_, row_, timed.name, time_of(*timed.begin),
                  time_of(*timed.end));
      timed_.pop_front();
    }
  }

  Trace* const trace_;
  const int process_;  // the rank of the run
  const Trace::Row row_;
  int64_t num_timed_ = 0;
  std::shared_ptr<Event> anchor_;
  Trace::Clock::time_point anchored_;
  std::deque<Timed> timed_;
};

}  // namespace

void Trace::Add(int rank, Row row, std::string name, Clock::time_point begin,
                Clock::time_point end) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<int64_t>(spans_.size()) >= kMaxSpans) {
    ++num_dropped_;
    return;
  }
  spans_.push_back({rank, row, std::move(name), begin, end});
}

std::unique_ptr<Communicator> Trace::Wrap(int rank, Row row,
                                          std::unique_ptr<Communicator> inner) {
  return std::make_unique<TracingCommunicator>(this, rank, row,
                                               std::move(inner));
}

void Trace::Follow(int rank, Executor& executor) {
  executor.clock().set_time_hook(
      [this, rank, &executor](const Action& action, bool in_step,
                              Clock::time_point begin, Clock::time_point end) {
        Add(rank, RowOf(action.stream),
            absl::StrCat(in_step ? "" : "inference: ",
                         ActionName(action, executor.plan())),
            begin, end);
      });
  executor.clock().set_wait_hook(
      [this, rank](Channel channel, const std::string& name,
                   Clock::time_point from, Clock::time_point to) {
        Add(rank, Row::kWait,
            absl::StrCat("wait: ", ChannelName(channel), " ", name), from, to);
      });
}

absl::Status Trace::CheckFile(const std::string& path) {
  ZERO_RETURN_IF_ERROR(AtomicFile::Create(path).status());
  if (!PathExists(path)) return absl::OkStatus();
  std::string begin(kBegin.size(), '\0');
  std::ifstream(path).read(begin.data(), begin.size());
  if (begin == kBegin) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "'", path,
      "' exists and is not a trace; choose another name, or remove it"));
}

absl::Status Trace::Append(const std::string& path,
                           const std::vector<std::string>& parts) {
  if (parts.empty()) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(std::string all, ReadFile(path));
  for (const std::string& part : parts) {
    ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(part));
    absl::string_view events = text;
    if (!absl::ConsumePrefix(&events, kBegin) ||
        !absl::ConsumeSuffix(&events, kEnd)) {
      return absl::DataLossError(
          absl::StrCat("'", part, "' is not a complete trace"));
    }
    all.resize(all.size() - kEnd.size());
    absl::StrAppend(&all, ",", events, kEnd);
  }
  ZERO_RETURN_IF_ERROR(WriteFileAtomically(path, all));
  for (const std::string& part : parts) std::remove(part.c_str());
  return absl::OkStatus();
}

absl::Status Trace::Write(const std::string& path, Times times) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Clock::time_point start = Clock::time_point::max();
  std::set<std::pair<int, Row>> rows;
  for (const Span& span : spans_) {
    start = std::min(start, span.begin);
    rows.insert({span.rank, span.row});
  }
  if (times == Times::kOfHost) {
    // The two clocks are read together, and their difference is stored.
    start =
        Clock::now() - std::chrono::duration_cast<Clock::duration>(
                           std::chrono::system_clock::now().time_since_epoch());
  }
  std::string text(kBegin);
  const auto add = [&](nlohmann::ordered_json event) {
    absl::StrAppend(&text, absl::EndsWith(text, "[") ? "\n" : ",\n",
                    ToLine(event));
  };
  for (const auto& [rank, row] : rows) {
    add({{"ph", "M"},
         {"name", "process_name"},
         {"pid", rank},
         {"args", {{"name", absl::StrCat("rank ", rank)}}}});
    add({{"ph", "M"},
         {"name", "thread_name"},
         {"pid", rank},
         {"tid", row},
         {"args", {{"name", kRowNames[static_cast<int>(row)]}}}});
  }
  for (const Span& span : spans_) {
    add({{"ph", "X"},
         {"name", span.name},
         {"pid", span.rank},
         {"tid", span.row},
         {"ts", Micros(span.begin - start)},
         {"dur", Micros(span.end - span.begin)}});
  }
  add({{"ph", "M"},
       {"name", "dropped_spans"},
       {"pid", 0},
       {"args", {{"count", num_dropped_}}}});
  absl::StrAppend(&text, kEnd);
  return WriteFileAtomically(path, text);
}

}  // namespace zero
