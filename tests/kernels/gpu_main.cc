// main() of tests that need a GPU. Without one every test is skipped, with the
// reason, and the program succeeds: a machine without a GPU has proved nothing
// and broken nothing.
#include <cstdio>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/device.h"

namespace {

class SkipEveryTest : public testing::EmptyTestEventListener {
 public:
  explicit SkipEveryTest(std::string reason) : reason_(std::move(reason)) {}

  // A skip before a test's body keeps it from running.
  void OnTestStart(const testing::TestInfo&) override {
    GTEST_SKIP() << reason_;
  }
  // Again at the end, where a reader looks.
  void OnTestProgramEnd(const testing::UnitTest&) override {
    std::printf("SKIPPED, every test: %s\n", reason_.c_str());
  }

 private:
  std::string reason_;
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const auto device = zero::MakeCudaDevice(0);
  if (!device.ok()) {
    testing::UnitTest::GetInstance()->listeners().Append(
        new SkipEveryTest(std::string(device.status().message())));
  }
  return RUN_ALL_TESTS();
}
