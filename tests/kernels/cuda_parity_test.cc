// Every op of kernels/ops.h on the CPU and on this program's GPU (emulated or
// real) from the same data. The reference tests say what an op computes; this
// one that a run may move between devices: fp32 results differ by at most 1e-5
// of their row's norm, 16-bit ones by the roundings that an op may do
// elsewhere.
//
// To add an op: a case in kCases.
#include <algorithm>
#include <cmath>
#include <map>
#include <ostream>
#include <set>
#include <thread>
#include <utility>

#include "kernels/sizes.h"
#include "tests/kernels/matrix.h"
#include "tests/kernels/optimizer_test_util.h"

namespace zero {
namespace {

// ---- The ops that there are -------------------------------------------------

std::set<std::string> OpNames() {
#define ZERO_NAME(op, Args) #op,
  return {ZERO_OPS_WITH_WORKSPACE(ZERO_NAME)
              ZERO_OPS_WITHOUT_WORKSPACE(ZERO_NAME)};
#undef ZERO_NAME
}

// Another device's ops, and which of them were called. Their workspaces are no
// larger than planned.
class RecordingOps final : public Ops {
 public:
  RecordingOps(Ops& inner, const OpSizes& planned)
      : inner_(inner), planned_(planned) {}

  const std::set<std::string>& called() const { return called_; }

#define ZERO_OP(name, Args)                                   \
  size_t name##WorkspaceBytes(const Args& a) const override { \
    const size_t bytes = inner_.name##WorkspaceBytes(a);      \
    EXPECT_LE(bytes, planned_.name##WorkspaceBytes(a));       \
    return bytes;                                             \
  }                                                           \
  void name(Stream& s, const Args& a, Workspace w) override { \
    called_.insert(#name);                                    \
    inner_.name(s, a, w);                                     \
  }
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(name, Args)                      \
  void name(Stream& s, const Args& a) override { \
    called_.insert(#name);                       \
    inner_.name(s, a);                           \
  }
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP
  size_t LossLogitsBytes(const LinearCrossEntropyArgs& a) const override {
    const size_t bytes = inner_.LossLogitsBytes(a);
    EXPECT_EQ(bytes, planned_.LossLogitsBytes(a));
    return bytes;
  }

 private:
  Ops& inner_;
  const OpSizes& planned_;
  std::set<std::string> called_;
};

// ---- Comparing --------------------------------------------------------------

// Two results may differ by this share of their row's norm.
constexpr double kEqual = 0;
constexpr double kFp32 = 1e-5;

// Results whose sums are fp32 on both sides and that are rounded to `dtype`
// `roundings` times on the way: if a sum falls on another side of the middle
// between two values, the results are one unit (two half ulps) apart.
double Rounded(DType dtype, double roundings = 1) {
  if (dtype == DType::kF32) return kFp32;
  return kFp32 + roundings * 2 * HalfUlp(dtype);
}

// Sums of k products of 16-bit numbers that stay fp32: tensor cores cut a
// partial sum off after every 16 products instead of rounding it, so that it
// loses at most 2^-23 of itself each time.
double TensorSum(DType dtype, int64_t k) {
  if (dtype == DType::kF32) return kFp32;
  return kFp32 + static_cast<double>(k) / 16 * std::ldexp(1.0, -23);
}

// The norm that a difference is compared with. A gradient of attention is a sum
// that cancels (entirely in the first token's row): then that of a usual row.
enum class Against { kItsRow, kUsualRow };

struct Output {
  std::string name;
  Array values;
  int64_t cols;
  double limit;
  Against against;
};

// One device, and a case's results on it.
class Side {
 public:
  Side(Ops& inner, const OpSizes& planned, Stream& to)
      : ops(inner, planned), stream(to) {}

  // Rows of `cols` elements; the padding between rows counts as well.
  void Keep(std::string name, Array values, int64_t cols, double limit,
            Against against = Against::kItsRow) {
    outputs.push_back(
        {std::move(name), std::move(values), cols, limit, against});
  }
  // Scalars, each a row of its own.
  template <class T>
  void KeepScalars(const std::string& name, const TestVector<T>& values,
                   double limit) {
    for (const T value : values) {
      scalars.push_back({name, static_cast<double>(value), limit});
    }
  }

  struct Scalar {
    std::string name;
    double value;
    double limit;
  };
  RecordingOps ops;
  Stream& stream;
  std::vector<Output> outputs;
  std::vector<Scalar> scalars;
};

double Square(double x) { return x * x; }

double NormOfRow(const Array& a, int64_t row, int64_t cols) {
  double sum = 0;
  for (int64_t i = 0; i < cols; ++i) sum += Square(a[row * cols + i]);
  return std::sqrt(sum);
}

double UsualNorm(const Array& a, int64_t cols) {
  double sum = 0;
  const int64_t rows = a.size() / cols;
  for (int64_t i = 0; i < rows; ++i) sum += Square(NormOfRow(a, i, cols));
  return std::sqrt(sum / static_cast<double>(rows));
}

class Comparison {
 public:
  explicit Comparison(const Path& path)
      : large_(path.name.rfind("cuda:", 0) == 0),
        device_(MakeCpuDevice(large_ ? NumCores() : 1)),
        cpu_stream_(device_->MakeStream(StreamRole::kCompute)),
        planned_(MakeAssumedGpu()),
        cpu_(device_->ops(), device_->ops(), *cpu_stream_),
        gpu_(path.ops, planned_->ops(), path.stream) {}

  // A real GPU also runs the shapes of real models.
  bool large() const { return large_; }

  // Calls fn(side) for the CPU and for the GPU and compares their results.
  template <class Fn>
  void Run(const std::string& what, const Fn& fn) {
    for (Side* side : {&cpu_, &gpu_}) {
      side->outputs.clear();
      side->scalars.clear();
      fn(*side);
    }
    ASSERT_EQ(cpu_.outputs.size(), gpu_.outputs.size());
    for (size_t i = 0; i < cpu_.outputs.size(); ++i) {
      Check(what, cpu_.outputs[i], gpu_.outputs[i].values);
    }
    ASSERT_EQ(cpu_.scalars.size(), gpu_.scalars.size());
    for (size_t i = 0; i < cpu_.scalars.size(); ++i) {
      const Side::Scalar& want = cpu_.scalars[i];
      Judge(what, want.name, std::abs(gpu_.scalars[i].value - want.value),
            std::abs(want.value), want.limit);
    }
  }

  void ExpectCalled(const std::string& op) const {
    EXPECT_EQ(cpu_.ops.called().count(op), 1u);
    EXPECT_EQ(gpu_.ops.called().count(op), 1u);
  }

  // Leaves the largest differences in the report: "fp32 3.1e-07 of 1.0e-05".
  void Report() const {
    for (const auto& [dtype, worst] : worst_) {
      testing::Test::RecordProperty(dtype, Text(worst.share));
      testing::Test::RecordProperty(dtype + "_limit", Text(worst.limit));
    }
  }

 private:
  struct Worst {
    double of_limit = -1;
    double share = 0;
    double limit = 0;
  };

  static int NumCores() {
    return std::clamp<int>(std::thread::hardware_concurrency(), 1, 16);
  }
  static std::string Text(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2g", value);
    return text;
  }

  void Check(const std::string& what, const Output& want, const Array& got) {
    ASSERT_EQ(want.values.size(), got.size()) << what;
    const bool usual = want.against == Against::kUsualRow;
    const double floor = usual ? UsualNorm(want.values, want.cols) : 0;
    for (int64_t row = 0; row * want.cols < got.size(); ++row) {
      double squares = 0;
      for (int64_t i = row * want.cols; i < (row + 1) * want.cols; ++i) {
        squares += Square(got[i] - want.values[i]);
      }
      Judge(what, want.name + " row " + std::to_string(row), std::sqrt(squares),
            std::max(floor, NormOfRow(want.values, row, want.cols)),
            want.limit);
    }
  }

  // `what` begins with the operands' dtype, if they have one.
  void Judge(const std::string& what, const std::string& output, double error,
             double norm, double limit) {
    const double share = error == 0 ? 0 : error / norm;
    const double of_limit = share == 0 ? 0 : share / limit;
    const std::string first = what.substr(0, what.find_first_of(" /"));
    Worst& worst = worst_[first == "bf16" || first == "fp16" ? first : "fp32"];
    if (!(of_limit <= worst.of_limit || std::isnan(worst.of_limit))) {
      worst = {of_limit, share, limit};
    }
    // A few are as good as thousands.
    if (!(of_limit <= 1) && ++num_failed_ <= 5) {
      ADD_FAILURE() << what << ": " << output << " differs by " << Text(share)
                    << " of the norm, " << Text(limit) << " is allowed";
    }
  }

  bool large_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> cpu_stream_;
  std::unique_ptr<Device> planned_;
  Side cpu_, gpu_;
  int num_failed_ = 0;
  std::map<std::string, Worst> worst_;
};

template <class T>
std::vector<T> Shapes(const Comparison& c, std::vector<T> small,
                      const std::vector<T>& large) {
  if (c.large()) small.insert(small.end(), large.begin(), large.end());
  return small;
}

// Row-major with an odd leading dimension where `pad` is odd.
struct Operand {
  Operand(DType dtype, int64_t rows, int64_t cols, int64_t pad, uint64_t seed,
          double scale = 1)
      : rows(rows),
        cols(cols),
        ld(cols + pad),
        array(Array::Normal(dtype, rows * ld, seed, scale)) {}

  Matrix view() { return array.matrix(rows, cols, ld); }

  int64_t rows, cols, ld;
  Array array;
};

template <class T>
TestVector<T> RandomIds(int64_t size, int64_t limit, uint64_t seed) {
  std::mt19937_64 random(seed);
  TestVector<T> ids(static_cast<size_t>(size));
  for (T& id : ids) id = static_cast<T>(random() % limit);
  return ids;
}

// ---- Matrix products --------------------------------------------------------

struct Product {
  int64_t m, k, n;
  int64_t pad;  // of every operand; 0 and even sizes: 16-byte aligned rows
};

std::string NameOf(const Product& s, DType dtype) {
  return std::string(DTypeName(dtype)) + " " + std::to_string(s.m) + "x" +
         std::to_string(s.k) + "x" + std::to_string(s.n);
}

std::vector<Product> Products(const Comparison& c) {
  return Shapes<Product>(
      c, {{5, 31, 33, 1}, {33, 65, 17, 0}, {16, 64, 96, 0}},
      {{1024, 768, 2304, 0}, {1000, 3072, 768, 0}, {777, 1001, 1023, 3}});
}

struct Epilogue {
  bool bias, residual;
  Gelu act;
  bool pre;
};
constexpr Epilogue kEpilogues[] = {{false, false, Gelu::kNone, false},
                                   {true, true, Gelu::kNone, false},
                                   {true, false, Gelu::kTanh, true},
                                   {true, true, Gelu::kErf, true}};

void CompareLinear(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Product& s : Products(c)) {
      Operand x(dtype, s.m, s.k, s.pad, 1);
      Operand w(dtype, s.n, s.k, s.pad, 2, 1 / std::sqrt(s.k));
      const Array bias = Array::Normal(dtype, s.n, 3);
      Operand residual(dtype, s.m, s.n, s.pad, 4);
      for (const Epilogue& e : kEpilogues) {
        c.Run(NameOf(s, dtype), [&](Side& side) {
          Array y(dtype, s.m * (s.n + s.pad)), pre(y);
          LinearArgs args{.x = x.view(), .w = w.view()};
          if (e.bias) args.bias = bias.vector();
          if (e.residual) args.residual = residual.view();
          args.y = y.matrix(s.m, s.n, s.n + s.pad);
          args.act = e.act;
          if (e.pre) args.pre_act = pre.matrix(s.m, s.n, s.n + s.pad);
          Scratch scratch(side.ops.LinearWorkspaceBytes(args));
          side.ops.Linear(side.stream, args, scratch.workspace());
          // A sum may also be stored before the activation and before the
          // residual.
          const int more = (e.act != Gelu::kNone) + e.residual;
          side.Keep("y", y, s.n + s.pad, Rounded(dtype, 1 + more));
          if (e.pre) side.Keep("pre_act", pre, s.n + s.pad, Rounded(dtype));
        });
      }
    }
  }
}

void CompareLinearBackwardInput(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Product& s : Products(c)) {
      Operand dy(dtype, s.m, s.n, s.pad, 1);
      Operand w(dtype, s.n, s.k, s.pad, 2, 1 / std::sqrt(s.n));
      Operand pre(dtype, s.m, s.k, s.pad, 3);
      const Operand before(dtype, s.m, s.k, s.pad, 4);
      for (const Gelu act : {Gelu::kNone, Gelu::kTanh, Gelu::kErf}) {
        c.Run(NameOf(s, dtype), [&](Side& side) {
          Operand dx = before;
          LinearBackwardInputArgs args{.dy = dy.view(), .w = w.view()};
          args.dx = dx.view();
          args.accumulate = act == Gelu::kNone;
          args.act = act;
          if (act != Gelu::kNone) args.pre_act = pre.view();
          Scratch scratch(side.ops.LinearBackwardInputWorkspaceBytes(args));
          side.ops.LinearBackwardInput(side.stream, args, scratch.workspace());
          // The product, and its addend or factor.
          side.Keep("dx", dx.array, dx.ld, Rounded(dtype, 2));
        });
      }
    }
  }
}

