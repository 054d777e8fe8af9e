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

// An op's name in a profile, and the FLOP of its matrix products.
struct Work {
  std::string name;
  double flops = 0;
  std::vector<ProductShape> products = {};  // with weights
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

Work Products(const char* name, std::vector<ProductShape> products,
              Gelu act = Gelu::kNone) {
  const ProductShape& first = products.front();
  Work work{absl::StrCat(name, " ", first.m, "x", first.n, "x", first.k,
                         act == Gelu::kNone ? "" : " gelu")};
  for (const ProductShape& product : products) work.flops += product.flops();
  work.products = std::move(products);
  return work;
}
Work WorkOf(absl::string_view, const LinearArgs& a) {
  return Products(
      "linear", {ForwardShape(a.x.rows, a.w.rows, a.w.cols, a.x.dtype)}, a.act);
}
Work WorkOf(absl::string_view, const LinearBackwardInputArgs& a) {
  return Products("linear_dx",
                  {DxShape(a.dy.rows, a.w.rows, a.w.cols, a.w.dtype)}, a.act);
}
Work WorkOf(absl::string_view, const LinearBackwardWeightArgs& a) {
  return Products("linear_dw",
                  {DwShape(a.dy.rows, a.dy.cols, a.x.cols, a.x.dtype)});
}
Work WorkOf(absl::string_view, const LinearCrossEntropyArgs& a) {
  const int64_t m = a.x.rows, out = a.w.rows, in = a.w.cols;
  std::vector<ProductShape> all;
  const bool kept = a.part.logits != nullptr;
  if (a.part.work != LossPart::Work::kGradients || !kept) {
    all.push_back(ForwardShape(m, out, in, a.x.dtype));
  }
  if (a.dx.data != nullptr) all.push_back(DxShape(m, out, in, a.x.dtype));
  if (a.dw.data != nullptr) all.push_back(DwShape(m, out, in, a.x.dtype));
  return Products("linear_cross_entropy", std::move(all));
}

// FLOP of half a T x T product of all heads.
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
  explicit TimedOps(TimedDevice& device)
      : device_(device), inner_(device.inner_.ops()) {}

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
  size_t LossLogitsBytes(const LinearCrossEntropyArgs& a) const override {
    return inner_.LossLogitsBytes(a);
  }

 private:
  template <class Args, class Fn>
  void Time(Stream& s, const char* op, const Args& args, const Fn& fn) {
    // SumRanks is called by communication threads, which this does not serve.
    if (std::is_same_v<Args, SumRanksArgs> || device_.timing_ == Timing::kOff) {
      return fn();
    }
    const Work work = WorkOf(op, args);
    if (device_.products_ != nullptr) {
      device_.products_->insert(device_.products_->end(), work.products.begin(),
                                work.products.end());
    }
    if (device_.timing_ == Timing::kClock) {
      const double cpu = Now(CLOCK_THREAD_CPUTIME_ID);
      device_.Count(work.name, work.flops, SecondsOf(fn));
      device_.cpu_seconds_ += Now(CLOCK_THREAD_CPUTIME_ID) - cpu;
      return;
    }
    Pending pending{work.name, work.flops, device_.MakeEvent(),
                    device_.MakeEvent()};
    s.Record(*pending.start);
    fn();
    s.Record(*pending.end);
    device_.pending_.push_back(std::move(pending));
  }

  TimedDevice& device_;
  Ops& inner_;
};

TimedDevice::TimedDevice(Device& inner, Timing timing)
    : inner_(inner), timing_(timing), ops_(std::make_unique<TimedOps>(*this)) {}

OpTimes& TimedDevice::times() {
  for (const Pending& op : pending_) {
    Count(op.name, op.flops, 1e-3 * op.end->MillisSince(*op.start));
  }
  pending_.clear();
  return times_;
}

void TimedDevice::Count(const std::string& name, double flops, double seconds) {
  OpTime& time = times_[name];
  ++time.calls;
  time.seconds += seconds;
  time.flops += flops;
}

void TimedDevice::Free(void*, size_t, MemoryKind) {
  ZERO_CHECK(false) << "a TimedDevice hands out its inner device's buffers";
}

}  // namespace zero::bench
