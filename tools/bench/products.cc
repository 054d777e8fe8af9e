#include "tools/bench/products.h"

#include <array>
#include <utility>

#include "dnnl.hpp"
#include "engine/base/math.h"
#include "kernels/check.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/onednn.h"
#include "tools/bench/fill.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

dnnl::engine& Engine() {
  static dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::memory::data_type TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return dnnl::memory::data_type::f32;
    case DType::kBF16:
      return dnnl::memory::data_type::bf16;
    default:
      ZERO_CHECK(false) << "plain product of " << dtype;
      return dnnl::memory::data_type::undef;
  }
}

// A [rows, cols] operand, stored so or transposed.
dnnl::memory::desc Desc(int64_t rows, int64_t cols, bool transposed, int64_t ld,
                        DType dtype) {
  return {{rows, cols},
          TypeOf(dtype),
          transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1}};
}

}  // namespace

bool HasNativeProducts(DType dtype) {
  return dtype == DType::kF32 || (dtype == DType::kBF16 && cpu::HasFastBf16());
}

struct PlainProduct::Impl {
  dnnl::matmul matmul;
  dnnl::memory a, b, c;
  dnnl::stream stream{Engine()};
};

PlainProduct::PlainProduct(const ProductShape& shape)
    : shape_(shape), impl_(std::make_unique<Impl>()) {
  const auto a = Desc(shape.m, shape.k, shape.a_transposed,
                      shape.a_transposed ? shape.m : shape.k, shape.dtype);
  const auto b = Desc(shape.k, shape.n, shape.b_transposed,
                      shape.b_transposed ? shape.k : shape.n, shape.dtype);
  const auto c = Desc(shape.m, shape.n, false, shape.n, shape.out_dtype);
  const dnnl::matmul::desc product(a, b, c);
  const dnnl::primitive_attr plain;
  impl_->matmul = dnnl::matmul(
      cpu::ChooseMatmul(product, plain, Engine(), shape.dtype == DType::kF32));
  impl_->a = dnnl::memory(a, Engine(), DNNL_MEMORY_NONE);
  impl_->b = dnnl::memory(b, Engine(), DNNL_MEMORY_NONE);
  impl_->c = dnnl::memory(c, Engine(), DNNL_MEMORY_NONE);
}

PlainProduct::~PlainProduct() = default;
PlainProduct::PlainProduct(PlainProduct&&) noexcept = default;

int64_t PlainProduct::a_bytes() const { return impl_->a.get_desc().get_size(); }
int64_t PlainProduct::b_bytes() const { return impl_->b.get_desc().get_size(); }
int64_t PlainProduct::c_bytes() const { return impl_->c.get_desc().get_size(); }

void PlainProduct::Run(const void* a, const void* b, void* c) {
  impl_->a.set_data_handle(const_cast<void*>(a));
  impl_->b.set_data_handle(const_cast<void*>(b));
  impl_->c.set_data_handle(c);
  impl_->matmul.execute(impl_->stream, {{DNNL_ARG_SRC, impl_->a},
                                        {DNNL_ARG_WEIGHTS, impl_->b},
                                        {DNNL_ARG_DST, impl_->c}});
}

std::vector<ModelProduct> ModelProducts(const ModelConfig& config) {
  const int64_t layers = config.num_hidden_layers;
  const int64_t channels = config.hidden_size;
  const int64_t q = config.num_attention_heads * config.head_dim;
  const int64_t kv = config.num_key_value_heads * config.head_dim;
  const int64_t gates = config.family == ModelFamily::kGpt2 ? 1 : 2;
  return {{"qkv", layers, q + 2 * kv, channels},
          {"out", layers, channels, q},
          {"fc", layers, gates * config.intermediate_size, channels},
          {"proj", layers, channels, config.intermediate_size},
          {"head", 1, config.vocab_size, channels}};
}