void CompareWeightGradient(Comparison& c, const Product& s, DType dtype,
                           DType sink, bool accumulate) {
  Operand dy(dtype, s.m, s.n, s.pad, 1), x(dtype, s.m, s.k, s.pad, 2);
  const Operand before(sink, s.n, s.k, s.pad, 3);
  const Array bias_before = Array::Normal(sink, s.n, 4);
  c.Run(NameOf(s, dtype) + " into " + DTypeName(sink), [&](Side& side) {
    Operand dw = before;
    Array dbias = bias_before;
    LinearBackwardWeightArgs args{.dy = dy.view(), .x = x.view()};
    args.dw = dw.view();
    args.dbias = dbias.vector();
    args.accumulate_dw = args.accumulate_dbias = accumulate;
    Scratch scratch(side.ops.LinearBackwardWeightWorkspaceBytes(args));
    side.ops.LinearBackwardWeight(side.stream, args, scratch.workspace());
    const double sum = TensorSum(dtype, s.m);
    const double stored = Rounded(sink, accumulate ? 2 : 1);
    side.Keep("dw", dw.array, dw.ld, sum + stored - kFp32);
    side.Keep("dbias", dbias, s.n, stored);
  });
}

void CompareLinearBackwardWeight(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Product& s : Products(c)) {
      for (const bool accumulate : {false, true}) {
        CompareWeightGradient(c, s, dtype, DType::kF32, accumulate);
        if (dtype == DType::kF32) continue;
        CompareWeightGradient(c, s, dtype, dtype, accumulate);
      }
    }
  }
}

