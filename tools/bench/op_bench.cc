// Ops of kernels/ops.h, timed alone. Prints one JSON object per line.
//
// On a CPU every op is timed at the shapes of GPT-2 124M (micro-batch 4, T =
// 256) and Llama-3.2-1B (T = 512), and compared with the machine's own ceiling:
// products with the same product through plain oneDNN, the others with a plain
// loop that reads and writes the same bytes. An op and its ceiling are timed
// alternately. Clip is left out: it reads three numbers.
//
// On a GPU it measures the copy bandwidth, the rate of matrix products, and the
// bandwidth of AdamW, norms and other ops that only move memory, each on more
// than any cache holds. Events on the stream time several calls at once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/op_list.h"
#include "kernels/ops.h"
#include "kernels/sizes.h"
#include "nlohmann/json.hpp"
#include "tools/bench/fill.h"
#include "tools/bench/memory_loops.h"
#include "tools/bench/products.h"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"

// Legend: M tokens, C channels, F feed-forward width, V vocabulary, H query
// heads, K kv heads, D head width.

namespace zero::bench {
namespace {

struct Options {
  RunOptions run;
  std::string dtype = "fp32";
  std::string filter;
  double seconds = 0.3;  // per case, at least
  int rounds = 3;        // at least
  bool cpu_time = false;
};

using Call = std::function<void()>;

// The work of one call.
struct Work {
  Call run;
  double amount = 0;  // FLOP or bytes
};

class Bench {
 public:
  // Measures ops on data of `dtype`.
  Bench(Device& device, const Options& options, DType dtype)
      : device_(device),
        options_(options),
        dtype_(dtype),
        stream_(device.MakeStream(StreamRole::kCompute)),
        start_(device.MakeEvent()),
        end_(device.MakeEvent()) {}

  void Copy(int64_t bytes) {
    Move("copy", absl::StrCat(bytes, " bytes"), bytes, bytes, [&]() -> Call {
      const float* const from = Floats(bytes / 4);
      float* const to = Floats(bytes / 4);
      return [=, this] { device_.Copy(*stream_, to, from, bytes); };
    });
  }

  // y[m, out] = x[m, in] w[out, in]^T
  void LinearForward(const std::string& op, const char* model, int64_t m,
                     int64_t out, int64_t in, Gelu act = Gelu::kNone,
                     bool bias = false, bool residual = false) {
    Product(op, model, ForwardShape(m, out, in, dtype_), [&] {
      LinearArgs args{.x = RandomMatrix(m, in),
                      .w = RandomMatrix(out, in),
                      .y = RandomMatrix(m, out),
                      .act = act};
      if (bias) args.bias = RandomVector(out, dtype_);
      if (residual) args.residual = RandomMatrix(m, out);
      if (act != Gelu::kNone) args.pre_act = RandomMatrix(m, out);
      return Linear(args);
    });
  }
  void LinearDx(const std::string& op, const char* model, int64_t m,
                int64_t out, int64_t in, Gelu act = Gelu::kNone) {
    Product(op, model, DxShape(m, out, in, dtype_), [&] {
      LinearBackwardInputArgs args{.dy = RandomMatrix(m, out),
                                   .w = RandomMatrix(out, in),
                                   .dx = RandomMatrix(m, in),
                                   .act = act};
      if (act != Gelu::kNone) args.pre_act = RandomMatrix(m, in);
      return LinearBackwardInput(args);
    });
  }
  void LinearDw(const std::string& op, const char* model, int64_t m,
                int64_t out, int64_t in, bool bias = false) {
    Product(op, model, DwShape(m, out, in, dtype_), [&] {
      LinearBackwardWeightArgs args{.dy = RandomMatrix(m, out),
                                    .x = RandomMatrix(m, in),
                                    .dw = RandomMatrix(out, in, DType::kF32)};
      if (bias) args.dbias = RandomVector(out, DType::kF32);
      return LinearBackwardWeight(args);
    });
  }

