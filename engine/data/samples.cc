#include "engine/data/samples.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::json;

constexpr char kWanted[] =
    R"(want {"prompt": "...", "completion": "..."} or {"text": "..."})";

// Lines that a thread takes at once.
constexpr size_t kLinesAtOnce = 64;

struct Line {
  const std::string* path;
  int64_t number;  // from 1
  absl::string_view text;
};

template <typename... Parts>
absl::Status Wrong(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// "column 17: invalid literal ..." of a parser's error.
std::string Reason(const Json::parse_error& error) {
  absl::string_view what = error.what();
  const size_t at = what.find(", column ");
  return std::string(at == absl::string_view::npos ? what
                                                   : what.substr(at + 2));
}

absl::StatusOr<Json> ParseObject(absl::string_view text) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::parse_error& error) {
    return Wrong("not JSON, ", Reason(error), "; ", kWanted, " on each line");
  }
  if (!json.is_object()) {
    return Wrong("a JSON ", json.type_name(), ", not an object; ", kWanted);
  }
  return json;
}

absl::StatusOr<std::string> TextOf(const Json& object, const char* key) {
  const Json& value = object[key];
  if (value.is_string()) return value.get<std::string>();
  return Wrong("\"", key, "\" is a ", value.type_name(), ", want a string; ",
               kWanted);
}

absl::Status WrongKeys(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) {
    keys.push_back(absl::StrCat("\"", key, "\""));
  }
  if (object.contains("messages")) {
    return Wrong(
        "a line of \"messages\", and zero has no chat templates; apply the "
        "model's template first and ",
        kWanted);
  }
  return Wrong("it has ", keys.empty() ? "no keys" : absl::StrJoin(keys, ", "),
               "; ", kWanted);
}

absl::StatusOr<Sample> SampleOf(const Json& object,
                                const Tokenizer& tokenizer) {
  const bool has_prompt = object.contains("prompt");
  const bool has_completion = object.contains("completion");
  const bool has_text = object.contains("text");
  if (has_text == has_prompt || has_prompt != has_completion) {
    return WrongKeys(object);
  }
  std::string prompt;
  if (has_prompt) {
    ZERO_ASSIGN_OR_RETURN(prompt, TextOf(object, "prompt"));
  }
  const char* const learned = has_text ? "text" : "completion";
  ZERO_ASSIGN_OR_RETURN(const std::string text, TextOf(object, learned));
  if (text.empty()) {
    return Wrong("\"", learned,
                 "\" is empty, so there is nothing to learn; fill it or delete "
                 "the line");
  }
  Sample sample{tokenizer.EncodePrompt(prompt)};
  if (sample.ids.empty()) sample.ids = {tokenizer.DocumentStart().back()};
  sample.num_prompt = static_cast<int64_t>(sample.ids.size());
  tokenizer.EncodePart(text, text.size(), /*continues=*/!prompt.empty(),
                       &sample.ids);
  sample.ids.push_back(tokenizer.eot_id());
  return sample;
}

// Appends the lines of a file that are not blank.
absl::Status AddLines(const std::string& path, const MappedFile& file,
                      std::vector<Line>* lines) {
  absl::string_view rest(reinterpret_cast<const char*>(file.data()),
                         static_cast<size_t>(file.size()));
  const size_t before = lines->size();
  for (int64_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const absl::string_view text = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (absl::StripAsciiWhitespace(text).empty()) continue;
    lines->push_back({&path, number, text});
  }
  if (lines->size() > before) return absl::OkStatus();
  return Wrong("'", path, "': it has no lines; ", kWanted, " on each line");
}