void CompareLinearCrossEntropy(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Product& s : Shapes<Product>(
             c, {{7, 17, 33, 1}, {40, 32, 257, 0}}, {{300, 768, 50257, 0}})) {
      Operand x(dtype, s.m, s.k, s.pad, 1);
      Operand w(dtype, s.n, s.k, s.pad, 2, 1 / std::sqrt(s.k));
      TestVector<int32_t> targets = RandomIds<int32_t>(s.m, s.n, 3);
      targets[2] = -1;
      const TestVector<float> scale = {0.25f};
      c.Run(NameOf(s, dtype), [&](Side& side) {
        Array losses(DType::kF32, s.m), dx(dtype, s.m * x.ld);
        Array dw(DType::kF32, s.n * w.ld);
        TestVector<double> sum = {1};
        LinearCrossEntropyArgs args{.x = x.view(), .w = w.view(), .vocab = s.n};
        args.targets = targets.data();
        args.losses = losses.floats();
        args.loss_sum = sum.data();
        args.grad_scale = scale.data();
        args.dx = dx.matrix(s.m, s.k, x.ld);
        args.dw = dw.matrix(s.n, s.k, w.ld);
        Scratch scratch(side.ops.LinearCrossEntropyWorkspaceBytes(args));
        side.ops.LinearCrossEntropy(side.stream, args, scratch.workspace());
        // Logits may be stored, and are of size 1, the loss of size log V > 3.
        side.Keep("losses", losses, s.m, Rounded(dtype));
        side.KeepScalars("loss_sum", sum, Rounded(dtype));
        // Stored logits of up to 4 change a probability by 4 half ulps, as
        // two roundings may; then the gradient of the logits, and dx itself.
        side.Keep("dx", dx, x.ld, Rounded(dtype, 4));
        // Only the average over a token's rows remains: a token may have one
        // row.
        side.Keep("dw", dw, w.ld,
                  Rounded(dtype, 3) + TensorSum(dtype, s.m) - kFp32,
                  Against::kUsualRow);
      });
    }
  }
}

// ---- Attention --------------------------------------------------------------

struct Heads {
  int64_t batch, q_len, kv_len, heads, kv_heads, dim;
};

