// Every op of kernels/ops.h at the shapes of GPT-2 124M (micro-batch 4, T =
// 256) and Llama-3.2-1B (T = 512), beside the machine's own ceiling: products
// beside the same product through plain oneDNN, the others beside a plain loop
// that reads and writes as many bytes. An op and its ceiling are timed in
// turns. Prints one JSON object per line.
//
// Clip is left out: it reads three numbers.
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
#include "engine/base/math.h"
#include "kernels/check.h"
#include "kernels/ops.h"
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

// What one call of something does.
struct Work {
  std::function<void()> run;
  double amount = 0;  // FLOP or bytes
};

class Bench {
 public:
  Bench(Device& device, const Options& options)
      : device_(device),
        options_(options),
        dtype_(options.dtype == "bf16" ? DType::kBF16 : DType::kF32),
        product_dtype_(HasNativeProducts(dtype_) ? dtype_ : DType::kF32),
        threads_(device.info().num_threads),
        stream_(device.MakeStream(StreamRole::kCompute)) {}

  void Linears(const char* model, int64_t m, int64_t c, int64_t f, Gelu act,
               int64_t qkv);
  void Head(const char* model, int64_t m, int64_t c, int64_t v);
  void Attention(const char* model, AttentionShape shape);
  void Norms(int64_t m, int64_t c);
  void Rotary(int64_t m, int64_t heads, int64_t d);
  void Embedding(int64_t m, int64_t c, int64_t v);
  void ElementWise(int64_t m, int64_t f);
  void Reductions(int64_t n);
  void Optimizers(int64_t n);

 private:
  // Memory of the current case; freed by Clear.
  void* Random(int64_t size, DType dtype);
  Matrix RandomMatrix(int64_t rows, int64_t cols, DType dtype);
  Vector RandomVector(int64_t size, DType dtype) {
    return {Random(size, dtype), dtype, size};
  }
  Rows RandomRows(int64_t rows, int64_t width) {
    return {Random(rows * width, dtype_), dtype_, rows, 1, width, width};
  }
  int32_t* Ids(int64_t size, int64_t limit);
  Workspace Scratch(size_t bytes) {
    return {Random(static_cast<int64_t>(bytes) / 4 + 16, DType::kF32), bytes};
  }
  Matrix RandomMatrix(int64_t rows, int64_t cols) {
    return RandomMatrix(rows, cols, dtype_);
  }
  void Clear() { memory_.clear(); }

  Ops& ops() { return device_.ops(); }
  // The same product through oneDNN, on memory of its own.
  Work Plain(ProductShape shape);
  // A loop that reads and writes so many bytes, on memory of its own.
  Work Loop(int64_t read_bytes, int64_t write_bytes);
  bool Wanted(const std::string& op) const {
    return absl::StrContains(op, options_.filter);
  }
  void Measure(const std::string& op, const std::string& shape,
               const char* unit, const Work& ours, const Work& ceiling);
  void Move(const std::string& op, const std::string& shape, int64_t read_bytes,
            int64_t write_bytes, const std::function<void()>& run) {
    Measure(op, shape, "GB/s", {run, 1.0 * (read_bytes + write_bytes)},
            Loop(read_bytes, write_bytes));
  }

  Device& device_;
  const Options& options_;
  const DType dtype_;          // of the ops
  const DType product_dtype_;  // of their ceiling
  const int threads_;
  std::unique_ptr<Stream> stream_;
  std::vector<Buffer> memory_;
};

void* Bench::Random(int64_t size, DType dtype) {
  auto buffer = device_.Allocate(size * DTypeBytes(dtype), MemoryKind::kDevice);
  ZERO_CHECK(buffer.ok()) << buffer.status().message();
  FillRandom(buffer->data(), dtype, size);
  memory_.push_back(std::move(*buffer));
  return memory_.back().data();
}

Matrix Bench::RandomMatrix(int64_t rows, int64_t cols, DType dtype) {
  return {Random(rows * cols, dtype), dtype, rows, cols, cols};
}

int32_t* Bench::Ids(int64_t size, int64_t limit) {
  int32_t* const ids = static_cast<int32_t*>(Random(size, DType::kF32));
  uint32_t state = 7;
  for (int64_t i = 0; i < size; ++i) {
    state = state * 1664525u + 1013904223u;
    ids[i] = static_cast<int32_t>((state >> 8) % limit);
  }
  return ids;
}

