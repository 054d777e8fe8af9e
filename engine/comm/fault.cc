#include "engine/comm/fault.h"

#include <ctime>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace zero {
namespace {

absl::Status Malformed(absl::string_view text, const std::string& reason) {
  return absl::InvalidArgumentError(
      absl::StrCat("fault \"", text, "\": ", reason,
                   "; want RANK:STEP:KIND such as 1:3:stop, KIND one of "
                   "throw, stop, mismatch, slow=F"));
}

}  // namespace

absl::StatusOr<Fault> ParseFault(absl::string_view text, int world,
                                 int64_t num_steps) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  if (parts.size() != 3) {
    return Malformed(
        text, absl::StrCat("wants 3 parts with colons between them, not ",
                           parts.size()));
  }
  if (world < 2) {
    return Malformed(text,
                     "with one rank no other rank would notice; give --ranks");
  }
  Fault fault;
  if (!absl::SimpleAtoi(parts[0], &fault.rank) || fault.rank < 0 ||
      fault.rank >= world) {
    return Malformed(text, absl::StrCat("rank \"", parts[0],
                                        "\" is not in [0, ", world, ")"));
  }
  if (!absl::SimpleAtoi(parts[1], &fault.step) || fault.step < 1) {
    return Malformed(
        text, absl::StrCat("step \"", parts[1], "\" is not a number >= 1"));
  }
  if (num_steps > 0 && fault.step > num_steps) {
    return Malformed(text, absl::StrCat("step \"", parts[1],
                                        "\" is not in [1, ", num_steps, "]"));
  }
  const std::map<std::string, FaultKind> kinds = {
      {"throw", FaultKind::kThrow},
      {"stop", FaultKind::kStop},
      {"mismatch", FaultKind::kMismatch}};
  constexpr absl::string_view kSlow = "slow=";
  if (absl::StartsWith(parts[2], kSlow)) {
    const std::string factor = parts[2].substr(kSlow.size());
    if (!absl::SimpleAtod(factor, &fault.factor) ||
        !(fault.factor > 1 && fault.factor <= 1000)) {
      return Malformed(
          text, absl::StrCat("factor \"", factor, "\" is not in (1, 1000]"));
    }
    fault.kind = FaultKind::kSlow;
    return fault;
  }
  const auto kind = kinds.find(parts[2]);
  if (kind == kinds.end()) {
    return Malformed(text, absl::StrCat("\"", parts[2], "\" is not a kind"));
  }
  fault.kind = kind->second;
  return fault;
}

class FaultInjector::Faulty final : public CommunicatorWrapper {
 public:
  Faulty(FaultInjector* injector, std::string channel,
         std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)),
        injector_(injector),
        channel_(std::move(channel)) {}

  void Run(Stream& stream, Collective collective) override {
    if (injector_->IssuesAnother(channel_, collective)) {
      inner_->Barrier(stream, "injected fault");
    } else {
      inner_->Run(stream, std::move(collective));
    }
  }

 private:
  FaultInjector* const injector_;
  const std::string channel_;
};

std::unique_ptr<Communicator> FaultInjector::Wrap(
    int rank, const std::string& channel, std::unique_ptr<Communicator> end) {
  if (rank != fault_.rank) return end;
  return std::make_unique<Faulty>(this, channel, std::move(end));
}

bool FaultInjector::IssuesAnother(const std::string& channel,
                                  const Collective& collective) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (collective.name == step_end_) ++step_;
  if (channel != "reduce") return false;
  if (fault_.kind == FaultKind::kSlow) {
    happened_ |= step_ >= fault_.step;
    lock.unlock();
    Slow(step_);
    return false;
  }
  if (happened_ || step_ != fault_.step) return false;
  happened_ = true;
  switch (fault_.kind) {
    case FaultKind::kThrow:
      throw std::runtime_error(absl::StrCat("injected fault in step ", step_,
                                            " at ", Signature(collective),
                                            " of channel \"", channel, "\""));
    case FaultKind::kStop:
      changed_.wait(lock, [&] { return released_; });
      return false;
    case FaultKind::kMismatch:
      return true;
    case FaultKind::kSlow:
      break;
  }
  return false;
}

void FaultInjector::Slow(int64_t step) {
  const absl::Duration computed = clock_.computed();
  const absl::Duration since =
      computed - std::exchange(computed_, computed).value_or(computed);
  if (step >= fault_.step) clock_.sleep((fault_.factor - 1) * since);
}

FaultInjector::Clock FaultInjector::Clock::Real() {
  return {.computed =
              [] {
                timespec time = {};
                clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
                return absl::DurationFromTimespec(time);
              },
          .sleep = [](absl::Duration time) { absl::SleepFor(time); }};
}

bool FaultInjector::happened() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return happened_;
}

void FaultInjector::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  released_ = true;
  changed_.notify_all();
}

}  // namespace zero