// q, k and v from one packed projection, out for the next one.
struct AttentionData {
  AttentionData(const Heads& h, DType dtype)
      : shape{dtype,   h.batch,    h.q_len, h.kv_len,
              h.heads, h.kv_heads, h.dim,   1 / std::sqrt(float(h.dim))},
        qkv_width((h.heads + 2 * h.kv_heads) * h.dim),
        out_width(h.heads * h.dim),
        qkv(Array::Normal(dtype, h.batch * h.kv_len * qkv_width, 1)),
        dout(Array::Normal(dtype, h.batch * h.q_len * out_width, 2)) {}

  // The three parts of a packed array: q, k, v from the left.
  template <class Ref, class A>
  Ref Part(A& packed, int64_t first_head) {
    const int64_t skip = first_head * shape.head_dim;
    return {const_cast<char*>(static_cast<const char*>(packed.data())) +
                skip * static_cast<int64_t>(DTypeBytes(shape.dtype)),
            shape.kv_len * qkv_width, qkv_width};
  }
  template <class Ref, class A>
  Ref Whole(A& out) {
    return {out.data(), shape.q_len * out_width, out_width};
  }
  int64_t first_k() const { return shape.num_heads; }
  int64_t first_v() const { return shape.num_heads + shape.num_kv_heads; }
  Array EmptyOut() const {
    return Array(shape.dtype, shape.batch * shape.q_len * out_width);
  }
  Array EmptyLse() const {
    return Array(DType::kF32, shape.batch * shape.num_heads * shape.q_len);
  }
  void Forward(Side& side, Array* out, Array* lse) {
    AttentionForwardArgs args{.shape = shape};
    args.q = Part<HeadsRef>(qkv, 0);
    args.k = Part<HeadsRef>(qkv, first_k());
    args.v = Part<HeadsRef>(qkv, first_v());
    args.out = Whole<MutableHeadsRef>(*out);
    args.lse = lse->floats();
    Scratch scratch(side.ops.AttentionForwardWorkspaceBytes(args));
    side.ops.AttentionForward(side.stream, args, scratch.workspace());
  }

  AttentionShape shape;
  int64_t qkv_width, out_width;
  Array qkv, dout;
};

std::string NameOf(const Heads& h, DType dtype) {
  return std::string(DTypeName(dtype)) + " B" + std::to_string(h.batch) + " T" +
         std::to_string(h.q_len) + "/" + std::to_string(h.kv_len) + " H" +
         std::to_string(h.heads) + "/" + std::to_string(h.kv_heads) + " D" +
         std::to_string(h.dim);
}

const std::vector<Heads> kSmallHeads = {
    {2, 7, 7, 4, 2, 8}, {1, 33, 33, 3, 1, 16}, {1, 40, 40, 2, 2, 10}};
const std::vector<Heads> kLargeHeads = {{2, 1024, 1024, 12, 12, 64},
                                        {1, 1024, 1024, 14, 2, 64},
                                        {1, 513, 513, 16, 8, 128},
                                        {2, 257, 257, 4, 4, 32}};

void CompareAttentionForward(Comparison& c) {
  std::vector<Heads> shapes = Shapes(c, kSmallHeads, kLargeHeads);
  shapes.push_back({2, 1, 17, 4, 2, 8});  // a cached token
  for (const DType dtype : kFloatTypes) {
    for (const Heads& h : shapes) {
      AttentionData data(h, dtype);
      c.Run(NameOf(h, dtype), [&](Side& side) {
        Array out = data.EmptyOut(), lse = data.EmptyLse();
        data.Forward(side, &out, &lse);
        // The probabilities, and the result.
        side.Keep("out", out, h.dim, Rounded(dtype, 2));
        side.Keep("lse", lse, h.q_len, kFp32);
      });
    }
  }
}

void CompareAttentionBackward(Comparison& c) {
  const std::unique_ptr<Device> cpu = MakeCpuDevice(1);
  const auto stream = cpu->MakeStream(StreamRole::kCompute);
  for (const DType dtype : kFloatTypes) {
    for (const Heads& h : Shapes(c, kSmallHeads, kLargeHeads)) {
      AttentionData data(h, dtype);
      Side forward(cpu->ops(), cpu->ops(), *stream);
      Array out = data.EmptyOut(), lse = data.EmptyLse();
      data.Forward(forward, &out, &lse);
      c.Run(NameOf(h, dtype), [&](Side& side) {
        Array grads(dtype, data.qkv.size());
        AttentionBackwardArgs args{.shape = data.shape};
        args.q = data.Part<HeadsRef>(data.qkv, 0);
        args.k = data.Part<HeadsRef>(data.qkv, data.first_k());
        args.v = data.Part<HeadsRef>(data.qkv, data.first_v());
        args.out = data.Whole<HeadsRef>(out);
        args.dout = data.Whole<HeadsRef>(data.dout);
        args.lse = lse.floats();
        args.dq = data.Part<MutableHeadsRef>(grads, 0);
        args.dk = data.Part<MutableHeadsRef>(grads, data.first_k());
        args.dv = data.Part<MutableHeadsRef>(grads, data.first_v());
        Scratch scratch(side.ops.AttentionBackwardWorkspaceBytes(args));
        side.ops.AttentionBackward(side.stream, args, scratch.workspace());
        // The probabilities, their gradients, and the result.
        side.Keep("dqkv", grads, h.dim, Rounded(dtype, 3), Against::kUsualRow);
      });
    }
  }
}

// ---- Rows -------------------------------------------------------------------

struct RowShape {
  int64_t outer, inner, width, extra;
  int64_t stride() const { return inner * width + extra; }
  int64_t size() const { return outer * stride(); }
  int64_t num_rows() const { return outer * inner; }
};

std::string NameOf(const RowShape& s, DType dtype) {
  return std::string(DTypeName(dtype)) + " " + std::to_string(s.outer) + "x" +
         std::to_string(s.inner) + "x" + std::to_string(s.width);
}