// The samples of `lines`, or the error of the first wrong line.
absl::StatusOr<std::vector<Sample>> EncodeLines(const std::vector<Line>& lines,
                                                const Tokenizer& tokenizer,
                                                int num_threads) {
  std::vector<Sample> samples(lines.size());
  std::atomic<size_t> next{0}, first_wrong{lines.size()};
  const auto encode = [&](size_t i) -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(const Json object, ParseObject(lines[i].text));
    ZERO_ASSIGN_OR_RETURN(samples[i], SampleOf(object, tokenizer));
    return absl::OkStatus();
  };
  const auto work = [&]() -> absl::Status {
    for (size_t from; (from = next.fetch_add(kLinesAtOnce)) < lines.size();) {
      const size_t to = std::min(from + kLinesAtOnce, lines.size());
      for (size_t i = from; i < to && i < first_wrong.load(); ++i) {
        if (encode(i).ok()) continue;
        size_t known = first_wrong.load();
        while (i < known && !first_wrong.compare_exchange_weak(known, i)) {
        }
      }
    }
    return absl::OkStatus();
  };
  std::vector<absl::Status> results(std::max(num_threads, 1));
  std::vector<std::thread> helpers;
  for (size_t t = 1; t < results.size(); ++t) {
    helpers.emplace_back([&, t] { results[t] = CatchExceptions(work); });
  }
  results[0] = CatchExceptions(work);
  for (std::thread& helper : helpers) helper.join();
  for (const absl::Status& result : results) ZERO_RETURN_IF_ERROR(result);
  if (first_wrong.load() == lines.size()) return samples;
  const Line& line = lines[first_wrong.load()];
  return Wrong(*line.path, ":", line.number, ": ",
               encode(first_wrong.load()).message());
}

}  // namespace

absl::StatusOr<std::vector<Sample>> ReadSamples(
    const std::vector<std::string>& patterns, const Tokenizer& tokenizer,
    int num_threads) {
  ZERO_ASSIGN_OR_RETURN(const auto paths, ExpandPaths(patterns));
  std::vector<MappedFile> files;
  std::vector<Line> lines;
  for (const std::string& path : paths) {
    ZERO_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    files.push_back(std::move(file));
    ZERO_RETURN_IF_ERROR(AddLines(path, files.back(), &lines));
  }
  return EncodeLines(lines, tokenizer, num_threads);
}

PackedRows PackSamples(const std::vector<Sample>& samples, int64_t length,
                       PackingLoss* loss) {
  ZERO_CHECK_GE(length, 1);
  PackedRows rows{.length = length};
  std::set<std::pair<int64_t, int64_t>> open;  // room, row
  for (const Sample& sample : samples) {
    const int64_t whole = static_cast<int64_t>(sample.ids.size()) - 1;
    const int64_t n = std::min(whole, length);
    // Position i has the target i + 1; the first that counts is num_prompt.
    if (sample.num_prompt > n) {
      ++loss->left_out;
      continue;
    }
    if (n < whole) {
      ++loss->cut_samples;
      loss->cut_tokens += whole - n;
    }
    auto fits = open.lower_bound({n, 0});
    if (fits == open.end()) {
      const int64_t row = static_cast<int64_t>(rows.tokens.size()) / length;
      const size_t size = rows.tokens.size() + static_cast<size_t>(length);
      rows.tokens.resize(size, 0);
      rows.targets.resize(size, kIgnoredTarget);
      rows.positions.resize(size);
      fits = open.insert({length, row}).first;
    }
    const auto [room, row] = *fits;
    open.erase(fits);
    if (room > n) open.insert({room - n, row});
    const int64_t begin = (row + 1) * length - room;
    for (int64_t i = 0; i < n; ++i) {
      rows.tokens[begin + i] = sample.ids[i];
      rows.positions[begin + i] = static_cast<int32_t>(i);
      if (i + 1 >= sample.num_prompt) {
        rows.targets[begin + i] = sample.ids[i + 1];
      }
    }
    ++rows.num_samples;
    rows.num_tokens += n;
    rows.num_targets += n + 1 - sample.num_prompt;
  }
  // The rest of a row is an unused sequence.
  for (const auto& [room, row] : open) {
    const int64_t end = (row + 1) * length;
    for (int64_t i = 0; i < room; ++i) {
      rows.positions[end - room + i] = static_cast<int32_t>(i);
    }
  }
  return rows;
}

}  // namespace zero
