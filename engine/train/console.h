// The output of a run for people: tables, a progress line on a terminal, plain
// lines otherwise.
#ifndef ZERO_ENGINE_TRAIN_CONSOLE_H_
#define ZERO_ENGINE_TRAIN_CONSOLE_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/tensor/ledger.h"

namespace zero {

class Console {
 public:
  // Writes to `out` (null: nowhere, for ranks that only compute); with
  // `is_terminal` the progress line rewrites itself.
  Console(std::FILE* out, bool is_terminal)
      : out_(out), is_terminal_(is_terminal) {}

  // Prints one line that stays; ends a progress line first.
  void Line(absl::string_view text);
  // A line that the next progress line replaces on a terminal; `keep` makes it
  // stay. Off a terminal only kept lines are printed.
  void Progress(absl::string_view text, bool keep);
  // Names and values in two columns under a title.
  void Table(absl::string_view title,
             const std::vector<std::pair<std::string, std::string>>& rows);
  // Printable text, streamed, without a line break.
  void Text(absl::string_view text);

 private:
  void EndProgress();

  std::FILE* out_;
  bool is_terminal_;
  bool in_progress_ = false;
};

// Replaces control characters except line breaks and tabs by U+FFFD: generated
// text can garble a terminal, and turns a log into a binary file.
std::string Printable(absl::string_view text);

// "124.4 M", "1.24 B".
std::string HumanCount(double count);
// "512.0 MiB", "1.95 GiB".
std::string HumanBytes(double bytes);
// The same, rounded up: what is printed is enough.
std::string HumanBytesUp(double bytes);
// And down: what is printed is there. A number that was given, such as 1.2 GiB,
// reads as given.
std::string HumanBytesDown(double bytes);
// "parameters 512.0 MiB, activations 1.20 GiB".
std::string PartsText(const MemoryLedger::NamedBytes& parts);
// "1.95 GiB at peak: parameters 512.0 MiB, ...": the split at the peak.
std::string MemoryText(const MemoryLedger& ledger);
// "0.3 s", "3 s", "12 min 04 s", "2 h 05 min".
std::string HumanSeconds(double seconds);
// "1 thread", "1,200 files".
std::string Counted(int64_t count, absl::string_view noun);
// 1,115,394
std::string WithCommas(int64_t value);
// " = ZeRO's formula", or " = ZeRO's formula 5,354,496 - 891,648 of units that
// stayed in place": bytes on the wire that a plan moves, and FormulaWire's.
// `rows`: those of RowsWire, which the paper's formula lacks.
std::string AgainstFormula(int64_t planned, int64_t formula, int64_t rows = 0);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_CONSOLE_H_
