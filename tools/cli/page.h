// Pages to look at: one HTML file each with its charts, tables, scripts and
// data inside, which asks the network for nothing.
//
// How a document is drawn stands in page/: page.html, one script for each
// `kind`, and charts.js for what they share. tools/ninja/embed makes one text
// of them and of Chart.js, which is Debian's.
//
// Every document: {"kind", "title", "notes": [text, ...]} and, by kind:
//
//   "memory"  "rows": lines of `zero memory --json` with "config" (its name)
//             and, where known, "timeline": {"actions": [name, ...], "bytes":
//             {category: [[action, bytes from it on], ...]}} and "measured":
//             {category: bytes, "total": bytes}, of which each may be missing
//   "report"  "runs": [{"name", "series": {name: [[step, value or null], ...]},
//             "predicted", "peak": {category or "total": bytes}, "resident":
//             bytes}], "summary": [{"name", "values": [of each run]}],
//             "config": [{"key", "values": [text or null of each run]}]
#ifndef ZERO_TOOLS_CLI_PAGE_H_
#define ZERO_TOOLS_CLI_PAGE_H_

#include <string>

#include "absl/status/status.h"
#include "nlohmann/json_fwd.hpp"

namespace zero {

// Before long work: whether WritePage can write `path`.
// Errors: AlreadyExists where a file is there that is no such page; FileError.
absl::Status CheckPage(const std::string& path);

// Errors: as CheckPage.
absl::Status WritePage(const std::string& path,
                       const nlohmann::ordered_json& document);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_PAGE_H_