std::vector<RowShape> RowShapes(const Comparison& c) {
  return Shapes<RowShape>(
      c, {{5, 3, 33, 7}, {9, 1, 128, 0}, {3, 1, 1023, 1}, {40, 2, 16, 0}},
      {{1024, 1, 768, 0},
       {2048, 1, 1600, 0},
       {512, 1, 4096, 0},
       {333, 16, 128, 256},
       {65, 1, 12288, 0}});
}

Rows View(Array& a, const RowShape& s) {
  return a.rows(s.outer, s.inner, s.width, s.stride());
}

void CompareNormForward(Comparison& c, NormKind kind) {
  const bool layer = kind == NormKind::kLayerNorm;
  for (const DType dtype : kFloatTypes) {
    for (const RowShape& s : RowShapes(c)) {
      Array x = Array::Normal(dtype, s.size(), 1, 2.0);
      Array residual = Array::Normal(dtype, s.size(), 2);
      const Array weight = Array::Normal(dtype, s.width, 3);
      const Array bias = Array::Normal(dtype, s.width, 4);
      c.Run(NameOf(s, dtype), [&](Side& side) {
        Array sum(dtype, s.size()), y(sum);
        Array mean(DType::kF32, s.num_rows()), rstd(mean);
        NormForwardArgs args{.kind = kind, .x = View(x, s)};
        args.residual = View(residual, s);
        args.sum = View(sum, s);
        args.weight = weight.vector();
        if (layer) args.bias = bias.vector();
        args.y = View(y, s);
        args.mean = mean.floats();
        args.rstd = rstd.floats();
        side.ops.NormForward(side.stream, args);
        side.Keep("sum", sum, s.stride(), kEqual);
        side.Keep("y", y, s.stride(), Rounded(dtype));
        if (layer) side.Keep("mean", mean, s.num_rows(), kFp32);
        side.Keep("rstd", rstd, s.num_rows(), kFp32);
      });
    }
  }
}

void CompareNormForward(Comparison& c) {
  CompareNormForward(c, NormKind::kLayerNorm);
  CompareNormForward(c, NormKind::kRmsNorm);
}

// The forward pass's statistics of every row.
void Statistics(const Array& x, const RowShape& s, bool layer, Array* mean,
                Array* rstd) {
  for (int64_t row = 0; row < s.num_rows(); ++row) {
    const int64_t at = row / s.inner * s.stride() + row % s.inner * s.width;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < s.width; ++i) sum += x[at + i];
    const double middle = layer ? sum / static_cast<double>(s.width) : 0;
    for (int64_t i = 0; i < s.width; ++i) {
      squares += std::pow(x[at + i] - middle, 2);
    }
    mean->Set(row, middle);
    rstd->Set(row,
              1 / std::sqrt(squares / static_cast<double>(s.width) + 1e-5));
  }
}

void CompareNormBackward(Comparison& c, NormKind kind, bool accumulate) {
  const bool layer = kind == NormKind::kLayerNorm;
  for (const DType dtype : kFloatTypes) {
    for (const RowShape& s : RowShapes(c)) {
      Array dy = Array::Normal(dtype, s.size(), 1);
      Array sum = Array::Normal(dtype, s.size(), 2, 2.0);
      Array dsum = Array::Normal(dtype, s.size(), 3);
      const Array weight = Array::Normal(dtype, s.width, 4);
      const DType sink = accumulate ? DType::kF32 : dtype;
      const Array before = Array::Normal(sink, s.width, 5);
      Array mean(DType::kF32, s.num_rows()), rstd(mean);
      Statistics(sum, s, layer, &mean, &rstd);
      c.Run(NameOf(s, dtype), [&](Side& side) {
        Array dx(dtype, s.size()), dweight = before, dbias = before;
        NormBackwardArgs args{.kind = kind, .dy = View(dy, s)};
        args.sum = View(sum, s);
        args.weight = weight.vector();
        if (layer) args.mean = mean.floats();
        args.rstd = rstd.floats();
        args.dsum = View(dsum, s);
        args.dx = View(dx, s);
        args.dweight = dweight.vector();
        if (layer) args.dbias = dbias.vector();
        args.accumulate_dweight = args.accumulate_dbias = accumulate;
        Scratch scratch(side.ops.NormBackwardWorkspaceBytes(args));
        side.ops.NormBackward(side.stream, args, scratch.workspace());
        side.Keep("dx", dx, s.stride(), Rounded(dtype));
        side.Keep("dweight", dweight, s.width, Rounded(sink));
        if (layer) side.Keep("dbias", dbias, s.width, Rounded(sink));
      });
    }
  }
}

void CompareNormBackward(Comparison& c) {
  for (const bool accumulate : {false, true}) {
    CompareNormBackward(c, NormKind::kLayerNorm, accumulate);
    CompareNormBackward(c, NormKind::kRmsNorm, accumulate);
  }
}

void CompareRotary(Comparison& c) {
  constexpr int64_t kMax = 64;
  for (const DType dtype : kFloatTypes) {
    for (const RowShape& s :
         Shapes<RowShape>(c, {{5, 3, 34, 7}, {9, 2, 16, 0}},
                          {{2048, 32, 64, 1024}, {512, 8, 128, 0}})) {
      const int64_t half = s.width / 2;
      Array cos(DType::kF32, kMax * half), sin(cos);
      for (int64_t i = 0; i < cos.size(); ++i) {
        cos.Set(i, std::cos(0.1 * static_cast<double>(i)));
        sin.Set(i, std::sin(0.1 * static_cast<double>(i)));
      }
      const TestVector<int32_t> positions =
          RandomIds<int32_t>(s.outer, kMax, 1);
      const Array before = Array::Normal(dtype, s.size(), 2);
      for (const bool inverse : {false, true}) {
        c.Run(NameOf(s, dtype), [&](Side& side) {
          Array x = before;
          side.ops.Rotary(side.stream, {View(x, s), positions.data(),
                                        cos.floats(), sin.floats(), inverse});
          side.Keep("x", x, s.stride(), Rounded(dtype));
        });
      }
    }
  }
}