Work Bench::Plain(ProductShape shape) {
  shape.dtype = product_dtype_;
  if (shape.out_dtype != DType::kF32) shape.out_dtype = product_dtype_;
  const auto product = std::make_shared<PlainProduct>(shape);
  const int64_t item = DTypeBytes(product_dtype_);
  const void* a = Random(product->a_bytes() / item, product_dtype_);
  const void* b = Random(product->b_bytes() / item, product_dtype_);
  void* c = Random(product->c_bytes() / 4, DType::kF32);
  return {[=] { product->Run(a, b, c); }, shape.flops()};
}

Work Bench::Loop(int64_t read_bytes, int64_t write_bytes) {
  const int64_t in_size = read_bytes / 4, out_size = write_bytes / 4;
  const auto* in = static_cast<float*>(Random(in_size, DType::kF32));
  auto* out = static_cast<float*>(Random(out_size, DType::kF32));
  return {[=, this] { CopyLoop(threads_, in, in_size, out, out_size); },
          1.0 * (read_bytes + write_bytes)};
}

void Bench::Measure(const std::string& op, const std::string& shape,
                    const char* unit, const Work& ours, const Work& ceiling) {
  ours.run();
  ceiling.run();
  std::vector<double> our_s, ceiling_s, ratios;
  double spent = 0;
  while (spent < options_.seconds ||
         static_cast<int>(our_s.size()) < options_.rounds) {
    our_s.push_back(SecondsOf(ours.run));
    ceiling_s.push_back(SecondsOf(ceiling.run));
    spent += our_s.back() + ceiling_s.back();
    ratios.push_back(ours.amount / our_s.back() /
                     (ceiling.amount / ceiling_s.back()));
  }
  const nlohmann::ordered_json row = {
      {"op", op},
      {"shape", shape},
      {"dtype", options_.dtype},
      {"ms", Median(our_s) * 1e3},
      {"unit", unit},
      {"rate", ours.amount / Median(our_s) * 1e-9},
      {"ceiling", ceiling.amount / Median(ceiling_s) * 1e-9},
      {"ratio", Median(ratios)},
      {"rounds", our_s.size()}};
  std::cout << row.dump() << std::endl;
  Clear();
}

std::string ProductText(int64_t m, int64_t n, int64_t k) {
  return absl::StrCat(m, " x ", n, " x ", k);
}

void Bench::Linears(const char* model, int64_t m, int64_t c, int64_t f,
                    Gelu act, int64_t qkv) {
  const auto forward = [&](const char* name, int64_t n, int64_t k, Gelu gelu,
                           bool bias, bool residual) {
    const std::string op = absl::StrCat("linear ", name);
    if (!Wanted(op)) return;
    LinearArgs args{.x = RandomMatrix(m, k),
                    .w = RandomMatrix(n, k),
                    .y = RandomMatrix(m, n),
                    .act = gelu};
    if (bias) args.bias = RandomVector(n, dtype_);
    if (residual) args.residual = RandomMatrix(m, n);
    if (gelu != Gelu::kNone) args.pre_act = RandomMatrix(m, n);
    const Workspace scratch = Scratch(ops().LinearWorkspaceBytes(args));
    Measure(op, absl::StrCat(model, " ", ProductText(m, n, k)), "GFLOP/s",
            {[&] { ops().Linear(*stream_, args, scratch); }, 2.0 * m * n * k},
            Plain({.m = m,
                   .n = n,
                   .k = k,
                   .b_transposed = true,
                   .out_dtype = dtype_}));
  };
  const auto backward_input = [&](const char* name, int64_t n, int64_t k,
                                  Gelu gelu) {
    const std::string op = absl::StrCat("linear dx ", name);
    if (!Wanted(op)) return;
    LinearBackwardInputArgs args{.dy = RandomMatrix(m, n),
                                 .w = RandomMatrix(n, k),
                                 .dx = RandomMatrix(m, k),
                                 .act = gelu};
    if (gelu != Gelu::kNone) args.pre_act = RandomMatrix(m, k);
    const Workspace scratch =
        Scratch(ops().LinearBackwardInputWorkspaceBytes(args));
    Measure(op, absl::StrCat(model, " ", ProductText(m, k, n)), "GFLOP/s",
            {[&] { ops().LinearBackwardInput(*stream_, args, scratch); },
             2.0 * m * n * k},
            Plain({.m = m, .n = k, .k = n, .out_dtype = dtype_}));
  };
  const auto backward_weight = [&](const char* name, int64_t n, int64_t k,
                                   bool bias) {
    const std::string op = absl::StrCat("linear dw ", name);
    if (!Wanted(op)) return;
    LinearBackwardWeightArgs args{.dy = RandomMatrix(m, n),
                                  .x = RandomMatrix(m, k),
                                  .dw = RandomMatrix(n, k, DType::kF32)};
    if (bias) args.dbias = RandomVector(n, DType::kF32);
    const Workspace scratch =
        Scratch(ops().LinearBackwardWeightWorkspaceBytes(args));
    Measure(op, absl::StrCat(model, " ", ProductText(n, k, m)), "GFLOP/s",
            {[&] { ops().LinearBackwardWeight(*stream_, args, scratch); },
             2.0 * m * n * k},
            Plain({.m = n, .n = k, .k = m, .a_transposed = true}));
  };
  const bool gpt = act != Gelu::kNone;
  const int64_t fc = gpt ? f : 2 * f;
  forward(gpt ? "qkv + bias" : "qkv", qkv, c, Gelu::kNone, gpt, false);
  forward(gpt ? "fc + bias + gelu" : "fc", fc, c, act, gpt, false);
  forward(gpt ? "proj + bias + residual" : "proj", c, f, Gelu::kNone, gpt, gpt);
  backward_input(gpt ? "proj + gelu" : "proj", c, f, act);
  backward_input("fc", fc, c, Gelu::kNone);
  backward_weight(gpt ? "fc + bias" : "fc", fc, c, gpt);
  backward_weight(gpt ? "proj + bias" : "proj", c, f, gpt);
}