  // The products of a block of GPT-2, or of Llama (without biases, with two
  // products in fc).
  void Linears(bool gpt, int64_t m, int64_t c, int64_t f, int64_t qkv) {
    const char* const model = gpt ? "gpt2" : "llama";
    const int64_t fc = gpt ? f : 2 * f;
    const Gelu act = gpt ? Gelu::kTanh : Gelu::kNone;
    const auto name = [gpt](const char* op, const char* fused) {
      return absl::StrCat("linear ", op, gpt ? fused : "");
    };
    LinearForward(name("qkv", " + bias"), model, m, qkv, c, Gelu::kNone, gpt);
    LinearForward(name("fc", " + bias + gelu"), model, m, fc, c, act, gpt);
    LinearForward(name("proj", " + bias + residual"), model, m, c, f,
                  Gelu::kNone, gpt, gpt);
    LinearDx(name("dx proj", " + gelu"), model, m, c, f, act);
    LinearDx("linear dx fc", model, m, fc, c);
    LinearDw(name("dw fc", " + bias"), model, m, fc, c, gpt);
    LinearDw(name("dw proj", " + bias"), model, m, c, f, gpt);
  }

  void Head(const char* model, int64_t m, int64_t c, int64_t v) {
    const float scale = 1.0f / static_cast<float>(m);
    double loss = 0;
    const int64_t padded = RoundUp(v, 128);  // as models store their tables
    const auto make = [&] {
      return LinearCrossEntropy({.x = RandomMatrix(m, c),
                                 .w = RandomMatrix(padded, c),
                                 .vocab = v,
                                 .targets = Ids(m, v),
                                 .loss_sum = &loss,
                                 .grad_scale = &scale,
                                 .dx = RandomMatrix(m, c),
                                 .dw = RandomMatrix(padded, c, DType::kF32)});
    };
    const auto make_ceiling = [&]() -> Work {
      const Work logits = Plain(ForwardShape(m, padded, c, dtype_));
      const Work dx = Plain(DxShape(m, padded, c, dtype_));
      const Work dw = Plain(DwShape(m, padded, c, dtype_));
      const auto all = [=] {
        logits.run();
        dx.run();
        dw.run();
      };
      return {all, logits.amount + dx.amount + dw.amount};
    };
    Measure("linear + cross entropy",
            absl::StrCat(model, " ", m, " x ", v, " x ", c, ", 3 products"),
            "GFLOP/s", 6.0 * m * v * c, make, make_ceiling);
  }

  // Causal: half of the T x T products counts, two forward and five backward.
  // The ceiling is the rate of a large product.
  void Attention(const char* model, AttentionShape shape) {
    shape.dtype = dtype_;
    shape.kv_len = shape.q_len;
    shape.scale =
        static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
    const int64_t t = shape.q_len, d = shape.head_dim;
    const int64_t tokens = shape.batch * t;
    const int64_t q_width = shape.num_heads * d;
    const int64_t kv_width = shape.num_kv_heads * d;
    const double flops = 1.0 * shape.batch * shape.num_heads * t * t * d;
    const std::string text =
        absl::StrCat(model, " B ", shape.batch, " T ", t, " H ",
                     shape.num_heads, " K ", shape.num_kv_heads, " D ", d);
    const auto large = [&] {
      return Plain(ForwardShape(1024, 1024, 1024, dtype_));
    };
    const auto at = [&](const Matrix& x, int64_t column) {
      return MutableHeadsRef{
          static_cast<char*>(x.data) + column * DTypeBytes(dtype_), t * x.ld,
          x.ld};
    };
    const auto read = [](const MutableHeadsRef& heads) {
      return HeadsRef{heads.data, heads.batch_stride, heads.token_stride};
    };
    AttentionForwardArgs args;
    const auto forward = [&] {
      const Matrix qkv = RandomMatrix(tokens, q_width + 2 * kv_width);
      args = {.shape = shape,
              .q = read(at(qkv, 0)),
              .k = read(at(qkv, q_width)),
              .v = read(at(qkv, q_width + kv_width)),
              .out = at(RandomMatrix(tokens, q_width), 0),
              .lse = Floats(tokens * shape.num_heads)};
      return AttentionForward(args);
    };
    const auto backward = [&] {
      forward()();  // for out and lse
      const Matrix dout = RandomMatrix(tokens, q_width);
      const Matrix dqkv = RandomMatrix(tokens, q_width + 2 * kv_width);
      return AttentionBackward({.shape = shape,
                                .q = args.q,
                                .k = args.k,
                                .v = args.v,
                                .out = read(args.out),
                                .dout = read(at(dout, 0)),
                                .lse = args.lse,
                                .dq = at(dqkv, 0),
                                .dk = at(dqkv, q_width),
                                .dv = at(dqkv, q_width + kv_width)});
    };
    Measure("attention", text, "GFLOP/s", 2 * flops, forward, large);
    Measure("attention backward", text, "GFLOP/s", 5 * flops, backward, large);
  }

