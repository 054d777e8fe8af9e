#include "engine/base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace zero {
namespace {

std::string HashOf(absl::string_view text) {
  Hasher hasher;
  hasher.Update(text);
  return hasher.HexDigest();
}

// As `xxh128sum` prints them.
TEST(HashTest, EqualsTheReferenceTool) {
  EXPECT_EQ(HashOf(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(HashOf("abc"), "06b05ab6733a618578af5f94892f3950");
}

TEST(HashTest, DoesNotDependOnHowUpdateCutsTheBytes) {
  std::string text(5000, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31);
  for (const size_t piece : {size_t{1}, size_t{7}, size_t{1024}}) {
    Hasher hasher;
    for (size_t at = 0; at < text.size(); at += piece) {
      hasher.Update(text.data() + at, std::min(piece, text.size() - at));
    }
    EXPECT_EQ(hasher.HexDigest(), HashOf(text));
  }
}

TEST(HashTest, MoreMayFollowADigest) {
  Hasher hasher;
  hasher.Update("ab");
  EXPECT_EQ(hasher.HexDigest(), HashOf("ab"));
  hasher.Update("c");
  EXPECT_EQ(hasher.HexDigest(), HashOf("abc"));
}

}  // namespace
}  // namespace zero
