// `zero report`: the output of runs as an HTML page.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/run_record.h"
#include "engine/train/stragglers.h"
#include "engine/train/tensorboard.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/page.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Values by step; the last one written counts. NaN: null.
using Series = std::map<int64_t, Json>;
using Flat = std::vector<std::pair<std::string, Json>>;

struct Run {
  std::string name;  // the folder, as given
  std::map<std::string, Series> series;
  Json summary, config;  // null: none
  int64_t steps = 0;     // the last one written
};

// A JSON file of a run; null if missing.
absl::StatusOr<Json> ReadJson(const std::string& path) {
  if (!PathExists(path)) return Json();
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false,
                          /*ignore_comments=*/true);
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a JSON object; is it a file of a run?"));
  }
  return json;
}

// Adds a note for each slow rank that `line` names, in RunReport's words.
void NoteStragglers(const std::string& path, const Json& line,
                    std::vector<std::string>* notes) {
  const auto found = line.find("stragglers");
  if (found == line.end() || !found->is_array()) return;
  for (const Json& one : *found) {
    notes->push_back(absl::StrFormat(
        "%s: step %d: %s", path, line.value("step", int64_t{0}),
        StragglerText({.rank = one.value("rank", 0),
                       .factor = one.value("factor", 0.0),
                       .part = StepPartOf(one.value("part", "")),
                       .host = one.value("host", "?")})));
  }
}