  void Norms(int64_t m, int64_t c) {
    const int64_t bytes = m * c * DTypeBytes(dtype_);
    const std::string text = absl::StrCat(m, " x ", c);
    for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
      const bool layer = kind == NormKind::kLayerNorm;
      const std::string name = layer ? "layernorm" : "rmsnorm";
      Move(name + " + residual", text, 2 * bytes, 2 * bytes, [&] {
        NormForwardArgs args{.kind = kind,
                             .x = RandomRows(m, c),
                             .residual = RandomRows(m, c),
                             .sum = RandomRows(m, c),
                             .weight = RandomVector(c, dtype_),
                             .y = RandomRows(m, c),
                             .rstd = Floats(m)};
        if (layer) args.bias = RandomVector(c, dtype_);
        if (layer) args.mean = Floats(m);
        return NormForward(args);
      });
      Move(name + " backward", text, 3 * bytes, bytes, [&] {
        NormBackwardArgs args{.kind = kind,
                              .dy = RandomRows(m, c),
                              .sum = RandomRows(m, c),
                              .weight = RandomVector(c, dtype_),
                              .mean = Floats(m),
                              .rstd = Floats(m),
                              .dsum = RandomRows(m, c),
                              .dx = RandomRows(m, c),
                              .dweight = RandomVector(c, DType::kF32)};
        if (layer) args.dbias = RandomVector(c, DType::kF32);
        return NormBackward(args);
      });
    }
  }

  void Rotary(int64_t m, int64_t heads, int64_t d) {
    const int64_t bytes = m * heads * d * DTypeBytes(dtype_);
    Move("rotary", absl::StrCat(m, " x ", heads, " x ", d), bytes, bytes, [&] {
      return Rotary(
          {.x = {Random(m * heads * d, dtype_), dtype_, m, heads, d, heads * d},
           .positions = Ids(m, m),
           .cos = Floats(m * d / 2),
           .sin = Floats(m * d / 2)});
    });
  }

  void Embedding(int64_t m, int64_t c, int64_t v) {
    const int64_t bytes = m * c * DTypeBytes(dtype_);
    const std::string text = absl::StrCat(m, " of ", v, " x ", c);
    Move("embedding", text, 2 * bytes, bytes, [&] {
      return EmbeddingForward({.ids = Ids(m, v),
                               .table = RandomMatrix(v, c),
                               .position_ids = Ids(m, 1024),
                               .position_table = RandomMatrix(1024, c),
                               .out = RandomMatrix(m, c)});
    });
    Move("embedding backward", text, bytes + m * c * 4, m * c * 4, [&] {
      return EmbeddingBackward({.ids = Ids(m, v),
                                .dout = RandomMatrix(m, c),
                                .dtable = RandomMatrix(v, c, DType::kF32),
                                .accumulate = true});
    });
  }

