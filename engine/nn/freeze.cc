#include "engine/nn/freeze.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/nearest.h"
#include "engine/base/status.h"

namespace zero {
namespace {

template <typename... Parts>
absl::Status Wrong(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("model.freeze: ", parts...));
}

bool Matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

// A tensor of a Hugging Face folder, and whether a pattern names it.
struct Piece {
  std::string name;
  bool named = false;
};

class Freezer {
 public:
  explicit Freezer(Model& model) : model_(model) {
    for (const PortableTensor& tensor : model.PortableTensors()) {
      pieces_[tensor.parameter].push_back({tensor.name});
    }
  }

  absl::Status Apply(const std::string& pattern) {
    bool found = false;
    for (Parameter* const parameter : model_.AllParameters()) {
      const bool whole = Matches(pattern, parameter->name);
      for (Piece& piece : pieces_[parameter]) {
        if (!whole && !Matches(pattern, piece.name)) continue;
        piece.named = found = true;
      }
    }
    return found ? absl::OkStatus() : NothingMatches(pattern);
  }

  absl::Status Finish() {
    bool trains = false;
    for (Parameter* const parameter : model_.AllParameters()) {
      const std::vector<Piece>& pieces = pieces_[parameter];
      const auto named = [](const Piece& piece) { return piece.named; };
      parameter->frozen = std::all_of(pieces.begin(), pieces.end(), named);
      trains |= !parameter->frozen;
      if (!parameter->frozen &&
          std::any_of(pieces.begin(), pieces.end(), named)) {
        return OnlyAPart(*parameter, pieces);
      }
    }
    if (trains) return absl::OkStatus();
    return Wrong(
        "it matches every tensor, so nothing is left to train; leave some out, "
        "or use zero eval");
  }

 private:
  absl::Status NothingMatches(const std::string& pattern) {
    for (const auto& unit : model_.units()) {
      for (const Parameter* tied : unit->borrowed()) {
        if (!Matches(pattern, "lm_head.weight")) continue;
        return Wrong("\"", pattern, "\" is the head, which is tied to ",
                     pieces_[tied][0].name, " (", tied->name,
                     ", model.tie_word_embeddings); freeze that one, or "
                     "delete the pattern");
      }
    }
    std::vector<std::string> names;
    for (Parameter* const parameter : model_.AllParameters()) {
      names.push_back(parameter->name);
      for (const Piece& piece : pieces_[parameter]) {
        if (piece.name != parameter->name) names.push_back(piece.name);
      }
    }
    constexpr size_t kShown = 4;
    std::vector<std::string> shown = NearestNames(pattern, names, 1);
    for (size_t i = 0; i < names.size() && shown.size() < kShown; ++i) {
      const auto end = shown.end();
      if (std::find(shown.begin(), end, names[i]) == end) {
        shown.push_back(names[i]);
      }
    }
    return Wrong("no tensor's name matches \"", pattern, "\"; there are ",
                 names.size(), " names, such as ", absl::StrJoin(shown, ", "),
                 ". A pattern is a glob over a whole name: *, ?, [abc]");
  }

  static absl::Status OnlyAPart(const Parameter& parameter,
                                const std::vector<Piece>& pieces) {
    std::vector<std::string> named, others;
    for (const Piece& piece : pieces) {
      (piece.named ? named : others).push_back(piece.name);
    }
    return Wrong(absl::StrJoin(named, ", "), " would be frozen, but not ",
                 absl::StrJoin(others, ", "), ", which are trained as one (",
                 parameter.name, "); freeze all of them or none");
  }

  Model& model_;
  std::map<const Parameter*, std::vector<Piece>> pieces_;
};

}  // namespace

absl::Status FreezeParameters(const std::vector<std::string>& patterns,
                              Model& model) {
  if (patterns.empty()) return absl::OkStatus();
  Freezer freezer(model);
  for (const std::string& pattern : patterns) {
    ZERO_RETURN_IF_ERROR(freezer.Apply(pattern));
  }
  return freezer.Finish();
}

int64_t NumFrozen(const Model& model) {
  int64_t frozen = 0;
  for (const Parameter* parameter : model.AllParameters()) {
    if (parameter->frozen) frozen += parameter->shape.num_elems();
  }
  return frozen;
}

size_t FirstTrainedUnit(const Model& model) {
  size_t first = 0;
  const auto is_trained = [](const auto& p) { return !p->frozen; };
  for (const auto& unit : model.units()) {
    if (absl::c_any_of(unit->parameters(), is_trained) ||
        absl::c_any_of(unit->borrowed(), is_trained)) {
      break;
    }
    ++first;
  }
  return first;
}

}  // namespace zero