void Bench::Head(const char* model, int64_t m, int64_t c, int64_t v) {
  const std::string op = "linear + cross entropy";
  if (!Wanted(op)) return;
  const float scale = 1.0f / static_cast<float>(m);
  double loss = 0;
  const int64_t padded = RoundUp(v, 128);  // as models store their tables
  LinearCrossEntropyArgs args{.x = RandomMatrix(m, c),
                              .w = RandomMatrix(padded, c),
                              .vocab = v,
                              .targets = Ids(m, v),
                              .loss_sum = &loss,
                              .grad_scale = &scale,
                              .dx = RandomMatrix(m, c),
                              .dw = RandomMatrix(padded, c, DType::kF32)};
  const Workspace scratch =
      Scratch(ops().LinearCrossEntropyWorkspaceBytes(args));
  const Work logits = Plain(
      {.m = m, .n = padded, .k = c, .b_transposed = true, .out_dtype = dtype_});
  const Work dx = Plain({.m = m, .n = c, .k = padded, .out_dtype = dtype_});
  const Work dw = Plain({.m = padded, .n = c, .k = m, .a_transposed = true});
  Measure(op, absl::StrCat(model, " ", ProductText(m, v, c), ", 3 products"),
          "GFLOP/s",
          {[&] { ops().LinearCrossEntropy(*stream_, args, scratch); },
           6.0 * m * v * c},
          {[&] {
             logits.run();
             dx.run();
             dw.run();
           },
           logits.amount + dx.amount + dw.amount});
}

