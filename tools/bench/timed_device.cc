#include "tools/bench/timed_device.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/ops.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

std::string ProductName(const char* op, int64_t m, int64_t n, int64_t k,
                        Gelu act) {
  return absl::StrCat(op, " ", m, "x", n, "x", k,
                      act == Gelu::kNone ? "" : " gelu");
}

}  // namespace

class TimedDevice::TimedOps final : public Ops {
 public:
  TimedOps(Device& device, Timing timing)
      : device_(device), inner_(device.ops()), timing_(timing) {}

  void set_timing(Timing timing) { timing_ = timing; }

  OpTimes& times() {
    for (Pending& op : pending_) {
      Add(op.name, op.flops, 1e-3 * op.end->MillisSince(*op.start));
      spare_.push_back(std::move(op.start));
      spare_.push_back(std::move(op.end));
    }
    pending_.clear();
    return times_;
  }

  size_t LinearWorkspaceBytes(const LinearArgs& a) const override {
    return inner_.LinearWorkspaceBytes(a);
  }
  size_t LinearBackwardInputWorkspaceBytes(
      const LinearBackwardInputArgs& a) const override {
    return inner_.LinearBackwardInputWorkspaceBytes(a);
  }
  size_t LinearBackwardWeightWorkspaceBytes(
      const LinearBackwardWeightArgs& a) const override {
    return inner_.LinearBackwardWeightWorkspaceBytes(a);
  }
  size_t LinearCrossEntropyWorkspaceBytes(
      const LinearCrossEntropyArgs& a) const override {
    return inner_.LinearCrossEntropyWorkspaceBytes(a);
  }
  size_t AttentionForwardWorkspaceBytes(
      const AttentionForwardArgs& a) const override {
    return inner_.AttentionForwardWorkspaceBytes(a);
  }
  size_t AttentionBackwardWorkspaceBytes(
      const AttentionBackwardArgs& a) const override {
    return inner_.AttentionBackwardWorkspaceBytes(a);
  }
  size_t NormBackwardWorkspaceBytes(const NormBackwardArgs& a) const override {
    return inner_.NormBackwardWorkspaceBytes(a);
  }

  void Linear(Stream& s, const LinearArgs& a, Workspace w) override {
    const int64_t m = a.x.rows, n = a.w.rows, k = a.w.cols;
    Time(s, ProductName("linear", m, n, k, a.act), 2.0 * m * n * k,
         [&] { inner_.Linear(s, a, w); });
  }
  void LinearBackwardInput(Stream& s, const LinearBackwardInputArgs& a,
                           Workspace w) override {
    const int64_t m = a.dy.rows, n = a.w.cols, k = a.w.rows;
    Time(s, ProductName("linear_dx", m, n, k, a.act), 2.0 * m * n * k,
         [&] { inner_.LinearBackwardInput(s, a, w); });
  }
  void LinearBackwardWeight(Stream& s, const LinearBackwardWeightArgs& a,
                            Workspace w) override {
    const int64_t m = a.dy.cols, n = a.x.cols, k = a.dy.rows;
    Time(s, ProductName("linear_dw", m, n, k, Gelu::kNone), 2.0 * m * n * k,
         [&] { inner_.LinearBackwardWeight(s, a, w); });
  }
  void LinearCrossEntropy(Stream& s, const LinearCrossEntropyArgs& a,
                          Workspace w) override {
    const int products =
        1 + (a.dx.data != nullptr ? 1 : 0) + (a.dw.data != nullptr ? 1 : 0);
    const int64_t m = a.x.rows, n = a.w.rows, k = a.w.cols;
    Time(s, ProductName("linear_cross_entropy", m, n, k, Gelu::kNone),
         products * 2.0 * m * n * k,
         [&] { inner_.LinearCrossEntropy(s, a, w); });
  }
  // Causal: half of the T x T products, two forward and five backward.
  void AttentionForward(Stream& s, const AttentionForwardArgs& a,
                        Workspace w) override {
    Time(s, "attention", 2 * CausalFlops(a.shape),
         [&] { inner_.AttentionForward(s, a, w); });
  }
  void AttentionBackward(Stream& s, const AttentionBackwardArgs& a,
                         Workspace w) override {
    Time(s, "attention_backward", 5 * CausalFlops(a.shape),
         [&] { inner_.AttentionBackward(s, a, w); });
  }

