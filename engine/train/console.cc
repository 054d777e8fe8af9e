#include "engine/train/console.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zero {
namespace {

constexpr double kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

// Rounded to the digits that HumanBytes prints.
double RoundedToDigits(double bytes, bool up) {
  const double unit = bytes >= kGiB ? kGiB : bytes >= kMiB ? kMiB : kKiB;
  const double parts = bytes >= kGiB ? 100 : 10;
  const double digits = bytes / unit * parts;
  return (up ? std::ceil(digits) : std::floor(digits)) / parts * unit;
}

}  // namespace

void Console::EndProgress() {
  if (in_progress_) std::fputc('\n', out_);
  in_progress_ = false;
}

void Console::Line(absl::string_view text) {
  if (out_ == nullptr) return;
  EndProgress();
  std::fprintf(out_, "%.*s\n", static_cast<int>(text.size()), text.data());
  std::fflush(out_);
}

void Console::Progress(absl::string_view text, bool keep) {
  if (out_ == nullptr) return;
  if (!is_terminal_) {
    if (keep) Line(text);
    return;
  }
  // Erase the rest of the line: a shorter text must not leave old characters.
  std::fprintf(out_, "\r%.*s\x1b[K", static_cast<int>(text.size()),
               text.data());
  in_progress_ = true;
  if (keep) EndProgress();
  std::fflush(out_);
}

void Console::Table(
    absl::string_view title,
    const std::vector<std::pair<std::string, std::string>>& rows) {
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  Line(title);
  for (const auto& [name, value] : rows) {
    Line(absl::StrFormat("  %-*s  %s", static_cast<int>(width), name, value));
  }
}

void Console::Text(absl::string_view text) {
  if (out_ == nullptr) return;
  EndProgress();
  const std::string printable = Printable(text);
  std::fwrite(printable.data(), 1, printable.size(), out_);
  std::fflush(out_);
}

std::string Printable(absl::string_view text) {
  std::string printable;
  for (const char c : text) {
    const bool controls = (c >= 0 && c < ' ') || c == '\x7f';
    if (controls && c != '\n' && c != '\t') {
      printable += "\xef\xbf\xbd";
    } else {
      printable += c;
    }
  }
  return printable;
}

std::string HumanCount(double count) {
  if (count >= 1e12) return absl::StrFormat("%.2f T", count / 1e12);
  if (count >= 1e9) return absl::StrFormat("%.2f B", count / 1e9);
  if (count >= 1e6) return absl::StrFormat("%.1f M", count / 1e6);
  if (count >= 1e4) return absl::StrFormat("%.1f k", count / 1e3);
  return absl::StrFormat("%.0f", count);
}

std::string HumanBytes(double bytes) {
  if (bytes >= kGiB) return absl::StrFormat("%.2f GiB", bytes / kGiB);
  if (bytes >= kMiB) return absl::StrFormat("%.1f MiB", bytes / kMiB);
  return absl::StrFormat("%.1f KiB", bytes / kKiB);
}

std::string HumanBytesUp(double bytes) {
  return HumanBytes(RoundedToDigits(bytes, /*up=*/true));
}

std::string HumanBytesDown(double bytes) {
  // 1.2 GiB are no whole bytes: one more makes up for those that were cut off.
  return HumanBytes(RoundedToDigits(bytes + 1, /*up=*/false));
}

std::string PartsText(const MemoryLedger::NamedBytes& parts) {
  return absl::StrJoin(parts, ", ", [](std::string* out, const auto& part) {
    absl::StrAppend(out, part.first, " ", HumanBytes(part.second));
  });
}

std::string MemoryText(const MemoryLedger& ledger) {
  return absl::StrCat(HumanBytes(ledger.total_peak_bytes()), " at peak: ",
                      PartsText(MemoryLedger::Parts(ledger.at_peak())));
}

std::string Counted(int64_t count, absl::string_view noun) {
  return absl::StrCat(WithCommas(count), " ", noun, count == 1 ? "" : "s");
}

std::string HumanSeconds(double seconds) {
  if (seconds > 0 && seconds < 0.95) return absl::StrFormat("%.1g s", seconds);
  const int64_t s = static_cast<int64_t>(std::llround(seconds));
  if (s < 60) return absl::StrFormat("%d s", s);
  if (s < 3600) return absl::StrFormat("%d min %02d s", s / 60, s % 60);
  return absl::StrFormat("%d h %02d min", s / 3600, s % 3600 / 60);
}

std::string WithCommas(int64_t value) {
  const std::string digits = absl::StrCat(std::abs(value));
  std::string text = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string AgainstFormula(int64_t planned, int64_t formula, int64_t rows) {
  std::string text = " = ZeRO's formula";
  if (planned == formula && rows == 0) return text;
  absl::StrAppend(&text, " ", WithCommas(formula - rows));
  if (rows > 0) {
    absl::StrAppend(&text, " + ", WithCommas(rows),
                    " of embedding rows (not in the formula)");
  }
  if (planned == formula) return text;
  const bool less = planned < formula;
  return absl::StrCat(
      text, less ? " - " : " + ", WithCommas(std::abs(planned - formula)),
      less ? " of units that stayed in place" : " of units gathered once more");
}

}  // namespace zero
