#include "engine/base/hash.h"

#include <gtest/gtest.h>

#include <vector>

namespace zero {
namespace {

// As `xxh128sum` prints them.
TEST(HashTest, EqualsTheReferenceTool) {
  EXPECT_EQ(HashOf(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(HashOf("abc"), "06b05ab6733a618578af5f94892f3950");
}

TEST(BlockHashTest, IsTheSameInWhateverOrderAndByWhomever) {
  std::vector<float> values(200);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * i;
  const absl::Span<const float> all = values;
  BlockHash whole, first, last;
  whole.Add(7, all);
  last.Add(9, all.subspan(128));
  first.Add(8, all.subspan(64, 64));
  first.Add(7, all.first(64));
  BlockHash::Parts parts = first.parts();
  for (int i = 0; i < BlockHash::kNumParts; ++i) parts[i] += last.parts()[i];
  const std::string hash = BlockHash::HexDigest(whole.parts());
  EXPECT_EQ(BlockHash::HexDigest(parts), hash);
  EXPECT_EQ(hash.size(), 32u);
  BlockHash moved;
  moved.Add(8, all);
  EXPECT_NE(BlockHash::HexDigest(moved.parts()), hash);
}

}  // namespace
}  // namespace zero
