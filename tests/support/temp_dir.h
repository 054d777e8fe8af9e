// A folder of its own for one test, removed at the end.
#ifndef ZERO_TESTS_SUPPORT_TEMP_DIR_H_
#define ZERO_TESTS_SUPPORT_TEMP_DIR_H_

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace zero {

class TempDir {
 public:
  TempDir() {
    std::string path =
        (std::filesystem::temp_directory_path() / "zero_test_XXXXXX").string();
    path_ = ::mkdtemp(path.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }

  // The path of `name` in this folder.
  std::string File(const std::string& name) const { return path_ + "/" + name; }

  // Writes `contents` to `name`, folders included, and returns its path.
  std::string Write(const std::string& name,
                    const std::string& contents) const {
    const std::string path = File(name);
    std::filesystem::create_directories(
        std::filesystem::path(path).parent_path());
    // A new file: ext4 flushes one that is truncated and written again.
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }

  std::string Read(const std::string& name) const {
    std::ifstream in(File(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // Number of entries, to check that nothing is left.
  int Count() const {
    std::filesystem::directory_iterator entries(path_);
    return static_cast<int>(std::distance(begin(entries), end(entries)));
  }

 private:
  std::string path_;
};

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_TEMP_DIR_H_