  void LayerNormForward(Stream& s, const NormForwardArgs& a) override {
    Time(s, "layernorm", 0, [&] { inner_.LayerNormForward(s, a); });
  }
  void LayerNormBackward(Stream& s, const NormBackwardArgs& a,
                         Workspace w) override {
    Time(s, "layernorm_backward", 0,
         [&] { inner_.LayerNormBackward(s, a, w); });
  }
  void RmsNormForward(Stream& s, const NormForwardArgs& a) override {
    Time(s, "rmsnorm", 0, [&] { inner_.RmsNormForward(s, a); });
  }
  void RmsNormBackward(Stream& s, const NormBackwardArgs& a,
                       Workspace w) override {
    Time(s, "rmsnorm_backward", 0, [&] { inner_.RmsNormBackward(s, a, w); });
  }
  void Rotary(Stream& s, const RotaryArgs& a) override {
    Time(s, "rotary", 0, [&] { inner_.Rotary(s, a); });
  }
  void EmbeddingForward(Stream& s, const EmbeddingForwardArgs& a) override {
    Time(s, "embedding", 0, [&] { inner_.EmbeddingForward(s, a); });
  }
  size_t EmbeddingBackwardWorkspaceBytes(
      const EmbeddingBackwardArgs& a) const override {
    return inner_.EmbeddingBackwardWorkspaceBytes(a);
  }
  void EmbeddingBackward(Stream& s, const EmbeddingBackwardArgs& a,
                         Workspace w) override {
    Time(s, "embedding_backward", 0,
         [&] { inner_.EmbeddingBackward(s, a, w); });
  }
  void GeluForward(Stream& s, const GeluForwardArgs& a) override {
    Time(s, "gelu", 0, [&] { inner_.GeluForward(s, a); });
  }
  void GeluBackward(Stream& s, const GeluBackwardArgs& a) override {
    Time(s, "gelu_backward", 0, [&] { inner_.GeluBackward(s, a); });
  }
  void SwigluForward(Stream& s, const SwigluForwardArgs& a) override {
    Time(s, "swiglu", 0, [&] { inner_.SwigluForward(s, a); });
  }
  void SwigluBackward(Stream& s, const SwigluBackwardArgs& a) override {
    Time(s, "swiglu_backward", 0, [&] { inner_.SwigluBackward(s, a); });
  }
  void Dropout(Stream& s, const DropoutArgs& a) override {
    Time(s, "dropout", 0, [&] { inner_.Dropout(s, a); });
  }
  void Add(Stream& s, const AddArgs& a) override {
    Time(s, "add", 0, [&] { inner_.Add(s, a); });
  }
  void Cast(Stream& s, const CastArgs& a) override {
    Time(s, "cast", 0, [&] { inner_.Cast(s, a); });
  }
  void Fill(Stream& s, const FillArgs& a) override {
    Time(s, "fill", 0, [&] { inner_.Fill(s, a); });
  }
  void SumSquares(Stream& s, const SumSquaresArgs& a) override {
    Time(s, "sum_squares", 0, [&] { inner_.SumSquares(s, a); });
  }
  void Sum(Stream& s, const SumArgs& a) override {
    Time(s, "sum", 0, [&] { inner_.Sum(s, a); });
  }
  void CountNonFinite(Stream& s, const CountNonFiniteArgs& a) override {
    Time(s, "count_non_finite", 0, [&] { inner_.CountNonFinite(s, a); });
  }
  void Clip(Stream& s, const ClipArgs& a) override {
    Time(s, "clip", 0, [&] { inner_.Clip(s, a); });
  }
  // Not timed: communication threads call it, and this is not for them.
  void SumRanks(Stream& s, const SumRanksArgs& a) override {
    inner_.SumRanks(s, a);
    if (timing_ == Timing::kWait && s.device().asynchronous()) s.Synchronize();
  }
  void AdamW(Stream& s, const AdamWArgs& a) override {
    Time(s, "adamw", 0, [&] { inner_.AdamW(s, a); });
  }
  void Sgd(Stream& s, const SgdArgs& a) override {
    Time(s, "sgd", 0, [&] { inner_.Sgd(s, a); });
  }
  void LambMoments(Stream& s, const LambArgs& a) override {
    Time(s, "lamb_moments", 0, [&] { inner_.LambMoments(s, a); });
  }
  void LambApply(Stream& s, const LambArgs& a) override {
    Time(s, "lamb_apply", 0, [&] { inner_.LambApply(s, a); });
  }

 private:
  // Of one T x T product of all heads, half of it.
  static double CausalFlops(const AttentionShape& shape) {
    return 1.0 * shape.batch * shape.num_heads * shape.q_len * shape.kv_len *
           shape.head_dim;
  }

  // An op that runs, or whose end nobody has waited for yet.
  struct Pending {
    std::string name;
    double flops;
    std::unique_ptr<Event> start, end;
  };

  template <class Fn>
  void Time(Stream& s, const std::string& name, double flops, const Fn& fn) {
    if (timing_ == Timing::kOff) return fn();
    if (timing_ == Timing::kEvents) {
      Pending op{name, flops, MakeEvent(), MakeEvent()};
      s.Record(*op.start);
      fn();
      s.Record(*op.end);
      pending_.push_back(std::move(op));
      return;
    }
    Add(name, flops, SecondsOf([&] {
          fn();
          if (s.device().asynchronous()) s.Synchronize();
        }));
  }

  void Add(const std::string& name, double flops, double seconds) {
    OpTime& time = times_[name];
    ++time.calls;
    time.seconds += seconds;
    time.flops += flops;
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