struct Table {
  int64_t tokens, vocab, width, pad;
};

std::vector<Table> Tables(const Comparison& c) {
  return Shapes<Table>(c, {{50, 7, 33, 1}, {64, 40, 64, 0}},
                       {{4096, 50257, 256, 0}, {4096, 1024, 1600, 0}});
}

std::string NameOf(const Table& t, DType dtype) {
  return std::string(DTypeName(dtype)) + " " + std::to_string(t.tokens) +
         " of " + std::to_string(t.vocab) + "x" + std::to_string(t.width);
}

void CompareEmbeddingForward(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Table& t : Tables(c)) {
      const auto ids = RandomIds<int32_t>(t.tokens, t.vocab, 1);
      const auto position_ids = RandomIds<int32_t>(t.tokens, 5, 2);
      Operand table(dtype, t.vocab, t.width, t.pad, 3);
      Operand positions(dtype, 5, t.width, t.pad, 4);
      for (const bool with_positions : {false, true}) {
        c.Run(NameOf(t, dtype), [&](Side& side) {
          Array out(dtype, t.tokens * table.ld);
          EmbeddingForwardArgs args{.ids = ids.data(), .table = table.view()};
          if (with_positions) {
            args.position_ids = position_ids.data();
            args.position_table = positions.view();
          }
          args.out = out.matrix(t.tokens, t.width, table.ld);
          side.ops.EmbeddingForward(side.stream, args);
          side.Keep("out", out, table.ld, kEqual);  // one sum, one rounding
        });
      }
      // Pieces of the table, as of the second of three ranks.
      c.Run(NameOf(t, dtype) + " in pieces", [&](Side& side) {
        Array out(dtype, t.tokens * t.width);
        const int64_t laps = CeilDiv(t.vocab * t.width, 3 * 64);
        Array stored = Array::Normal(dtype, laps * 64, 5);
        ConstMatrix pieces = stored.matrix(t.vocab, t.width, t.width);
        side.ops.EmbeddingForward(
            side.stream,
            {.ids = ids.data(),
             .table = pieces,
             .pieces = {.period = 3 * 64, .begin = 64, .elems = 64},
             .out = out.matrix(t.tokens, t.width, t.width)});
        side.Keep("out", out, t.width, kEqual);
      });
    }
  }
}

void CompareEmbeddingBackward(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Table& t : Tables(c)) {
      auto ids = RandomIds<int32_t>(t.tokens, t.vocab, 1);
      // One token very often, as in real text.
      for (size_t i = 0; i < ids.size(); i += 3) ids[i] = 1;
      Operand dout(dtype, t.tokens, t.width, t.pad, 2);
      for (const DType sink : {DType::kF32, dtype}) {
        const Operand before(sink, t.vocab, t.width, t.pad, 3);
        for (const bool accumulate : {false, true}) {
          c.Run(NameOf(t, dtype), [&](Side& side) {
            Operand dtable = before;
            const EmbeddingBackwardArgs args{ids.data(), dout.view(),
                                             dtable.view(), accumulate};
            Scratch scratch(side.ops.EmbeddingBackwardWorkspaceBytes(args));
            side.ops.EmbeddingBackward(side.stream, args, scratch.workspace());
            // The sum, and its addend.
            side.Keep("dtable", dtable.array, dtable.ld, Rounded(sink, 2));
          });
        }
      }
    }
  }
}

// ---- Element-wise -----------------------------------------------------------

std::vector<int64_t> Sizes(const Comparison& c) {
  return Shapes<int64_t>(c, {1, 31, 1023, 4096}, {1'000'003, 2'097'152});
}

std::string NameOf(int64_t size, DType dtype) {
  return std::string(DTypeName(dtype)) + " " + std::to_string(size);
}

// Calls fn(dtype, size) for all of them.
template <class Fn>
void ForEachSpan(const Comparison& c, const Fn& fn) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t size : Sizes(c)) fn(dtype, size);
  }
}

void CompareGeluForward(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array x = Array::Normal(dtype, size, 1, 2);
    for (const Gelu kind : {Gelu::kTanh, Gelu::kErf}) {
      c.Run(NameOf(size, dtype), [&](Side& side) {
        Array y(dtype, size);
        side.ops.GeluForward(side.stream, {kind, x.vector(), y.vector()});
        side.Keep("y", y, size, Rounded(dtype));
      });
    }
  });
}

void CompareGeluBackward(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array x = Array::Normal(dtype, size, 1, 2);
    const Array dy = Array::Normal(dtype, size, 2);
    for (const Gelu kind : {Gelu::kTanh, Gelu::kErf}) {
      c.Run(NameOf(size, dtype), [&](Side& side) {
        Array dx(dtype, size);
        side.ops.GeluBackward(side.stream,
                              {kind, x.vector(), dy.vector(), dx.vector()});
        side.Keep("dx", dx, size, Rounded(dtype));
      });
    }
  });
}

// Rows of an activation: tokens x width.
std::vector<Table> Activations(const Comparison& c) {
  return Shapes<Table>(c, {{5, 0, 33, 1}, {16, 0, 64, 0}},
                       {{512, 0, 4864, 0}, {777, 0, 1023, 3}});
}

void CompareSwigluForward(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Table& t : Activations(c)) {
      Operand x(dtype, t.tokens, 2 * t.width, t.pad, 1, 2);
      c.Run(NameOf(t, dtype), [&](Side& side) {
        Operand y(dtype, t.tokens, t.width, t.pad, 2);
        side.ops.SwigluForward(side.stream, {x.view(), y.view()});
        side.Keep("y", y.array, y.ld, Rounded(dtype));
      });
    }
  }
}