  void Gelus(int64_t m, int64_t f) {
    const int64_t n = m * f, bytes = n * DTypeBytes(dtype_);
    const std::string text = absl::StrCat(m, " x ", f);
    const auto vector = [&] { return RandomVector(n, dtype_); };
    for (const auto& [kind, name] : {std::pair{Gelu::kTanh, "gelu tanh"},
                                     std::pair{Gelu::kErf, "gelu erf"}}) {
      Move(name, text, bytes, bytes, [&, kind = kind] {
        return GeluForward({kind, vector(), vector()});
      });
      Move(absl::StrCat(name, " backward"), text, 2 * bytes, bytes,
           [&, kind = kind] {
             return GeluBackward({kind, vector(), vector(), vector()});
           });
    }
  }

  void Swiglu(int64_t m, int64_t f) {
    const int64_t bytes = m * f * DTypeBytes(dtype_);
    const std::string text = absl::StrCat(m, " x ", f);
    Move("swiglu", text, 2 * bytes, bytes, [&] {
      return SwigluForward({RandomMatrix(m, 2 * f), RandomMatrix(m, f)});
    });
    Move("swiglu backward", text, 3 * bytes, 2 * bytes, [&] {
      return SwigluBackward(
          {RandomMatrix(m, 2 * f), RandomMatrix(m, f), RandomMatrix(m, 2 * f)});
    });
  }

  void ElementWise(int64_t m, int64_t f) {
    const int64_t n = m * f, bytes = n * DTypeBytes(dtype_);
    const std::string text = absl::StrCat(m, " x ", f);
    const auto vector = [&] { return RandomVector(n, dtype_); };
    std::vector<int64_t> rows(m);
    for (int64_t i = 0; i < m; ++i) rows[i] = i;
    Move("dropout", text, bytes, bytes, [&] {
      return Dropout({.x = RandomMatrix(m, f),
                      .y = RandomMatrix(m, f),
                      .probability = 0.1f,
                      .key = 1,
                      .row_ids = rows.data()});
    });
    Move("add", text, 2 * bytes, bytes, [&] {
      return Add({vector(), vector(), vector()});
    });
    Move("fill", text, 0, bytes, [&] { return Fill({vector(), 1.0f}); });
    Move("cast fp32 to bf16", text, 4 * n, 2 * n, [&] {
      return Cast(
          {RandomVector(n, DType::kF32), RandomVector(n, DType::kBF16)});
    });
  }

  void Sums(int64_t n) {
    const int64_t bytes = n * DTypeBytes(dtype_);
    SquaredSpan span;
    Move("sum of squares", absl::StrCat(n), bytes, 0, [&] {
      span = {RandomVector(n, dtype_), static_cast<double*>(Memory(64))};
      return SumSquares({{&span, 1}});
    });
    if (device_.asynchronous()) return;
    int64_t count = 0;
    Move("count non-finite", absl::StrCat(n), bytes, 0, [&] {
      return CountNonFinite({RandomVector(n, dtype_), &count});
    });
  }

  void AdamW(int64_t n, DType grad) {
    Update(absl::StrCat("adamw, ", DTypeName(grad), " gradients"), n, grad, 4,
           3, [&](const UpdateState& state) {
             return AdamW({{.state = state,
                            .m = Floats(n),
                            .v = Floats(n, 0),
                            .lr = 1e-3f,
                            .bias_correction1 = 0.1f,
                            .bias_correction2 = 0.01f}});
           });
  }

  void Sgd(int64_t n) {
    Update("sgd + momentum", n, DType::kF32, 3, 2,
           [&](const UpdateState& state) {
             return Sgd({.state = state,
                         .momentum_buffer = Floats(n),
                         .lr = 1e-3f,
                         .momentum = 0.9f});
           });
  }

