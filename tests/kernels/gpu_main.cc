// main() of tests that need a GPU. Without one every test is skipped, with the
// reason, and the program succeeds: a machine without a GPU has proved nothing
// and broken nothing.
#include <cstdio>

#include "gtest/gtest.h"
#include "kernels/device.h"

namespace {

// Says so once more at the end, where a reader looks.
class SkipWithoutGpu : public testing::Environment {
 public:
  void SetUp() override {
    const auto device = zero::MakeCudaDevice(0);
    if (device.ok()) return;
    reason_ = std::string(device.status().message());
    GTEST_SKIP() << "SKIPPED, every test of this program: " << reason_;
  }
  void TearDown() override {
    if (reason_.empty()) return;
    std::printf("SKIPPED, every test of this program: %s\n", reason_.c_str());
  }

 private:
  std::string reason_;
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new SkipWithoutGpu);
  return RUN_ALL_TESTS();
}