// Causal: half of the T x T products counts, two forward and five backward.
// The ceiling is the rate of a large product.
void Bench::Attention(const char* model, AttentionShape shape) {
  shape.dtype = dtype_;
  shape.kv_len = shape.q_len;
  shape.scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  const int64_t t = shape.q_len, d = shape.head_dim;
  const int64_t q_width = shape.num_heads * d;
  const int64_t width = q_width + 2 * shape.num_kv_heads * d;
  const int64_t tokens = shape.batch * t;
  const double flops = 1.0 * shape.batch * shape.num_heads * t * t * d;
  const std::string text =
      absl::StrCat(model, " B ", shape.batch, " T ", t, " H ", shape.num_heads,
                   " K ", shape.num_kv_heads, " D ", d);
  const ProductShape large{.m = 1024,
                           .n = 1024,
                           .k = 1024,
                           .b_transposed = true,
                           .out_dtype = dtype_};
  const auto at = [&](const Matrix& x, int64_t column) {
    return MutableHeadsRef{
        static_cast<char*>(x.data) + column * DTypeBytes(dtype_), t * x.ld,
        x.ld};
  };
  const auto read = [](const MutableHeadsRef& heads) {
    return HeadsRef{heads.data, heads.batch_stride, heads.token_stride};
  };
  const int64_t k_column = q_width;
  const int64_t v_column = q_width + shape.num_kv_heads * d;
  for (const bool backward : {false, true}) {
    const std::string op = backward ? "attention backward" : "attention";
    if (!Wanted(op)) continue;
    const Matrix qkv = RandomMatrix(tokens, width);
    const Matrix dqkv = RandomMatrix(tokens, width);
    const Matrix out = RandomMatrix(tokens, q_width);
    const Matrix dout = RandomMatrix(tokens, q_width);
    const int64_t rows = shape.batch * shape.num_heads * t;
    float* const lse = static_cast<float*>(Random(rows, DType::kF32));
    const AttentionForwardArgs forward{.shape = shape,
                                       .q = read(at(qkv, 0)),
                                       .k = read(at(qkv, k_column)),
                                       .v = read(at(qkv, v_column)),
                                       .out = at(out, 0),
                                       .lse = lse};
    const Workspace scratch =
        Scratch(ops().AttentionForwardWorkspaceBytes(forward));
    if (!backward) {
      Measure(op, text, "GFLOP/s",
              {[&] { ops().AttentionForward(*stream_, forward, scratch); },
               2 * flops},
              Plain(large));
      continue;
    }
    ops().AttentionForward(*stream_, forward, scratch);
    const AttentionBackwardArgs args{.shape = shape,
                                     .q = forward.q,
                                     .k = forward.k,
                                     .v = forward.v,
                                     .out = read(at(out, 0)),
                                     .dout = read(at(dout, 0)),
                                     .lse = lse,
                                     .dq = at(dqkv, 0),
                                     .dk = at(dqkv, k_column),
                                     .dv = at(dqkv, v_column)};
    const Workspace more = Scratch(ops().AttentionBackwardWorkspaceBytes(args));
    Measure(op, text, "GFLOP/s",
            {[&] { ops().AttentionBackward(*stream_, args, more); }, 5 * flops},
            Plain(large));
  }
}

void Bench::Norms(int64_t m, int64_t c) {
  const int64_t bytes = m * c * DTypeBytes(dtype_);
  const std::string text = absl::StrCat(m, " x ", c);
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    const bool layer = kind == NormKind::kLayerNorm;
    const std::string name = layer ? "layernorm" : "rmsnorm";
    if (Wanted(name + " + residual")) {
      const NormForwardArgs args{
          .kind = kind,
          .x = RandomRows(m, c),
          .residual = RandomRows(m, c),
          .sum = RandomRows(m, c),
          .weight = RandomVector(c, dtype_),
          .bias = RandomVector(layer ? c : 0, dtype_),
          .y = RandomRows(m, c),
          .mean = static_cast<float*>(Random(m, DType::kF32)),
          .rstd = static_cast<float*>(Random(m, DType::kF32))};
      Move(name + " + residual", text, 2 * bytes, 2 * bytes,
           [&] { ops().NormForward(*stream_, args); });
    }
    if (Wanted(name + " backward")) {
      NormBackwardArgs args{.kind = kind,
                            .dy = RandomRows(m, c),
                            .sum = RandomRows(m, c),
                            .weight = RandomVector(c, dtype_),
                            .mean = static_cast<float*>(Random(m, DType::kF32)),
                            .rstd = static_cast<float*>(Random(m, DType::kF32)),
                            .dsum = RandomRows(m, c),
                            .dx = RandomRows(m, c),
                            .dweight = RandomVector(c, DType::kF32)};
      if (layer) args.dbias = RandomVector(c, DType::kF32);
      const Workspace scratch = Scratch(ops().NormBackwardWorkspaceBytes(args));
      Move(name + " backward", text, 3 * bytes, bytes,
           [&] { ops().NormBackward(*stream_, args, scratch); });
    }
  }
}

void Bench::Rotary(int64_t m, int64_t heads, int64_t d) {
  if (!Wanted("rotary")) return;
  const int64_t bytes = m * heads * d * DTypeBytes(dtype_);
  const RotaryArgs args{
      .x = {Random(m * heads * d, dtype_), dtype_, m, heads, d, heads * d},
      .positions = Ids(m, m),
      .cos = static_cast<float*>(Random(m * d / 2, DType::kF32)),
      .sin = static_cast<float*>(Random(m * d / 2, DType::kF32))};
  Move("rotary", absl::StrCat(m, " x ", heads, " x ", d), bytes, bytes,
       [&] { ops().Rotary(*stream_, args); });
}