  // Pass 1 reads p, g, m, v and writes m, v; pass 2 reads p, m, v and writes p.
  void Lamb(int64_t n) {
    std::vector<double> norms(2);
    static constexpr TensorPart kWhole = {0, 0, 1};
    Update(
        "lamb, both passes", n, DType::kF32, 7, 3,
        [&](const UpdateState& state) -> Call {
          const LambArgs args{
              {.state = state, .m = Floats(n), .v = Floats(n, 0), .lr = 1e-3f},
              {&kWhole, 1},
              norms.data()};
          return [this, &norms, args] {
            norms.assign(2, 0.0);
            ops().LambMoments(*stream_, args);
            ops().LambApply(*stream_, args);
          };
        });
  }

 private:
  // Times an op on arguments of the current case. The arguments and the ceiling
  // are made only if the op is selected.
  using MakeCall = std::function<Call()>;
  using MakeWork = std::function<Work()>;

  float* Floats(int64_t size, float lowest = -0.5f) {
    return static_cast<float*>(Random(size, DType::kF32, lowest));
  }
  Vector RandomVector(int64_t size, DType dtype) {
    return {Random(size, dtype), dtype, size};
  }
  Matrix RandomMatrix(int64_t rows, int64_t cols, DType dtype) {
    return {Random(rows * cols, dtype), dtype, rows, cols, cols};
  }
  Matrix RandomMatrix(int64_t rows, int64_t cols) {
    return RandomMatrix(rows, cols, dtype_);
  }
  Rows RandomRows(int64_t rows, int64_t width) {
    return {Random(rows * width, dtype_), dtype_, rows, 1, width, width};
  }

  Ops& ops() { return device_.ops(); }
  // Calls of every op, with a workspace if it takes one: Add({a, b, y}).
#define ZERO_OP(Name, Args)                                    \
  Call Name(const Args& args) {                                \
    const size_t bytes = ops().Name##WorkspaceBytes(args);     \
    const Workspace scratch{Memory(bytes + 64), bytes};        \
    return [=, this] { ops().Name(*stream_, args, scratch); }; \
  }
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args)                           \
  Call Name(const Args& args) {                       \
    return [=, this] { ops().Name(*stream_, args); }; \
  }
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP

  void Move(const std::string& op, const std::string& shape, int64_t read_bytes,
            int64_t write_bytes, const MakeCall& make) {
    Measure(op, shape, "GB/s", 1.0 * (read_bytes + write_bytes), make,
            [&] { return Loop(read_bytes, write_bytes); });
  }

  // Memory of the current case, freed at its end.
  void* Memory(int64_t bytes) {
    auto buffer = device_.Allocate(bytes, MemoryKind::kDevice);
    ZERO_CHECK(buffer.ok()) << buffer.status().message();
    memory_.push_back(std::move(*buffer));
    return memory_.back().data();
  }

  // The same random numbers, repeated, since the host makes only this many.
  void* Random(int64_t size, DType dtype, float lowest = -0.5f) {
    const int64_t total = size * static_cast<int64_t>(DTypeBytes(dtype));
    const int64_t part = std::min<int64_t>(total, int64_t{16} << 20);
    char* const data = static_cast<char*>(Memory(total));
    auto host = device_.Allocate(part, MemoryKind::kHost);
    ZERO_CHECK(host.ok()) << host.status().message();
    FillRandom(host->data(), dtype, part / DTypeBytes(dtype), lowest);
    for (int64_t at = 0; at < total; at += part) {
      device_.Copy(*stream_, data + at, host->data(),
                   std::min(part, total - at));
    }
    stream_->Synchronize();
    return data;
  }

  // In the host's memory.
  int32_t* Ids(int64_t size, int64_t limit) {
    int32_t* const ids = static_cast<int32_t*>(Memory(size * 4));
    uint32_t state = 7;
    for (int64_t i = 0; i < size; ++i) {
      state = state * 1664525u + 1013904223u;
      ids[i] = static_cast<int32_t>((state >> 8) % limit);
    }
    return ids;
  }

  // Makes the same product through oneDNN, on its own memory.
  Work Plain(const ProductShape& shape) {
    const auto product = std::make_shared<PlainProduct>(shape);
    const int64_t item = DTypeBytes(shape.dtype);
    const void* a = Random(product->a_bytes() / item, shape.dtype);
    const void* b = Random(product->b_bytes() / item, shape.dtype);
    void* c = Memory(product->c_bytes());
    return {[=] { product->Run(a, b, c); }, shape.flops()};
  }

