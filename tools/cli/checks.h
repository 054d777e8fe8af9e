// Checks of numbers on the command line, whose errors say what is wanted:
//   --temperature: "abc" is not a number >= 0
#ifndef ZERO_TOOLS_CLI_CHECKS_H_
#define ZERO_TOOLS_CLI_CHECKS_H_

#include <cstdint>
#include <limits>

#include "CLI/CLI.hpp"

namespace zero {

CLI::Validator WholeNumber(int64_t min,
                           int64_t max = std::numeric_limits<int64_t>::max());
CLI::Validator Number(double min,
                      double max = std::numeric_limits<double>::infinity());
// In (min, max].
CLI::Validator NumberAbove(double min, double max);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_CHECKS_H_
