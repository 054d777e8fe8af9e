// models/'s part of a test's Trainer.
#ifndef ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
#define ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_

#include "tools/cli/model_tools.h"

namespace zero {

// As in the program, except a made-up device ceiling: measuring it takes longer
// than a test's steps.
inline ModelTools TestModelTools() {
  ModelTools tools = MakeModelTools();
  tools.product_rate = [](Device&, DType, absl::Span<char>) -> ProductRate {
    return {.flops = 1e13, .size = 1024};
  };
  return tools;
}

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