  // A loop that reads and writes this many bytes, on its own memory.
  Work Loop(int64_t read_bytes, int64_t write_bytes) {
    const int64_t in_size = read_bytes / 4, out_size = write_bytes / 4;
    const float* in = Floats(in_size);
    float* out = Floats(out_size);
    const int threads = device_.info().num_threads;
    return {[=] { CopyLoop(threads, in, in_size, out, out_size); },
            1.0 * (read_bytes + write_bytes)};
  }

  // The mean seconds per call over `calls` calls.
  double SecondsOf(const Call& run, int calls) {
    const auto all = [&] {
      for (int i = 0; i < calls; ++i) run();
    };
    if (!device_.asynchronous()) return bench::SecondsOf(all) / calls;
    stream_->Record(*start_);
    all();
    stream_->Record(*end_);
    end_->Synchronize();
    return end_->MillisSince(*start_) * 1e-3 / calls;
  }

  // A GPU has no ceiling: its rates are compared with each other.
  void Measure(const std::string& op, const std::string& shape,
               const char* unit, double amount, const MakeCall& make,
               const MakeWork& make_ceiling) {
    if (!absl::StrContains(op, options_.filter)) return;
    const bool on_gpu = device_.asynchronous();
    const Call run = make();
    const Work ceiling = on_gpu ? Work{} : make_ceiling();
    SecondsOf(run, 1);
    if (!on_gpu) ceiling.run();
    int calls = 1;
    if (on_gpu) {  // about 20 ms between two events
      calls = static_cast<int>(std::clamp(0.02 / SecondsOf(run, 1), 1.0, 1e3));
    }
    std::vector<double> our_s, ceiling_s, ratios;
    double spent = 0;
    while (spent < options_.seconds ||
           static_cast<int>(our_s.size()) < options_.rounds) {
      our_s.push_back(SecondsOf(run, calls));
      spent += our_s.back() * calls;
      if (on_gpu) continue;
      ceiling_s.push_back(SecondsOf(ceiling.run, 1));
      spent += ceiling_s.back();
      ratios.push_back(amount / our_s.back() /
                       (ceiling.amount / ceiling_s.back()));
    }
    nlohmann::ordered_json row = {{"op", op},
                                  {"shape", shape},
                                  {"dtype", DTypeName(dtype_)},
                                  {"ms", Median(our_s) * 1e3},
                                  {"unit", unit},
                                  {"rate", amount / Median(our_s) * 1e-9},
                                  {"rounds", our_s.size()}};
    if (!on_gpu) {
      row["ceiling"] = ceiling.amount / Median(ceiling_s) * 1e-9;
      row["ratio"] = Median(ratios);
    }
    std::cout << row.dump() << std::endl;
    memory_.clear();
  }

  void Product(const std::string& op, const char* model,
               const ProductShape& shape, const MakeCall& make) {
    const std::string text =
        absl::StrCat(model, " ", shape.m, " x ", shape.n, " x ", shape.k);
    Measure(op, text, "GFLOP/s", shape.flops(), make,
            [&] { return Plain(shape); });
  }

  // An update of n parameters that reads and writes this many arrays, one of
  // them the gradient. The others are fp32; bf16 parameters count together with
  // the rest of their masters. The ceiling is the plain update of four fp32
  // arrays.
  void Update(const std::string& op, int64_t n, DType grad, int64_t reads,
              int64_t writes,
              const std::function<Call(const UpdateState&)>& make) {
    const UpdateRange range = {0, n, 0.1f};
    const int64_t bytes_each = (reads - 1 + writes) * 4 + DTypeBytes(grad);
    Measure(
        op, absl::StrCat(n), "GB/s", 1.0 * bytes_each * n,
        [&] {
          Vector rest;
          if (dtype_ == DType::kBF16) {
            rest = RandomVector(n, DType::kBF16);
            rest.dtype = DType::kU16;
          }
          return make({.param = RandomVector(n, dtype_),
                       .master = rest,
                       .grad = RandomVector(n, grad),
                       .ranges = {&range, 1}});
        },
        [&]() -> Work {
          float *p = Floats(n), *g = Floats(n), *m = Floats(n), *v = Floats(n);
          const int threads = device_.info().num_threads;
          return {[=] { UpdateLoop(threads, p, g, m, v, n); }, 28.0 * n};
        });
  }

