// What a test's Trainer gets from models/.
#ifndef ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
#define ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_

#include "tools/cli/model_tools.h"

namespace zero {

// The program's, but for the device's ceiling, which is made up: to measure it
// takes longer than the steps of a test.
inline ModelTools TestModelTools() {
  ModelTools tools = MakeModelTools();
  tools.product_rate = [](Device&, DType) -> ProductRate {
    return {.flops = 1e13, .size = 1024};
  };
  return tools;
}

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
