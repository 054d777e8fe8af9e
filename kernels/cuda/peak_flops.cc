#include "kernels/cuda/peak_flops.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace zero::cuda {
namespace {

struct Row {
  const char* part;  // of the driver's name
  double teraflops;
};

// The first row whose part is words of the name counts: an "RTX A4000" is no
// A40.
constexpr Row kRows[] = {
    {"GB300", 2500},    {"GB200", 2500},     {"B300", 2250},
    {"B200", 2250},     {"B100", 1750},      {"GH200", 989.4},
    {"H200 NVL", 835},  {"H200", 989.4},     {"H100 NVL", 835},
    {"H100 PCIe", 756}, {"H100", 989.4},     {"H800", 989.4},
    {"H20", 148},       {"A100", 312},       {"A800", 312},
    {"A30", 165},       {"A40", 149.7},      {"A10G", 70},
    {"A10", 125},       {"L40S", 362},       {"L40", 181},
    {"L4", 121},        {"RTX 5090", 209.5}, {"RTX 4090", 165.2},
    {"RTX 3090", 71},
};

bool HasWords(absl::string_view name, absl::string_view words) {
  return absl::StrContains(
      absl::StrCat(" ", absl::StrReplaceAll(name, {{"-", " "}}), " "),
      absl::StrCat(" ", words, " "));
}

}  // namespace

double PeakFlopsBf16(absl::string_view name) {
  for (const Row& row : kRows) {
    if (HasWords(name, row.part)) return row.teraflops * 1e12;
  }
  return 0;
}

}  // namespace zero::cuda