void CompareSwigluBackward(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Table& t : Activations(c)) {
      Operand x(dtype, t.tokens, 2 * t.width, t.pad, 1, 2);
      Operand dy(dtype, t.tokens, t.width, t.pad, 2);
      c.Run(NameOf(t, dtype), [&](Side& side) {
        Operand dx(dtype, t.tokens, 2 * t.width, t.pad, 3);
        side.ops.SwigluBackward(side.stream, {x.view(), dy.view(), dx.view()});
        side.Keep("dx", dx.array, dx.ld, Rounded(dtype));
      });
    }
  }
}

void CompareDropout(Comparison& c) {
  for (const DType dtype : kFloatTypes) {
    for (const Table& t : Activations(c)) {
      Operand x(dtype, t.tokens, t.width, t.pad, 1);
      const auto row_ids = RandomIds<int64_t>(t.tokens, int64_t{1} << 40, 2);
      c.Run(NameOf(t, dtype), [&](Side& side) {
        Operand y(dtype, t.tokens, t.width, t.pad, 3);
        DropoutArgs args{.x = x.view(), .y = y.view(), .probability = 0.1f};
        args.key = 0x123456789abcdef;
        args.row_ids = row_ids.data();
        side.ops.Dropout(side.stream, args);
        side.Keep("y", y.array, y.ld, kEqual);  // one product, one rounding
      });
    }
  }
}

void CompareAdd(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array a = Array::Normal(dtype, size, 1);
    const Array b = Array::Normal(dtype, size, 2);
    c.Run(NameOf(size, dtype), [&](Side& side) {
      Array y(dtype, size);
      side.ops.Add(side.stream, {a.vector(), b.vector(), y.vector()});
      side.Keep("y", y, size, kEqual);
    });
  });
}

void CompareCast(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array src = Array::Normal(dtype, size, 1);
    for (const DType to : kFloatTypes) {
      if (to != dtype && to != DType::kF32 && dtype != DType::kF32) continue;
      c.Run(NameOf(size, dtype) + " to " + DTypeName(to), [&](Side& side) {
        Array dst(to, size);
        side.ops.Cast(side.stream, {src.vector(), dst.vector()});
        side.Keep("dst", dst, size, kEqual);
      });
    }
  });
}

void CompareFill(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    c.Run(NameOf(size, dtype), [&](Side& side) {
      Array dst(dtype, size);
      side.ops.Fill(side.stream, {dst.vector(), 1.2345f});
      side.Keep("dst", dst, size, kEqual);
    });
  });
}

// ---- Reductions -------------------------------------------------------------

void CompareSumSquares(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array src = Array::Normal(dtype, size, 1);
    c.Run(NameOf(size, dtype), [&](Side& side) {
      TestVector<double> out = {0, 0};
      const SquaredSpan spans[] = {
          {src.vector(), &out[0]},
          {{src.data(), dtype, size / 2}, &out[1]},
      };
      side.ops.SumSquares(side.stream, {spans});
      // Float64 in any order: 2^-53 per addition, of terms of one sign.
      side.KeepScalars("out", out, static_cast<double>(size) * 1.2e-16);
    });
  });
}

void CompareSum(Comparison& c) {
  for (const int64_t size : Shapes<int64_t>(c, {1, 7, 100}, {4096})) {
    TestVector<double> src(static_cast<size_t>(size));
    for (size_t i = 0; i < src.size(); ++i) src[i] = 1.0 / (3.0 + double(i));
    c.Run(std::to_string(size), [&](Side& side) {
      TestVector<double> out = {0};
      side.ops.Sum(side.stream, {src.data(), size, out.data()});
      side.KeepScalars("out", out, kEqual);
    });
  }
}

void CompareCountNonFinite(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    Array src = Array::Normal(dtype, size, 1);
    for (int64_t i = 0; i < size; i += 7) src.Set(i, i % 2 ? NAN : INFINITY);
    c.Run(NameOf(size, dtype), [&](Side& side) {
      TestVector<int64_t> out = {0};
      side.ops.CountNonFinite(side.stream, {src.vector(), out.data()});
      side.KeepScalars("out", out, kEqual);
    });
  });
}

void CompareClip(Comparison& c) {
  for (const double sum_squares : {0.0, 0.25, 1e6, HUGE_VAL}) {
    const TestVector<double> sum = {sum_squares};
    c.Run(std::to_string(sum_squares), [&](Side& side) {
      TestVector<float> norm = {0}, scale = {0};
      TestVector<uint32_t> found = {7};
      side.ops.Clip(side.stream, {.sum_squares = sum.data(),
                                  .max_norm = 1.0f,
                                  .inverse_scale = 0.5f,
                                  .norm = norm.data(),
                                  .grad_scale = scale.data(),
                                  .found_non_finite = found.data()});
      if (std::isfinite(sum_squares)) {
        side.KeepScalars("norm", norm, 2 * HalfUlp(DType::kF32));
        side.KeepScalars("grad_scale", scale, 2 * HalfUlp(DType::kF32));
      }
      side.KeepScalars("found_non_finite", found, kEqual);
    });
  }
}

void CompareSumRanks(Comparison& c) {
  ForEachSpan(c, [&](DType dtype, int64_t size) {
    const Array a = Array::Normal(dtype, size, 1);
    const Array b = Array::Normal(dtype, size, 2);
    const Array d = Array::Normal(dtype, size, 3);
    const void* const src[] = {a.data(), b.data(), d.data()};
    for (const DType to : {dtype, DType::kF32}) {
      const Array before = Array::Normal(to, size, 4);
      for (const bool accumulate : {false, true}) {
        c.Run(NameOf(size, dtype) + " to " + DTypeName(to), [&](Side& side) {
          Array dst = before;
          side.ops.SumRanks(side.stream,
                            {src, dtype, dst.vector(), accumulate});
          side.Keep("dst", dst, size, kEqual);
        });
      }
    }
  });
}

// ---- Optimizers -------------------------------------------------------------

