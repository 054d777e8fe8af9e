#include "engine/comm/links.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

// Most hosts to measure pairwise: a few hundred pairs would take minutes.
constexpr size_t kMaxHostsOfAllPairs = 16;
// The fastest round trip is what the link allows.
constexpr int kRoundTrips = 50;
constexpr int64_t kLargeBytes = int64_t{16} << 20;
constexpr int kLargeMessages = 4;

constexpr char kChannel[] = "links";

absl::Status Move(Network& network, std::vector<PeerMessages> messages,
                  absl::Duration timeout) {
  return network.Begin(kChannel, std::move(messages))->Await(timeout);
}

// One end of a pair.
class End {
 public:
  End(Network& network, int peer, absl::Duration timeout)
      : network_(network), peer_(peer), timeout_(timeout) {}

  absl::Status Send(std::vector<char>& bytes) {
    return Move(network_, {{peer_, {Whole(bytes)}, {}}}, timeout_);
  }
  absl::Status Receive(std::vector<char>& bytes) {
    return Move(network_, {{peer_, {}, {Whole(bytes)}}}, timeout_);
  }

 private:
  static MemoryRun Whole(std::vector<char>& bytes) {
    return {bytes.data(), static_cast<int64_t>(bytes.size())};
  }

  Network& network_;
  const int peer_;
  const absl::Duration timeout_;
};

// `times` round trips; returns the shortest. The answer is short.
absl::StatusOr<Clock::duration> RoundTrip(End& end, bool first, int64_t bytes,
                                          int times) {
  std::vector<char> there(bytes), back(sizeof(double));
  Clock::duration best = Clock::duration::max();
  for (int i = 0; i < times; ++i) {
    const Clock::time_point begin = Clock::now();
    if (first) {
      ZERO_RETURN_IF_ERROR(end.Send(there));
      ZERO_RETURN_IF_ERROR(end.Receive(back));
    } else {
      ZERO_RETURN_IF_ERROR(end.Receive(there));
      ZERO_RETURN_IF_ERROR(end.Send(back));
    }
    best = std::min(best, Clock::now() - begin);
  }
  return best;
}

double SecondsOf(Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// Measures as the first process of a pair.
absl::StatusOr<LinkSpeed> MeasureOne(Network& network, int peer, bool first,
                                     absl::Duration timeout) {
  End end(network, peer, timeout);
  ZERO_ASSIGN_OR_RETURN(const Clock::duration small,
                        RoundTrip(end, first, sizeof(double), kRoundTrips));
  ZERO_ASSIGN_OR_RETURN(const Clock::duration large,
                        RoundTrip(end, first, kLargeBytes, kLargeMessages));
  const double latency = SecondsOf(small) / 2;
  // The answer's time is subtracted.
  const double seconds = std::max(SecondsOf(large) - latency, 1e-9);
  return LinkSpeed{.latency = absl::Seconds(latency),
                   .bytes_per_second = kLargeBytes / seconds};
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExchangeTexts(Network& network,
                                                       const std::string& text,
                                                       absl::Duration timeout) {
  ZERO_CHECK_LE(text.size(), kMaxTextBytes) << "links: text";
  std::vector<std::string> texts(network.num_processes(),
                                 std::string(kMaxTextBytes, '\0'));
  std::string& own = texts[network.process()];
  own.replace(0, text.size(), text);
  const auto run = [](std::string& one) -> MemoryRun {
    return {one.data(), static_cast<int64_t>(one.size())};
  };
  std::vector<PeerMessages> messages;
  for (int peer = 0; peer < network.num_processes(); ++peer) {
    if (peer == network.process()) continue;
    messages.push_back({peer, {run(own)}, {run(texts[peer])}});
  }
  ZERO_RETURN_IF_ERROR(Move(network, std::move(messages), timeout));
  for (std::string& one : texts) one.resize(std::strlen(one.c_str()));
  return texts;
}

std::vector<std::pair<int, int>> LinksToMeasure(
    const std::vector<std::string>& hosts) {
  std::vector<int> firsts;
  std::map<std::string, int> first_of;
  std::vector<std::pair<int, int>> within, between;
  std::map<std::string, bool> measured;
  for (int process = 0; process < static_cast<int>(hosts.size()); ++process) {
    const auto [it, is_first] = first_of.try_emplace(hosts[process], process);
    if (is_first) {
      firsts.push_back(process);
    } else if (!std::exchange(measured[hosts[process]], true)) {
      within.emplace_back(it->second, process);
    }
  }
  for (size_t a = 0; a < firsts.size(); ++a) {
    if (firsts.size() > kMaxHostsOfAllPairs) {
      between.emplace_back(firsts[a], firsts[(a + 1) % firsts.size()]);
      continue;
    }
    for (size_t b = a + 1; b < firsts.size(); ++b) {
      between.emplace_back(firsts[a], firsts[b]);
    }
  }
  within.insert(within.end(), between.begin(), between.end());
  return within;
}

absl::StatusOr<std::vector<LinkSpeed>> MeasureLinks(
    Network& network, const std::vector<std::pair<int, int>>& pairs,
    absl::Duration timeout) {
  std::vector<LinkSpeed> speeds;
  for (const auto& [from, to] : pairs) {
    // A process that is not in a pair waits for the next text.
    double measured[2] = {};
    const bool first = network.process() == from;
    if (first || network.process() == to) {
      ZERO_ASSIGN_OR_RETURN(
          const LinkSpeed one,
          MeasureOne(network, first ? to : from, first, timeout));
      measured[0] = absl::ToDoubleSeconds(one.latency);
      measured[1] = one.bytes_per_second;
    }
    const std::string text = absl::StrCat(measured[0], " ", measured[1]);
    ZERO_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                          ExchangeTexts(network, text, timeout));
    if (network.process() > 0) continue;
    const std::vector<std::string> numbers = absl::StrSplit(texts[from], ' ');
    LinkSpeed speed{.from = from, .to = to};
    double latency = 0;
    if (numbers.size() != 2 || !absl::SimpleAtod(numbers[0], &latency) ||
        !absl::SimpleAtod(numbers[1], &speed.bytes_per_second)) {
      return absl::InternalError("links: a process sent no numbers");
    }
    speed.latency = absl::Seconds(latency);
    speeds.push_back(speed);
  }
  return speeds;
}

}  // namespace zero
