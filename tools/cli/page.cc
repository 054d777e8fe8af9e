#include "tools/cli/page.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/train/metrics.h"
#include "nlohmann/json.hpp"

namespace zero {

extern const char kPageHtml[];  // tools/ninja/embed

namespace {

constexpr absl::string_view kBegin = "<!DOCTYPE html>\n<!-- A page of zero";
constexpr absl::string_view kNoDocument = "id=\"document\">{}<";

}  // namespace

absl::Status CheckPage(const std::string& path) {
  ZERO_RETURN_IF_ERROR(AtomicFile::Create(path).status());
  if (!PathExists(path)) return absl::OkStatus();
  std::string begin(kBegin.size(), '\0');
  std::ifstream(path).read(begin.data(), begin.size());
  if (begin == kBegin) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "'", path,
      "' exists and is not a page of zero; choose another name, or remove it"));
}

absl::Status WritePage(const std::string& path,
                       const nlohmann::ordered_json& document) {
  ZERO_RETURN_IF_ERROR(CheckPage(path));
  // No text in a script may look like its end.
  const std::string json =
      absl::StrReplaceAll(ToLine(document), {{"<", "\\u003c"}});
  return WriteFileAtomically(
      path, absl::StrReplaceAll(
                kPageHtml,
                {{kNoDocument, absl::StrCat("id=\"document\">", json, "<")}}));
}

}  // namespace zero
