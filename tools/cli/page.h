// HTML pages: one file each with its charts, tables, scripts and data, without
// network access.
//
// page/ draws a document: page.html, one script for each `kind`, and charts.js
// for shared code. tools/ninja/embed makes one text of them and Debian's
// Chart.js.
//
// Every document: {"kind", "title", "notes": [text, ...]} and, by kind:
//
//   "memory"  "rows": lines of `zero memory --json` with "config" (its name)
//             and, where known, "timeline": {"actions": [name, ...],
//             "purposes": [of each action], "bytes": {category: [[action, bytes
//             from it on], ...]}} and "measured": {category: bytes,
//             "host_bytes": bytes, "total": bytes}
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

// Checks, before long work, that WritePage can write `path`.
// Errors: AlreadyExists if a file is there that is not such a page; FileError.
absl::Status CheckPage(const std::string& path);

// Errors: as CheckPage.
absl::Status WritePage(const std::string& path,
                       const nlohmann::ordered_json& document);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_PAGE_H_