absl::Status ReadMetrics(const std::string& path, Run* run,
                         std::vector<std::string>* notes) {
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const Json line =
        Json::parse(lines[i], nullptr, /*allow_exceptions=*/false);
    const auto step = line.find("step");
    if (!line.is_object() || step == line.end() || !step->is_number_integer()) {
      // Every complete line ends with a line break.
      if (i + 1 == lines.size()) {
        notes->push_back(absl::StrCat(
            path, ": the last line is broken, as a killed run leaves it"));
        break;
      }
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", i + 1,
                       ": not a JSON object with a step; is it metrics.jsonl "
                       "of a run?"));
    }
    run->steps = step->get<int64_t>();
    NoteStragglers(path, line, notes);
    for (const auto& [name, value] : Flatten(line)) {
      if (value.is_number() || value.is_null()) {
        run->series[name][run->steps] = value;
      }
    }
  }
  if (run->steps == 0) {
    notes->push_back(absl::StrCat(path, ": no step is written yet"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Run> ReadRun(const std::string& folder,
                            std::vector<std::string>* notes) {
  Run run;
  run.name = folder;
  while (run.name.size() > 1 && run.name.back() == '/') run.name.pop_back();
  if (!IsFolder(run.name)) {
    return absl::NotFoundError(absl::StrCat(
        "'", folder, "' is not a folder; name the training.out_dir of a run"));
  }
  const std::string metrics = run.name + "/metrics.jsonl";
  if (!PathExists(metrics)) {
    return absl::NotFoundError(absl::StrCat(
        "'", folder,
        "' has no metrics.jsonl; name the training.out_dir of a run"));
  }
  ZERO_RETURN_IF_ERROR(ReadMetrics(metrics, &run, notes));
  ZERO_ASSIGN_OR_RETURN(run.config, ReadJson(run.name + "/config.json"));
  ZERO_ASSIGN_OR_RETURN(run.summary, ReadJson(run.name + "/summary.json"));
  if (run.summary.is_null()) {
    notes->push_back(absl::StrCat(
        run.name, ": no summary.json; the run is still going, or was killed"));
  } else if (run.summary.contains("error")) {
    notes->push_back(absl::StrCat(
        run.name, ": the run failed: ", run.summary["error"].dump()));
  }
  if (const auto at = run.summary.find("resumed_at");
      at != run.summary.end() && at->is_array()) {
    notes->push_back(absl::StrCat(
        run.name, ": a run in ", at->size() + 1, " parts, resumed at step ",
        absl::StrJoin(*at, ", ", [](std::string* out, const Json& step) {
          out->append(step.dump());
        })));
  }
  return run;
}

// All points, or the lowest and highest of groups of neighbors that leave
// kMaxPoints: no spike is lost.
Json Points(const Series& series) {
  constexpr size_t kMaxPoints = 2000;
  Json points = Json::array();
  const auto add = [&](const Series::value_type& point) {
    points.push_back({point.first, point.second});
  };
  const size_t group =
      series.size() <= kMaxPoints ? 1 : 2 * series.size() / kMaxPoints + 1;
  for (auto it = series.begin(); it != series.end();) {
    const Series::value_type *low = &*it, *high = &*it;
    for (size_t i = 0; i < group && it != series.end(); ++i, ++it) {
      // A null is neither the lowest nor the highest if the group has a value.
      if (it->second.is_null()) continue;
      if (low->second.is_null() || it->second < low->second) low = &*it;
      if (high->second.is_null() || high->second < it->second) high = &*it;
    }
    add(low->first < high->first ? *low : *high);
    if (low != high) add(low->first < high->first ? *high : *low);
  }
  return points;
}

// Rows of {label: name, "values": [of each run]}: every name of any run, null
// if a run lacks it.
Json Compare(const std::vector<Flat>& of_runs, const std::string& label,
             bool only_different) {
  std::vector<std::string> names;
  std::vector<std::map<std::string, Json>> values;
  for (const Flat& flat : of_runs) {
    for (const auto& [name, value] : flat) {
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(name);
      }
    }
    values.emplace_back(flat.begin(), flat.end());
  }
  Json rows = Json::array();
  for (const std::string& name : names) {
    Json row = Json::array();
    for (const auto& run : values) {
      const auto it = run.find(name);
      row.push_back(it == run.end() ? Json() : it->second);
    }
    const bool same = std::all_of(row.begin(), row.end(),
                                  [&](const Json& v) { return v == row[0]; });
    if (!(same && only_different)) {
      rows.push_back({{label, name}, {"values", row}});
    }
  }
  return rows;
}

Json AsJson(const Run& run) {
  Json json = {{"name", run.name}, {"series", Json::object()}};
  for (const auto& [name, series] : run.series) {
    if (name != "step") json["series"][name] = Points(series);
  }
  const Json summary = run.summary.is_null() ? Json::object() : run.summary;
  for (const auto& [name, from] :
       {std::pair("predicted", "predicted_peak_bytes"),
        std::pair("peak", "peak_bytes")}) {
    if (summary.contains(from)) json[name] = summary[from];
  }
  // On a GPU the process's memory is not the device's. Ranks on the CPU are
  // threads of one process, or of each of several.
  if (summary.contains("resident_bytes")) {
    const int64_t ranks = summary.value("ranks", int64_t{1});
    json["resident"] = summary.value("peak_resident_bytes", int64_t{0}) /
                       summary.value("process_ranks", ranks);
  }
  return json;
}

Json MakeDocument(const std::vector<Run>& runs,
                  const std::vector<std::string>& notes) {
  std::vector<std::string> names;
  std::vector<Flat> summaries, configs;
  Json document = {{"kind", "report"},
                   {"title", ""},
                   {"notes", notes},
                   {"runs", Json::array()}};
  for (const Run& run : runs) {
    names.push_back(run.name);
    document["runs"].push_back(AsJson(run));
    summaries.push_back(Flatten(run.summary));
    Flat config = Flatten(run.config);
    // As written in a config file.
    for (auto& [key, value] : config) value = value.dump();
    configs.push_back(std::move(config));
  }
  document["title"] = absl::StrCat(runs.size() > 1 ? "Runs " : "Run ",
                                   absl::StrJoin(names, ", "));
  document["summary"] = Compare(summaries, "name", /*only_different=*/false);
  document["config"] = Compare(configs, "key",
                               /*only_different=*/runs.size() > 1);
  return document;
}

// A folder name for a run, different from those `taken`.
std::string EventFolder(const std::string& run, std::set<std::string>* taken) {
  const std::filesystem::path path =
      std::filesystem::absolute(run).lexically_normal();
  std::string name = absl::StrReplaceAll(
      std::filesystem::path(run).lexically_normal().string(), {{"/", "_"}});
  if (name.front() == '.') name = path.filename();
  std::string unlike = name;
  for (int i = 2; !taken->insert(unlike).second; ++i) {
    unlike = absl::StrCat(name, "-", i);
  }
  return unlike;
}

// Writes FOLDER/ with an event file of every value of metrics.jsonl. A run does
// not record the time of its steps; TensorBoard's relative time is the steps'
// own.
absl::Status WriteEvents(const Run& run, const std::string& folder) {
  std::map<int64_t, std::vector<std::pair<std::string, double>>> by_step;
  for (const auto& [name, series] : run.series) {
    if (name == "step") continue;
    for (const auto& [step, value] : series) {
      by_step[step].emplace_back(
          name, value.is_null() ? kNotKnown : value.get<double>());
    }
  }
  EventFile events;
  double seconds = 0;
  for (const auto& [step, scalars] : by_step) {
    for (const auto& [name, value] : scalars) {
      if (name == "step_ms") seconds += value * 1e-3;
    }
    events.Add(seconds, step, scalars);
  }
  ZERO_RETURN_IF_ERROR(MakeFolders(folder));
  return WriteFileAtomically(absl::StrCat(folder, "/", kEventFile),
                             events.TakeContents());
}

absl::Status Report(const std::vector<std::string>& folders,
                    const std::string& path, const std::string& tensorboard) {
  ZERO_RETURN_IF_ERROR(CheckPage(path));
  std::vector<Run> runs;
  std::vector<std::string> notes;
  for (const std::string& folder : folders) {
    ZERO_ASSIGN_OR_RETURN(Run run, ReadRun(folder, &notes));
    runs.push_back(std::move(run));
  }
  ZERO_RETURN_IF_ERROR(WritePage(path, MakeDocument(runs, notes)));
  if (!tensorboard.empty()) {
    std::set<std::string> taken;
    for (const Run& run : runs) {
      ZERO_RETURN_IF_ERROR(WriteEvents(
          run, absl::StrCat(tensorboard, "/", EventFolder(run.name, &taken))));
    }
  }
  for (const std::string& note : notes) absl::PrintF("note: %s\n", note);
  for (const Run& run : runs) {
    absl::PrintF("%s: %s\n", run.name, Counted(run.steps, "step"));
  }
  absl::PrintF("written %s\n", path);
  return absl::OkStatus();
}

}  // namespace

Command AddReport(CLI::App& app) {
  auto folders = std::make_shared<std::vector<std::string>>();
  auto path = std::make_shared<std::string>("report.html");
  app.add_option("RUN_DIR", *folders, "training.out_dir of runs to compare")
      ->required();
  app.add_option("--html", *path, "page to write")
      ->capture_default_str()
      ->type_name("FILE");
  auto tensorboard = std::make_shared<std::string>();
  app.add_option("--tensorboard", *tensorboard,
                 "also write event files for tensorboard --logdir DIR")
      ->type_name("DIR");
  return [folders, path, tensorboard] {
    return Report(*folders, *path, *tensorboard);
  };
}

}  // namespace zero