  Device& device_;
  const Options& options_;
  const DType dtype_;  // of the ops
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> start_, end_;
  std::vector<Buffer> memory_;
};

void RunOnCpu(Device& device, const Options& options) {
  Bench bench(device, options,
              options.dtype == "bf16" ? DType::kBF16 : DType::kF32);
  bench.Linears(/*gpt=*/true, 1024, 768, 3072, 3 * 768);
  bench.Linears(/*gpt=*/false, 512, 2048, 8192, 3072);
  bench.Head("gpt2", 1024, 768, 50257);
  bench.Attention("gpt2", {.batch = 4,
                           .q_len = 256,
                           .num_heads = 12,
                           .num_kv_heads = 12,
                           .head_dim = 64});
  bench.Attention("llama", {.batch = 1,
                            .q_len = 512,
                            .num_heads = 32,
                            .num_kv_heads = 8,
                            .head_dim = 64});
  bench.Norms(1024, 768);
  bench.Rotary(512, 40, 64);
  bench.Embedding(1024, 768, 50257);
  bench.Gelus(1024, 3072);
  bench.Swiglu(1024, 3072);
  bench.ElementWise(1024, 3072);
  constexpr int64_t kTable = 38597376;  // GPT-2's table of tokens
  bench.Sums(kTable);
  constexpr int64_t kParameters = 100'000'000;
  bench.AdamW(kParameters, DType::kF32);
  bench.Sgd(kParameters);
  bench.Lamb(kParameters);
}

void RunOnGpu(Device& device, const Options& options) {
  constexpr int64_t kBytes = int64_t{1} << 30;  // moved per case, about
  Bench bf16(device, options, DType::kBF16), fp32(device, options, DType::kF32);
  fp32.Copy(kBytes / 2);
  bf16.LinearForward("product", "square", 8192, 8192, 8192);
  fp32.LinearForward("product", "square", 8192, 8192, 8192);
  for (const DType grad : {DType::kF32, DType::kBF16}) {
    bf16.AdamW(RoundUp(kBytes / 32, 64), grad);
  }
  for (const int64_t width : {768, 1600, 4096}) {
    bf16.Norms(kBytes / 8 / width, width);
  }
  bf16.Swiglu(kBytes / 10 / 4864, 4864);
  bf16.Gelus(kBytes / 6 / 4096, 4096);
  fp32.Sums(kBytes / 4);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times ops, on a CPU together with the machine's own ceiling");
  app.add_option("--device", options.run.device, "cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--dtype", options.dtype, "of a CPU's ops: fp32 or bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--filter", options.filter, "only ops with this in the name");
  app.add_option("--seconds", options.seconds, "per op, at least")
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "per op, at least")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.run.threads, "of a CPU (all cores)");
  app.add_flag("--cpu-time", options.cpu_time,
               "time by the thread's CPU clock; needs --threads 1");
  CLI11_PARSE(app, argc, argv);
  if (options.cpu_time) Clock() = CLOCK_THREAD_CPUTIME_ID;
  // A GPU's products take the fastest algorithm, not the library's first
  // choice.
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(
        const auto device,
        OpenDevice(options.run, 0, {.time_algorithms = true}));
    (device->asynchronous() ? RunOnGpu : RunOnCpu)(*device, options);
    return absl::OkStatus();
  });
  if (!status.ok()) std::cerr << "op_bench: " << status.message() << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