void Bench::Embedding(int64_t m, int64_t c, int64_t v) {
  const int64_t bytes = m * c * DTypeBytes(dtype_);
  const std::string text = absl::StrCat(m, " of ", v, " x ", c);
  if (Wanted("embedding")) {
    const EmbeddingForwardArgs args{.ids = Ids(m, v),
                                    .table = RandomMatrix(v, c),
                                    .position_ids = Ids(m, 1024),
                                    .position_table = RandomMatrix(1024, c),
                                    .out = RandomMatrix(m, c)};
    Move("embedding", text, 2 * bytes, bytes,
         [&] { ops().EmbeddingForward(*stream_, args); });
  }
  if (Wanted("embedding backward")) {
    const EmbeddingBackwardArgs args{.ids = Ids(m, v),
                                     .dout = RandomMatrix(m, c),
                                     .dtable = RandomMatrix(v, c, DType::kF32),
                                     .accumulate = true};
    Move("embedding backward", text, bytes + m * c * 4, m * c * 4,
         [&] { ops().EmbeddingBackward(*stream_, args, {}); });
  }
}

void Bench::ElementWise(int64_t m, int64_t f) {
  const int64_t n = m * f, bytes = n * DTypeBytes(dtype_);
  const std::string text = absl::StrCat(m, " x ", f);
  const auto vector = [&] { return RandomVector(n, dtype_); };
  for (const auto& [kind, name] : {std::pair{Gelu::kTanh, "gelu tanh"},
                                   std::pair{Gelu::kErf, "gelu erf"}}) {
    if (Wanted(name)) {
      const GeluForwardArgs args{kind, vector(), vector()};
      Move(name, text, bytes, bytes,
           [&] { ops().GeluForward(*stream_, args); });
    }
    if (Wanted(absl::StrCat(name, " backward"))) {
      const GeluBackwardArgs args{kind, vector(), vector(), vector()};
      Move(absl::StrCat(name, " backward"), text, 2 * bytes, bytes,
           [&] { ops().GeluBackward(*stream_, args); });
    }
  }
  if (Wanted("swiglu")) {
    const SwigluForwardArgs args{RandomMatrix(m, 2 * f), RandomMatrix(m, f)};
    Move("swiglu", text, 2 * bytes, bytes,
         [&] { ops().SwigluForward(*stream_, args); });
  }
  if (Wanted("swiglu backward")) {
    const SwigluBackwardArgs args{RandomMatrix(m, 2 * f), RandomMatrix(m, f),
                                  RandomMatrix(m, 2 * f)};
    Move("swiglu backward", text, 3 * bytes, 2 * bytes,
         [&] { ops().SwigluBackward(*stream_, args); });
  }
  if (Wanted("dropout")) {
    std::vector<int64_t> rows(m);
    for (int64_t i = 0; i < m; ++i) rows[i] = i;
    const DropoutArgs args{.x = RandomMatrix(m, f),
                           .y = RandomMatrix(m, f),
                           .probability = 0.1f,
                           .key = 1,
                           .row_ids = rows.data()};
    Move("dropout", text, bytes, bytes, [&] { ops().Dropout(*stream_, args); });
  }
  if (Wanted("add")) {
    const AddArgs args{vector(), vector(), vector()};
    Move("add", text, 2 * bytes, bytes, [&] { ops().Add(*stream_, args); });
  }
  if (Wanted("fill")) {
    const FillArgs args{vector(), 1.0f};
    Move("fill", text, 0, bytes, [&] { ops().Fill(*stream_, args); });
  }
  if (Wanted("cast")) {
    const CastArgs args{RandomVector(n, DType::kF32),
                        RandomVector(n, DType::kBF16)};
    Move("cast fp32 to bf16", text, 4 * n, 2 * n,
         [&] { ops().Cast(*stream_, args); });
  }
}

