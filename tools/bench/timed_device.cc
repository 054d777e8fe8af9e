#include "tools/bench/timed_device.h"

#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/check.h"
#include "kernels/ops.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

// What a profile calls an op, and how many FLOP its matrix products take.
struct Work {
  std::string name;
  double flops = 0;
};

// "embedding_backward" of "EmbeddingBackward", "gelu" of "GeluForward".
template <class Args>
Work WorkOf(absl::string_view op, const Args&) {
  Work work;
  op = absl::StripSuffix(op, "Forward");
  for (size_t i = 0; i < op.size(); ++i) {
    const bool starts_word = absl::ascii_isupper(op[i]) && i > 0 &&
                             i + 1 < op.size() &&
                             absl::ascii_islower(op[i + 1]);
    if (starts_word) work.name += '_';
    work.name += absl::ascii_tolower(op[i]);
  }
  return work;
}

// Of `num` products of [m, k] and [k, n].
Work Products(const char* name, int64_t m, int64_t n, int64_t k,
              Gelu act = Gelu::kNone, int num = 1) {
  return {absl::StrCat(name, " ", m, "x", n, "x", k,
                       act == Gelu::kNone ? "" : " gelu"),
          num * 2.0 * m * n * k};
}
Work WorkOf(absl::string_view, const LinearArgs& a) {
  return Products("linear", a.x.rows, a.w.rows, a.w.cols, a.act);
}
Work WorkOf(absl::string_view, const LinearBackwardInputArgs& a) {
  return Products("linear_dx", a.dy.rows, a.w.cols, a.w.rows, a.act);
}
Work WorkOf(absl::string_view, const LinearBackwardWeightArgs& a) {
  return Products("linear_dw", a.dy.cols, a.x.cols, a.dy.rows);
}
Work WorkOf(absl::string_view, const LinearCrossEntropyArgs& a) {
  const int num =
      1 + (a.dx.data != nullptr ? 1 : 0) + (a.dw.data != nullptr ? 1 : 0);
  return Products("linear_cross_entropy", a.x.rows, a.w.rows, a.w.cols,
                  Gelu::kNone, num);
}

// Of one T x T product of all heads, half of it.
double CausalFlops(const AttentionShape& shape) {
  return 1.0 * shape.batch * shape.num_heads * shape.q_len * shape.kv_len *
         shape.head_dim;
}
// Causal: half of the T x T products, two forward and five backward.
Work WorkOf(absl::string_view, const AttentionForwardArgs& a) {
  return {"attention", 2 * CausalFlops(a.shape)};
}
Work WorkOf(absl::string_view, const AttentionBackwardArgs& a) {
  return {"attention_backward", 5 * CausalFlops(a.shape)};
}

const char* NameOf(NormKind kind) {
  return kind == NormKind::kLayerNorm ? "layernorm" : "rmsnorm";
}
Work WorkOf(absl::string_view, const NormForwardArgs& a) {
  return {NameOf(a.kind)};
}
Work WorkOf(absl::string_view, const NormBackwardArgs& a) {
  return {absl::StrCat(NameOf(a.kind), "_backward")};
}

}  // namespace

class TimedDevice::TimedOps final : public Ops {
 public:
  TimedOps(Device& device, Timing timing)
      : device_(device), inner_(device.ops()), timing_(timing) {}

  void set_timing(Timing timing) { timing_ = timing; }

  OpTimes& times() {
    for (Pending& op : pending_) {
      Count(op.work, 1e-3 * op.end->MillisSince(*op.start));
      spare_.push_back(std::move(op.start));
      spare_.push_back(std::move(op.end));
    }
    pending_.clear();
    return times_;
  }

#define ZERO_OP(Name, Args)                                   \
  size_t Name##WorkspaceBytes(const Args& a) const override { \
    return inner_.Name##WorkspaceBytes(a);                    \
  }                                                           \
  void Name(Stream& s, const Args& a, Workspace w) override { \
    Time(s, #Name, a, [&] { inner_.Name(s, a, w); });         \
  }
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args)                        \
  void Name(Stream& s, const Args& a) override {   \
    Time(s, #Name, a, [&] { inner_.Name(s, a); }); \
  }
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP

 private:
  // An op that runs, or whose end nobody has waited for yet.
  struct Pending {
    Work work;
    std::unique_ptr<Event> start, end;
  };

  template <class Args, class Fn>
  void Time(Stream& s, const char* op, const Args& args, const Fn& fn) {
    const auto run_and_wait = [&] {
      fn();
      if (timing_ == Timing::kWait && s.device().asynchronous()) {
        s.Synchronize();
      }
    };
    // Communication threads call SumRanks, and this is not for them.
    if constexpr (std::is_same_v<Args, SumRanksArgs>) return run_and_wait();
    if (timing_ == Timing::kOff) return fn();
    Work work = WorkOf(op, args);
    if (timing_ == Timing::kWait) return Count(work, SecondsOf(run_and_wait));
    Pending pending{std::move(work), MakeEvent(), MakeEvent()};
    s.Record(*pending.start);
    fn();
    s.Record(*pending.end);
    pending_.push_back(std::move(pending));
  }

  void Count(const Work& work, double seconds) {
    OpTime& time = times_[work.name];
    ++time.calls;
    time.seconds += seconds;
    time.flops += work.flops;
  }

  std::unique_ptr<Event> MakeEvent() {
    if (spare_.empty()) return device_.MakeEvent();
    std::unique_ptr<Event> event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }

  Device& device_;
  Ops& inner_;
  Timing timing_;
  OpTimes times_;
  std::vector<Pending> pending_;
  std::vector<std::unique_ptr<Event>> spare_;
};

TimedDevice::TimedDevice(Device& inner, Timing timing)
    : inner_(inner), ops_(std::make_unique<TimedOps>(inner, timing)) {}

TimedDevice::~TimedDevice() = default;

void TimedDevice::set_timing(Timing timing) { ops_->set_timing(timing); }

OpTimes& TimedDevice::times() { return ops_->times(); }

Ops& TimedDevice::ops() { return *ops_; }

void TimedDevice::Free(void*, size_t, MemoryKind) {
  ZERO_CHECK(false) << "a TimedDevice hands out its inner device's buffers";
}

}  // namespace zero::bench
