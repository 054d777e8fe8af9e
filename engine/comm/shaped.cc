#include "engine/comm/shaped.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

constexpr struct {
  const char* name;
  double bytes_per_second;
} kRateUnits[] = {{"KB/s", 1e3},       {"MB/s", 1e6},       {"GB/s", 1e9},
                  {"kbit/s", 1e3 / 8}, {"Mbit/s", 1e6 / 8}, {"Gbit/s", 1e9 / 8},
                  {"B/s", 1}};

absl::Status Malformed(absl::string_view text, absl::string_view reason) {
  return absl::InvalidArgumentError(
      absl::StrCat("link \"", text, "\": ", reason,
                   "; want RATE,LATENCY such as 1GB/s,50us or 10Gbit/s,0"));
}

absl::StatusOr<double> ParseRate(absl::string_view text,
                                 absl::string_view rate) {
  for (const auto& unit : kRateUnits) {
    absl::string_view number = rate;
    if (!absl::ConsumeSuffix(&number, unit.name)) continue;
    double value = 0;
    if (!absl::SimpleAtod(number, &value) || !std::isfinite(value) ||
        value <= 0) {
      return Malformed(
          text, absl::StrCat("the rate \"", rate,
                             "\" is not a positive number of ", unit.name));
    }
    return value * unit.bytes_per_second;
  }
  return Malformed(text, absl::StrCat("the rate \"", rate,
                                      "\" does not end in B/s, KB/s, MB/s, "
                                      "GB/s, kbit/s, Mbit/s or Gbit/s"));
}

// The sleep is cut into slices, so that it ends soon after the group fails.
void SleepUntil(Clock::time_point end, const std::function<bool()>& failed) {
  constexpr auto kSlice = std::chrono::milliseconds(20);
  for (Clock::time_point now = Clock::now(); now < end && !failed();
       now = Clock::now()) {
    std::this_thread::sleep_until(std::min(end, now + kSlice));
  }
}

}  // namespace

absl::StatusOr<Link> ParseLink(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, ',');
  if (parts.size() != 2) {
    return Malformed(
        text, absl::StrCat("wants 2 parts with a comma between them, not ",
                           parts.size()));
  }
  Link link{.text = std::string(text)};
  ZERO_ASSIGN_OR_RETURN(link.bytes_per_second, ParseRate(text, parts[0]));
  // Such a wait cannot be interrupted.
  if (link.bytes_per_second < 100) {
    return Malformed(
        text, absl::StrCat("the rate \"", parts[0], "\" is below 100 B/s"));
  }
  if (!absl::ParseDuration(parts[1], &link.latency) ||
      link.latency < absl::ZeroDuration() || link.latency > absl::Seconds(10)) {
    return Malformed(
        text,
        absl::StrCat(
            "the latency \"", parts[1],
            "\" is neither 0 nor a number of ns, us, ms or s up to 10 s"));
  }
  return link;
}

absl::Duration LinkTime(const Link& link, const Collective& collective,
                        int world) {
  return link.latency * (world - 2) +
         LinkTime(link, WireBytes(collective, world));
}

absl::Duration LinkTime(const Link& link, int64_t bytes) {
  return link.latency +
         absl::Seconds(static_cast<double>(bytes) / link.bytes_per_second);
}

void EnqueueAtLeast(Stream& stream, absl::Duration least,
                    std::function<bool()> failed,
                    const std::function<void()>& work) {
  const auto begin = std::make_shared<Clock::time_point>();
  stream.Enqueue([begin] { *begin = Clock::now(); });
  work();
  stream.Enqueue(
      [begin, least = absl::ToChronoNanoseconds(least),
       failed = std::move(failed)] { SleepUntil(*begin + least, failed); });
}

ShapedCommunicator::ShapedCommunicator(std::unique_ptr<Communicator> inner,
                                       Link link)
    : CommunicatorWrapper(std::move(inner)), link_(link) {
  ZERO_CHECK_GT(link.bytes_per_second, 0) << "shaped: rate";
  ZERO_CHECK(link.latency >= absl::ZeroDuration())
      << "shaped: latency " << absl::FormatDuration(link.latency);
}

void ShapedCommunicator::Run(Stream& stream, Collective collective) {
  EnqueueAtLeast(
      stream, LinkTime(link_, collective, world()),
      [inner = inner_] { return !inner->status().ok(); },
      [&] { inner_->Run(stream, std::move(collective)); });
}

}  // namespace zero
