#include "tools/bench/products.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/string_view.h"
#include "dnnl.hpp"
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

// By the best of three runs, behind one that is not counted.
template <class Run>
dnnl::matmul Fastest(const std::vector<dnnl::matmul>& kernels, const Run& run) {
  dnnl::matmul fastest;
  double least = std::numeric_limits<double>::infinity();
  for (const dnnl::matmul& kernel : kernels) {
    run(kernel);
    for (int i = 0; i < 3; ++i) {
      const double seconds = SecondsOf([&] { run(kernel); });
      if (seconds >= least) continue;
      least = seconds;
      fastest = kernel;
    }
  }
  return fastest;
}

}  // namespace

ProductShape ForwardShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {m, out, in, false, /*b_transposed=*/true, dtype, dtype};
}
ProductShape DxShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {m, in, out, false, false, dtype, dtype};
}
ProductShape DwShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {out, in, m, /*a_transposed=*/true, false, dtype, DType::kF32};
}

bool HasNativeProducts(DType dtype) {
  return dtype == DType::kF32 || (dtype == DType::kBF16 && cpu::HasFastBf16());
}

struct PlainProduct::Impl {
  std::vector<dnnl::matmul> kernels;  // one after the first run
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
  const dnnl::matmul::primitive_desc first(product, plain, Engine());
  const dnnl::matmul::primitive_desc ours =
      cpu::ChooseMatmul(product, plain, Engine(), shape.dtype == DType::kF32);
  impl_->kernels.emplace_back(first);
  if (absl::string_view(ours.impl_info_str()) != first.impl_info_str()) {
    impl_->kernels.emplace_back(ours);
  }
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
  const auto run = [this](const dnnl::matmul& kernel) {
    kernel.execute(impl_->stream, {{DNNL_ARG_SRC, impl_->a},
                                   {DNNL_ARG_WEIGHTS, impl_->b},
                                   {DNNL_ARG_DST, impl_->c}});
  };
  if (impl_->kernels.size() > 1) {
    impl_->kernels = {Fastest(impl_->kernels, run)};
  }
  run(impl_->kernels[0]);
}

std::vector<ModelProduct> ModelProducts(const ModelConfig& config,
                                        int64_t vocab_rows) {
  const int64_t layers = config.num_hidden_layers;
  const int64_t channels = config.hidden_size;
  const int64_t q = config.num_attention_heads * config.head_dim;
  const int64_t kv = config.num_key_value_heads * config.head_dim;
  const int64_t gates = config.family == ModelFamily::kGpt2 ? 1 : 2;
  return {{"qkv", layers, q + 2 * kv, channels},
          {"out", layers, channels, q},
          {"fc", layers, gates * config.intermediate_size, channels},
          {"proj", layers, channels, config.intermediate_size},
          {"head", 1, vocab_rows, channels}};
}

// The three products of one weight w[out, in], x[M, in] and y[M, out].
struct StepProducts::Weight {
  Weight(const ModelProduct& product, int64_t tokens, DType dtype)
      : count(product.count),
        forward(ForwardShape(tokens, product.out, product.in, dtype)),
        dx(DxShape(tokens, product.out, product.in, dtype)),
        dw(DwShape(tokens, product.out, product.in, dtype)) {}

  int64_t count;
  PlainProduct forward, dx, dw;
  void* x = nullptr;   // [M, in]
  void* y = nullptr;   // [M, out], also dy
  void* x2 = nullptr;  // dx
  // Of layer l those at l modulo their number.
  std::vector<void*> w;   // [out, in]
  std::vector<void*> w2;  // dw, fp32
};

StepProducts::StepProducts(Device& device, const ModelConfig& config,
                           int64_t vocab_rows, int64_t tokens, DType dtype)
    : dtype_(HasNativeProducts(dtype) ? dtype : DType::kF32) {
  const auto take = [&](int64_t bytes) {
    auto memory = device.Allocate(bytes, MemoryKind::kDevice);
    ZERO_CHECK(memory.ok()) << memory.status().message();
    memory_.push_back(*std::move(memory));
    void* const data = memory_.back().data();
    FillRandom(data, dtype_, bytes / DTypeBytes(dtype_));
    return data;
  };
  int64_t layer_bytes = 0;
  for (const ModelProduct& product : ModelProducts(config, vocab_rows)) {
    const auto weight = std::make_shared<Weight>(product, tokens, dtype_);
    if (product.name != "head") {
      layer_bytes += weight->forward.b_bytes() + weight->dw.c_bytes();
    }
    weights_.push_back(weight);
    for (const auto& [suffix, plain] :
         {std::pair{" forward", &weight->forward},
          std::pair{" dx", &weight->dx}, std::pair{" dw", &weight->dw}}) {
      timed_.push_back(
          {product.name + suffix, product.count, plain->shape().flops(), {}});
    }
  }
  constexpr int64_t kLayersBytes = int64_t{2} << 30;
  for (const auto& weight : weights_) {
    weight->x = take(weight->forward.a_bytes());
    weight->y = take(weight->forward.c_bytes());
    weight->x2 = take(weight->dx.c_bytes());
    const int64_t turns =
        std::clamp<int64_t>(kLayersBytes / layer_bytes, 1, weight->count);
    for (int64_t i = 0; i < turns; ++i) {
      weight->w.push_back(take(weight->forward.b_bytes()));
      weight->w2.push_back(take(weight->dw.c_bytes()));
    }
  }
}

double StepProducts::Pass() {
  std::vector<double> seconds(timed_.size(), 0);
  const double start = Now();
  const auto forward = [&](size_t i, int64_t layer) {
    Weight& w = *weights_[i];
    const void* const values = w.w[layer % w.w.size()];
    seconds[3 * i] += SecondsOf([&] { w.forward.Run(w.x, values, w.y); });
  };
  const auto backward = [&](size_t i, int64_t layer) {
    Weight& w = *weights_[i];
    const size_t turn = layer % w.w.size();
    seconds[3 * i + 1] += SecondsOf([&] { w.dx.Run(w.y, w.w[turn], w.x2); });
    seconds[3 * i + 2] += SecondsOf([&] { w.dw.Run(w.y, w.x, w.w2[turn]); });
  };
  const size_t head = weights_.size() - 1;
  const int64_t layers = weights_[0]->count;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (size_t i = 0; i < head; ++i) forward(i, layer);
  }
  forward(head, 0);
  backward(head, 0);
  for (int64_t layer = layers; layer-- > 0;) {
    for (size_t i = head; i-- > 0;) backward(i, layer);
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