// The three products of one weight w[out, in], x[M, in] and y[M, out].
struct StepProducts::Weight {
  Weight(const ModelProduct& product, int64_t tokens, DType dtype)
      : count(product.count),
        forward({.m = tokens,
                 .n = product.out,
                 .k = product.in,
                 .b_transposed = true,
                 .dtype = dtype,
                 .out_dtype = dtype}),
        dx({.m = tokens,
            .n = product.in,
            .k = product.out,
            .dtype = dtype,
            .out_dtype = dtype}),
        dw({.m = product.out,
            .n = product.in,
            .k = tokens,
            .a_transposed = true,
            .dtype = dtype}) {}

  int64_t count;
  PlainProduct forward, dx, dw;
  char* x = nullptr;   // [M, in]
  char* w = nullptr;   // [out, in]
  char* y = nullptr;   // [M, out], also dy
  char* x2 = nullptr;  // dx
  char* w2 = nullptr;  // dw, fp32
};

StepProducts::StepProducts(Device& device, const ModelConfig& config,
                           int64_t tokens, DType dtype)
    : dtype_(HasNativeProducts(dtype) ? dtype : DType::kF32) {
  int64_t bytes = 0;
  const auto take = [&bytes](int64_t size) {
    return std::exchange(bytes, bytes + RoundUp(size, 4096));
  };
  std::vector<std::array<int64_t, 5>> offsets;
  for (const ModelProduct& product : ModelProducts(config)) {
    // Whole cache lines per row, as an engine would store logits.
    ModelProduct padded = product;
    padded.out = RoundUp(product.out, 64);
    const auto weight = std::make_shared<Weight>(padded, tokens, dtype_);
    offsets.push_back({take(weight->forward.a_bytes()),
                       take(weight->forward.b_bytes()),
                       take(weight->forward.c_bytes()),
                       take(weight->dx.c_bytes()), take(weight->dw.c_bytes())});
    weights_.push_back(weight);
    for (const auto& [suffix, plain] :
         {std::pair{" forward", &weight->forward},
          std::pair{" dx", &weight->dx}, std::pair{" dw", &weight->dw}}) {
      timed_.push_back(
          {product.name + suffix, product.count, plain->shape().flops(), {}});
    }
  }
  auto memory = device.Allocate(bytes, MemoryKind::kDevice);
  ZERO_CHECK(memory.ok()) << memory.status().message();
  memory_ = std::move(*memory);
  char* const base = static_cast<char*>(memory_.data());
  FillRandom(base, dtype_, bytes / DTypeBytes(dtype_));
  for (size_t i = 0; i < weights_.size(); ++i) {
    weights_[i]->x = base + offsets[i][0];
    weights_[i]->w = base + offsets[i][1];
    weights_[i]->y = base + offsets[i][2];
    weights_[i]->x2 = base + offsets[i][3];
    weights_[i]->w2 = base + offsets[i][4];
  }
}

double StepProducts::Pass() {
  std::vector<double> seconds(timed_.size(), 0);
  const double start = Now();
  const auto forward = [&](size_t i) {
    Weight& w = *weights_[i];
    seconds[3 * i] += SecondsOf([&] { w.forward.Run(w.x, w.w, w.y); });
  };
  const auto backward = [&](size_t i) {
    Weight& w = *weights_[i];
    seconds[3 * i + 1] += SecondsOf([&] { w.dx.Run(w.y, w.w, w.x2); });
    seconds[3 * i + 2] += SecondsOf([&] { w.dw.Run(w.y, w.x, w.w2); });
  };
  const size_t head = weights_.size() - 1;
  for (int64_t layer = 0; layer < weights_[0]->count; ++layer) {
    for (size_t i = 0; i < head; ++i) forward(i);
  }
  forward(head);
  backward(head);
  for (int64_t layer = 0; layer < weights_[0]->count; ++layer) {
    for (size_t i = head; i-- > 0;) backward(i);
  }
  const double total = Now() - start;
  if (warm_) {
    for (size_t i = 0; i < timed_.size(); ++i) {
      timed_[i].seconds.push_back(seconds[i]);
    }
  }
  warm_ = true;
  return total;
}

}  // namespace zero::bench