void Bench::Reductions(int64_t n) {
  const int64_t bytes = n * DTypeBytes(dtype_);
  const std::string text = absl::StrCat(n);
  if (Wanted("sum of squares")) {
    double sum = 0;
    const SquaredSpan span{RandomVector(n, dtype_), &sum};
    Move("sum of squares", text, bytes, 0, [&] {
      ops().SumSquares(*stream_, {{&span, 1}});
    });
  }
  if (Wanted("count non-finite")) {
    int64_t count = 0;
    const CountNonFiniteArgs args{RandomVector(n, dtype_), &count};
    Move("count non-finite", text, bytes, 0,
         [&] { ops().CountNonFinite(*stream_, args); });
  }
}

// bf16: master weights and moments in fp32, gradients in fp32. The ceiling is
// the plain update of four fp32 arrays.
void Bench::Optimizers(int64_t n) {
  const bool mixed = dtype_ != DType::kF32;
  const std::string text = absl::StrCat(n);
  const std::vector<UpdateRange> ranges = {{0, n, 0.1f}};
  const auto floats = [&] {
    float* const data = static_cast<float*>(Random(n, DType::kF32));
    for (int64_t i = 0; i < n; ++i) data[i] = data[i] + 0.5f;  // v >= 0
    return data;
  };
  const auto measure = [&](const char* op, int64_t reads, int64_t writes,
                           const auto& make) {
    if (!Wanted(op)) return;
    UpdateState state{.param = RandomVector(n, dtype_),
                      .master = mixed ? floats() : nullptr,
                      .grad = RandomVector(n, DType::kF32),
                      .ranges = ranges};
    const std::function<void()> run = make(state);
    float* const p = floats();
    float* const g = floats();
    float* const m = floats();
    float* const v = floats();
    const int64_t bytes = (reads + writes) * 4 * n + (mixed ? 2 * n : 0);
    Measure(op, text, "GB/s", {run, 1.0 * bytes},
            {[&] { UpdateLoop(threads_, p, g, m, v, n); }, 28.0 * n});
  };
  measure("adamw", 4, 3, [&](const UpdateState& state) {
    const AdamWArgs args{.state = state,
                         .m = floats(),
                         .v = floats(),
                         .lr = 1e-3f,
                         .bias_correction1 = 0.1f,
                         .bias_correction2 = 0.01f};
    return [this, args] { ops().AdamW(*stream_, args); };
  });
  measure("sgd + momentum", 3, 2, [&](const UpdateState& state) {
    const SgdArgs args{.state = state,
                       .momentum_buffer = floats(),
                       .lr = 1e-3f,
                       .momentum = 0.9f};
    return [this, args] { ops().Sgd(*stream_, args); };
  });
  // Pass 1 reads p, g, m, v and writes m, v; pass 2 reads p, m, v and writes p.
  measure("lamb, both passes", 7, 3, [&](const UpdateState& state) {
    const auto norms = std::make_shared<std::vector<double>>(2, 0.0);
    static constexpr TensorPart kWhole = {0, 0, 1};
    const LambArgs args{.state = state,
                        .m = floats(),
                        .v = floats(),
                        .parts = {&kWhole, 1},
                        .norms = norms->data(),
                        .lr = 1e-3f};
    return [this, norms, args] {
      norms->assign(2, 0.0);
      ops().LambMoments(*stream_, args);
      ops().LambApply(*stream_, args);
    };
  });
}

void RunAll(Bench& bench) {
  bench.Linears("gpt2", 1024, 768, 3072, Gelu::kTanh, 3 * 768);
  bench.Linears("llama", 512, 2048, 8192, Gelu::kNone, 3072);
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
  bench.ElementWise(1024, 3072);
  bench.Reductions(38597376);  // GPT-2's table of tokens
  bench.Optimizers(100'000'000);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times every op beside the machine's own ceiling");
  app.add_option("--dtype", options.dtype, "fp32 or bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--filter", options.filter, "only ops with this in the name");
  app.add_option("--seconds", options.seconds, "per op, at least")
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "per op, at least")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.run.threads,
                 "compute threads (default: all cores)");
  app.add_flag("--cpu-time", options.cpu_time,
               "time by the thread's CPU clock; wants --threads 1");
  CLI11_PARSE(app, argc, argv);
  if (options.cpu_time) Clock() = CLOCK_THREAD_CPUTIME_ID;
  const auto device = OpenDevice(options.run);
  if (!device.ok()) {
    std::cerr << "op_bench: " << device.status().message() << "\n";
    return 1;
  }
  Bench bench(**device, options);
  RunAll(bench);
  return 0;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