// Calls fn(side, state, kept) on both sides for every pair of storage types;
// the state's parameters are compared after it. The square root and division
// are exact on both sides: masters and moments differ by a few ulps at most.
template <class Fn>
void CompareUpdates(Comparison& c, const Fn& fn) {
  const int64_t size = c.large() ? 600'001 : kSpan;
  std::vector<UpdateRange> ranges = TestRanges();
  if (c.large()) ranges.push_back({kSpan, size, 0.02f});
  const TestVector<float> scale = {0.7f};
  const TestVector<uint32_t> found = {0};
  ForEachDtypePair([&](DType param, DType grad) {
    const FlatParams before(param, grad, size);
    for (const std::string how : {"", " stochastic", " split"}) {
      const bool stochastic = how == " stochastic", split = how == " split";
      if (stochastic && param == DType::kF32) continue;
      if (split && param != DType::kBF16) continue;
      const std::string what =
          std::string(DTypeName(param)) + "/" + DTypeName(grad) + how;
      c.Run(what, [&](Side& side) {
        FlatParams p = before;
        if (split) p.Split();
        UpdateState state = p.state(ranges);
        state.grad_scale = scale.data();
        state.found_non_finite = found.data();
        state.stochastic_rounding = stochastic;
        state.rounding_key = 77;
        state.first_element = 1001;
        fn(side, state);
        if (split) p.Join();
        side.Keep("param", p.param, size, Rounded(param));
        if (p.has_master()) side.Keep("master", p.master, size, kFp32);
      });
    }
  });
}

Array Moments(int64_t size, uint64_t seed) {
  Array a = Array::Normal(DType::kF32, size, seed, 0.1);
  for (int64_t i = 0; i < size; ++i) a.Set(i, std::abs(a[i]));
  return a;
}

void CompareAdamW(Comparison& c) {
  CompareUpdates(c, [](Side& side, const UpdateState& state) {
    const int64_t size = state.param.size;
    Array m = Moments(size, 5), v = Moments(size, 6);
    AdamWArgs args{{state, m.floats(), v.floats()}};
    args.lr = 0.1f;  // an update as large as the parameters
    args.bias_correction1 = 0.19f;
    args.bias_correction2 = 0.002f;
    side.ops.AdamW(side.stream, args);
    side.Keep("m", m, size, kFp32);
    side.Keep("v", v, size, kFp32);
  });
}

void CompareSgd(Comparison& c) {
  CompareUpdates(c, [](Side& side, const UpdateState& state) {
    const int64_t size = state.param.size;
    Array buffer = Moments(size, 5);
    SgdArgs args{state, buffer.floats()};
    args.lr = 0.1f;
    args.momentum = 0.9f;
    args.nesterov = true;
    side.ops.Sgd(side.stream, args);
    side.Keep("momentum", buffer, size, kFp32);
  });
}

// Both passes; every range a tensor of its own.
void CompareLamb(Comparison& c) {
  CompareUpdates(c, [](Side& side, const UpdateState& state) {
    const int64_t size = state.param.size;
    const auto num = static_cast<int64_t>(state.ranges.size());
    std::vector<TensorPart> parts;
    for (int64_t i = 0; i < num; ++i) parts.push_back({i, i, i + 1});
    Array m = Moments(size, 5), v = Moments(size, 6);
    TestVector<double> norms(static_cast<size_t>(2 * num), 0.0);
    LambArgs args{{state, m.floats(), v.floats()}, parts, norms.data()};
    args.lr = 0.1f;
    args.bias_correction1 = 0.19f;
    args.bias_correction2 = 0.002f;
    side.ops.LambMoments(side.stream, args);
    side.ops.LambApply(side.stream, args);
    side.Keep("m", m, size, kFp32);
    side.Keep("v", v, size, kFp32);
    side.KeepScalars("norms", norms, kFp32);
  });
}

// ---- The table --------------------------------------------------------------

struct Case {
  const char* op;
  void (*run)(Comparison&);
};

constexpr Case kCases[] = {
    {"Linear", CompareLinear},
    {"LinearBackwardInput", CompareLinearBackwardInput},
    {"LinearBackwardWeight", CompareLinearBackwardWeight},
    {"LinearCrossEntropy", CompareLinearCrossEntropy},
    {"AttentionForward", CompareAttentionForward},
    {"AttentionBackward", CompareAttentionBackward},
    {"NormForward", CompareNormForward},
    {"NormBackward", CompareNormBackward},
    {"Rotary", CompareRotary},
    {"EmbeddingForward", CompareEmbeddingForward},
    {"EmbeddingBackward", CompareEmbeddingBackward},
    {"GeluForward", CompareGeluForward},
    {"GeluBackward", CompareGeluBackward},
    {"SwigluForward", CompareSwigluForward},
    {"SwigluBackward", CompareSwigluBackward},
    {"Dropout", CompareDropout},
    {"Add", CompareAdd},
    {"Cast", CompareCast},
    {"Fill", CompareFill},
    {"SumSquares", CompareSumSquares},
    {"Sum", CompareSum},
    {"CountNonFinite", CompareCountNonFinite},
    {"Clip", CompareClip},
    {"SumRanks", CompareSumRanks},
    {"AdamW", CompareAdamW},
    {"Sgd", CompareSgd},
    {"LambMoments", CompareLamb},
    {"LambApply", CompareLamb},
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.op; }

TEST(ParityTest, EveryOpHasItsCase) {
  std::set<std::string> cases;
  for (const Case& one : kCases) cases.insert(one.op);
  EXPECT_EQ(cases, OpNames());
}

class OpParityTest : public testing::TestWithParam<Case> {};

TEST_P(OpParityTest, IsTheCpusOnTheSameData) {
  OnPath([](const Path& path) {
    Comparison comparison(path);
    GetParam().run(comparison);
    comparison.ExpectCalled(GetParam().op);
    comparison.Report();
  });
}

INSTANTIATE_TEST_SUITE_P(Ops, OpParityTest, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.op);
                         });

}  // namespace
}  // namespace zero
