#include "tools/bench/products.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/string_view.h"
#include "dnnl.hpp"
#include "kernels/check.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/onednn.h"
#include "kernels/sizes.h"
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

// A [rows, cols] operand, stored as it is or transposed.
dnnl::memory::desc Desc(int64_t rows, int64_t cols, bool transposed, int64_t ld,
                        DType dtype) {
  return {{rows, cols},
          TypeOf(dtype),
          transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1}};
}

// The best of three runs, after one that is not counted.
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

// `dtype`, if its products are faster than fp32 ones here.
DType Native(DType dtype) {
  return dtype == DType::kBF16 && cpu::HasFastBf16() ? dtype : DType::kF32;
}

}  // namespace

ProductShape ForwardShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {
      m, out, in, false, /*b_transposed=*/true, Native(dtype), Native(dtype)};
}
ProductShape DxShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {m, in, out, false, false, Native(dtype), Native(dtype)};
}
ProductShape DwShape(int64_t m, int64_t out, int64_t in, DType dtype) {
  return {out, in, m, /*a_transposed=*/true, false, Native(dtype), DType::kF32};
}

struct PlainProduct::Impl {
  std::vector<dnnl::matmul> kernels;  // one after the first run
  dnnl::memory a, b, c;
  dnnl::stream stream{Engine()};
};

PlainProduct::PlainProduct(const ProductShape& shape)
    : impl_(std::make_unique<Impl>()) {
  const auto a = Desc(shape.m, shape.k, shape.a_transposed,
                      shape.a_transposed ? shape.m : shape.k, shape.dtype);
  const auto b = Desc(shape.k, shape.n, shape.b_transposed,
                      shape.b_transposed ? shape.k : shape.n, shape.dtype);
  const auto c = Desc(shape.m, shape.n, false, shape.n, shape.out_dtype);
  const dnnl::matmul::desc product(a, b, c);
  const dnnl::primitive_attr plain;
  const dnnl::matmul::primitive_desc first(product, plain, Engine());
  const dnnl::matmul::primitive_desc packing =
      cpu::ChooseMatmul(product, plain, Engine(), /*packing=*/true);
  impl_->kernels.emplace_back(first);
  if (absl::string_view(packing.impl_info_str()) != first.impl_info_str()) {
    impl_->kernels.emplace_back(packing);
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

StepProducts::StepProducts(Device& device, std::vector<ProductShape> sequence)
    : sequence_(std::move(sequence)) {
  int64_t first_bytes = 0, largest = int64_t{1} << 30;
  for (const ProductShape& shape : sequence_) {
    const auto [it, added] = products_.try_emplace(shape, shape);
    const PlainProduct& product = it->second;
    first_bytes = std::max(first_bytes, product.a_bytes());
    largest = std::max({largest, product.b_bytes(), product.c_bytes()});
  }
  for (const auto& [buffer, bytes] :
       {std::pair{&first_, first_bytes}, std::pair{&second_, largest},
        std::pair{&result_, largest}}) {
    auto memory = device.Allocate(bytes, MemoryKind::kDevice);
    ZERO_CHECK(memory.ok()) << memory.status().message();
    *buffer = *std::move(memory);
    const DType dtype = sequence_.front().dtype;
    FillRandom(buffer->data(), dtype, bytes / DTypeBytes(dtype));
  }
}

double StepProducts::Pass() {
  // The next `bytes` of a buffer, which wraps around at its end.
  const auto next = [](const Buffer& buffer, size_t* at, int64_t bytes) {
    if (*at + bytes > buffer.bytes()) *at = 0;
    return static_cast<char*>(buffer.data()) +
           std::exchange(*at, *at + RoundUp(bytes, 64));
  };
  size_t second = 0, result = 0;
  return SecondsOf([&] {
    for (const ProductShape& shape : sequence_) {
      PlainProduct& product = products_.at(shape);
      product.Run(first_.data(), next(second_, &second, product.b_bytes()),
                  next(result_, &result, product.c_bytes()));
    }
  });
}

}  // namespace zero::bench
