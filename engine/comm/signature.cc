#include "engine/comm/signature.h"

#include "absl/strings/str_cat.h"

namespace zero {
namespace {

std::string Sizes(const std::vector<CollectiveSegment>& segments) {
  std::string sizes;
  for (size_t i = 0; i < segments.size();) {
    size_t end = i + 1;
    while (end < segments.size() && segments[end].elems == segments[i].elems) {
      ++end;
    }
    absl::StrAppend(&sizes, i == 0 ? "" : ", ", segments[i].elems);
    if (end - i > 1) absl::StrAppend(&sizes, " x", end - i);
    i = end;
  }
  return absl::StrCat(" [", sizes, "]");
}

}  // namespace

std::string Signature(const Collective& collective) {
  std::string text = absl::StrCat(CollectiveKindName(collective.kind), " \"",
                                  collective.name, "\"");
  if (collective.kind == CollectiveKind::kBarrier) return text;
  absl::StrAppend(&text, " ", DTypeName(collective.dtype));
  if (collective.kind == CollectiveKind::kReduceScatter) {
    if (collective.accumulate) absl::StrAppend(&text, " +=");
  } else if (collective.kind == CollectiveKind::kReduce) {
    absl::StrAppend(&text, " to rank ", collective.root);
  } else if (collective.kind == CollectiveKind::kBroadcast) {
    absl::StrAppend(&text, " from rank ", collective.root);
  }
  if (collective.algorithm == BulkAlgorithm::kRing) {
    absl::StrAppend(&text, " by ring");
  }
  return text + Sizes(collective.segments);
}

}  // namespace zero
