#include "kernels/cpu/matmul.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "dnnl.hpp"
#include "kernels/check.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/parallel.h"
#include "kernels/sizes.h"

namespace zero::cpu {
namespace {

// Of a part of the workspace.
size_t PartBytes(size_t bytes) { return RoundUp(bytes, 64); }

struct Shape {
  int64_t m, n, k;
};

Shape ShapeOf(const Product& p) {
  Shape s;
  s.m = p.a_transposed ? p.a.cols : p.a.rows;
  s.k = p.a_transposed ? p.a.rows : p.a.cols;
  s.n = p.b_transposed ? p.b.rows : p.b.cols;
  const int64_t b_k = p.b_transposed ? p.b.cols : p.b.rows;
  ZERO_CHECK_EQ(s.k, b_k);
  ZERO_CHECK_EQ(p.c.rows, s.m);
  ZERO_CHECK_EQ(p.c.cols, s.n);
  return s;
}

dnnl::memory::data_type DnnlType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return dnnl::memory::data_type::f32;
    case DType::kBF16:
      return dnnl::memory::data_type::bf16;
    case DType::kF16:
      return dnnl::memory::data_type::f16;
    default:
      ZERO_CHECK(false) << "matmul: dtype " << dtype;
      return dnnl::memory::data_type::undef;
  }
}

dnnl::memory::desc Desc(int64_t rows, int64_t cols, DType dtype, int64_t ld,
                        bool transposed) {
  return dnnl::memory::desc(
      {rows, cols}, DnnlType(dtype),
      transposed ? dnnl::memory::dims{1, ld} : dnnl::memory::dims{ld, 1});
}

// What a primitive is made for.
using Key = std::array<int64_t, 9>;

Key KeyOf(const Product& p, const Shape& s) {
  const int64_t flags = int64_t{p.a_transposed} | int64_t{p.b_transposed} << 1 |
                        int64_t{p.accumulate} << 2 |
                        int64_t{p.bias.data != nullptr} << 3 |
                        int64_t{p.residual.data != nullptr} << 4;
  const int64_t dtypes = static_cast<int64_t>(p.a.dtype) |
                         static_cast<int64_t>(p.b.dtype) << 8 |
                         static_cast<int64_t>(p.c.dtype) << 16 |
                         static_cast<int64_t>(p.bias.dtype) << 24;
  return {s.m,    s.n,    s.k,
          p.a.ld, p.b.ld, p.c.ld,
          flags,  dtypes, p.residual.data != nullptr ? p.residual.ld : 0};
}

// A primitive and its operands' descriptions; the addresses are set per call.
struct Primitive {
  dnnl::matmul matmul;  // empty where oneDNN has only its slow reference
  dnnl::memory a, b, c, bias, residual, scratchpad;
  size_t scratch_bytes = 0;
  bool add_residual_after = false;
};

// One converted product: tiles of c, panels of a and b.
struct Tiling {
  int64_t m, n, k;            // of one tile
  bool convert_a, convert_b;  // else the operand is read in place
  bool convert_c;             // else tiles are written in place
  int64_t a_ld, b_ld, c_ld;   // elements
  size_t a_bytes, b_bytes, c_bytes;
};

// The size of equal pieces of `total`, each at most `limit`, in multiples
// of 64 (`limit` is one, or at least `total`).
int64_t Piece(int64_t total, int64_t limit) {
  if (total <= limit) return total;
  limit = std::max<int64_t>(64, limit / 64 * 64);
  return RoundUp(CeilDiv(total, CeilDiv(total, limit)), 64);
}

// Rows a power of two apart fall into the same cache sets.
int64_t PanelLd(int64_t cols) {
  const int64_t ld = RoundUp(cols, 16);
  return ld % 512 == 0 ? ld + 16 : ld;
}

Tiling TilingOf(const Product& p, const Shape& s) {
  constexpr double kBudget = MatmulCache::kConvertBytes / sizeof(float) * 0.9;
  constexpr int64_t kMaxK = 2048;
  Tiling t;
  t.convert_a = p.a.dtype != DType::kF32;
  t.convert_b = p.b.dtype != DType::kF32;
  t.convert_c = p.c.dtype != DType::kF32;
  t.k = Piece(s.k, kMaxK);
  // Square tiles: the panels' k (m + n) and the sums' m n fill the budget.
  const double k = static_cast<double>(t.k);
  const double side = std::sqrt(k * k + kBudget) - k;
  t.m = Piece(s.m, static_cast<int64_t>(side));
  const double m = static_cast<double>(t.m);
  t.n = Piece(s.n, static_cast<int64_t>((kBudget - m * k) / (k + m)));
  if (t.n == s.n) {  // a narrow c leaves room for more rows
    const double n = static_cast<double>(t.n);
    t.m = Piece(s.m, static_cast<int64_t>((kBudget - n * k) / (k + n)));
  }
  t.a_ld = PanelLd(p.a_transposed ? t.m : t.k);
  t.b_ld = PanelLd(p.b_transposed ? t.k : t.n);
  t.c_ld = PanelLd(t.n);
  const auto bytes = [](bool used, int64_t rows, int64_t ld) {
    return used ? PartBytes(static_cast<size_t>(rows * ld) * sizeof(float)) : 0;
  };
  t.a_bytes = bytes(t.convert_a, p.a_transposed ? t.k : t.m, t.a_ld);
  t.b_bytes = bytes(t.convert_b, p.b_transposed ? t.n : t.k, t.b_ld);
  t.c_bytes = bytes(t.convert_c, t.m, t.c_ld);
  return t;
}

template <class Data>
Data* At(const MatrixView<Data>& x, int64_t row, int64_t col) {
  return ElementAt(x.Row(row), x.dtype, col);
}

}  // namespace

bool HasFastBf16() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  if (!__builtin_cpu_is("intel")) return true;
  const auto isa = static_cast<int>(dnnl::get_effective_cpu_isa());
  const auto amx = static_cast<int>(dnnl::cpu_isa::avx512_core_amx);
  return (isa & amx) == amx;
#else
  return false;
#endif
}

struct MatmulCache::Impl {
  int num_threads;
  bool bf16_native = false;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  absl::flat_hash_map<Key, std::unique_ptr<Primitive>> primitives;

  bool Native(DType dtype) const {
    return dtype == DType::kF32 || (dtype == DType::kBF16 && bf16_native);
  }
  bool Native(const Product& p) {
    return p.a.dtype == p.b.dtype && Native(p.a.dtype) && Find(p).matmul;
  }

  dnnl::matmul::primitive_desc Describe(const Product& p, const Shape& s);
  std::optional<dnnl::matmul::primitive_desc> TryDescribe(const Product& p,
                                                          const Shape& s);
  bool HasBf16();
  Primitive& Find(const Product& p);
  void RunNative(const Product& p, Workspace workspace);
  void AddResidual(const Product& p);
  void RunConverted(const Product& p, Workspace workspace);
  void ToPanel(const ConstMatrix& from, float* panel, int64_t ld);
  void RoundTile(const Product& p, const float* sums, int64_t ld, int64_t row,
                 int64_t rows, int64_t col, int64_t cols);
  // The fp32 product of one tile; data may be null (sizes only).
  Product TileProduct(const Product& p, const Tiling& t, int64_t m, int64_t n,
                      int64_t k, bool accumulate);
  size_t ConvertedBytes(const Product& p);
};

dnnl::matmul::primitive_desc MatmulCache::Impl::Describe(const Product& p,
                                                         const Shape& s) {
  const auto a = Desc(s.m, s.k, p.a.dtype, p.a.ld, p.a_transposed);
  const auto b = Desc(s.k, s.n, p.b.dtype, p.b.ld, p.b_transposed);
  const auto c = Desc(s.m, s.n, p.c.dtype, p.c.ld, false);
  dnnl::post_ops post_ops;
  if (p.accumulate) post_ops.append_sum(1.0f);
  if (p.residual.data != nullptr) {
    post_ops.append_binary(
        dnnl::algorithm::binary_add,
        Desc(s.m, s.n, p.residual.dtype, p.residual.ld, false));
  }
  dnnl::primitive_attr attr;
  attr.set_post_ops(post_ops);
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const auto bias = Desc(1, s.n, p.bias.dtype, s.n, false);
  const auto desc = p.bias.data == nullptr ? dnnl::matmul::desc(a, b, c)
                                           : dnnl::matmul::desc(a, b, bias, c);
  return ChooseMatmul(desc, attr, engine, p.a.dtype == DType::kF32);
}

// Whether the CPU multiplies bf16 itself and oneDNN has a primitive that does.
// (oneDNN emulates bf16 on older AVX-512 CPUs, slower than converting.)
bool MatmulCache::Impl::HasBf16() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
  Product p;
  p.a = {nullptr, DType::kBF16, 256, 256, 256};
  p.b = {nullptr, DType::kBF16, 256, 256, 256};
  p.b_transposed = true;
  p.c = {nullptr, DType::kBF16, 256, 256, 256};
  return TryDescribe(p, ShapeOf(p)).has_value();
}

// Nothing where oneDNN has no primitive, or only its reference.
std::optional<dnnl::matmul::primitive_desc> MatmulCache::Impl::TryDescribe(
    const Product& p, const Shape& s) {
  try {
    auto desc = Describe(p, s);
    if (!IsKind(desc, "ref")) return desc;
  } catch (const dnnl::error&) {
  }
  return std::nullopt;
}

Primitive& MatmulCache::Impl::Find(const Product& p) {
  const Shape s = ShapeOf(p);
  std::unique_ptr<Primitive>& slot = primitives[KeyOf(p, s)];
  if (slot != nullptr) return *slot;
  // Primitives keep the number of threads of the moment they are made.
  omp_set_num_threads(num_threads);
  slot = std::make_unique<Primitive>();
  Primitive& made = *slot;
  auto desc = TryDescribe(p, s);
  if (!desc.has_value() && p.residual.data != nullptr) {
    // A residual of one row or column looks like a broadcast to oneDNN 2.6.
    Product plain = p;
    plain.residual = {};
    desc = TryDescribe(plain, s);
    made.add_residual_after = true;
  }
  if (!desc.has_value()) {
    ZERO_CHECK(p.a.dtype != DType::kF32)
        << "oneDNN has no fp32 product " << s.m << " x " << s.n << " x " << s.k;
    return made;
  }
  const auto operand = [&](const dnnl::memory::desc& d) {
    return dnnl::memory(d, engine, DNNL_MEMORY_NONE);
  };
  made.matmul = dnnl::matmul(*desc);
  made.a = operand(desc->src_desc());
  made.b = operand(desc->weights_desc());
  made.c = operand(desc->dst_desc());
  if (p.bias.data != nullptr) made.bias = operand(desc->bias_desc());
  if (p.residual.data != nullptr) {
    made.residual =
        operand(Desc(s.m, s.n, p.residual.dtype, p.residual.ld, false));
  }
  made.scratchpad = operand(desc->scratchpad_desc());
  made.scratch_bytes = desc->scratchpad_desc().get_size();
  return made;
}

void MatmulCache::Impl::RunNative(const Product& p, Workspace workspace) {
  Primitive& primitive = Find(p);
  ZERO_CHECK_GE(workspace.bytes, primitive.scratch_bytes);
  std::array<dnnl_exec_arg_t, 6> args;
  int num_args = 0;
  const auto add = [&](int arg, dnnl::memory& memory, const void* data) {
    dnnl_memory_set_data_handle(memory.get(), const_cast<void*>(data));
    args[static_cast<size_t>(num_args++)] = {arg, memory.get()};
  };
  add(DNNL_ARG_SRC, primitive.a, p.a.data);
  add(DNNL_ARG_WEIGHTS, primitive.b, p.b.data);
  add(DNNL_ARG_DST, primitive.c, p.c.data);
  if (p.bias.data != nullptr) {
    add(DNNL_ARG_BIAS, primitive.bias, p.bias.data);
  }
  if (p.residual.data != nullptr && !primitive.add_residual_after) {
    add(DNNL_ARG_ATTR_MULTIPLE_POST_OP(p.accumulate ? 1 : 0) | DNNL_ARG_SRC_1,
        primitive.residual, p.residual.data);
  }
  if (primitive.scratch_bytes > 0) {
    add(DNNL_ARG_SCRATCHPAD, primitive.scratchpad, workspace.data);
  }
  const dnnl_status_t status = dnnl_primitive_execute(
      primitive.matmul.get(), stream.get(), num_args, args.data());
  ZERO_CHECK_EQ(status, dnnl_success);
  if (primitive.add_residual_after) AddResidual(p);
}

void MatmulCache::Impl::AddResidual(const Product& p) {
  ParallelRanges(num_threads, p.c.rows, RowGrain(p.c.cols),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     AddToRow(p.c.dtype, p.residual.Row(i), p.c.Row(i),
                              p.c.cols);
                   }
                 });
}

Product MatmulCache::Impl::TileProduct(const Product& p, const Tiling& t,
                                       int64_t m, int64_t n, int64_t k,
                                       bool accumulate) {
  Product tile;
  tile.a_transposed = p.a_transposed;
  tile.b_transposed = p.b_transposed;
  tile.a = {nullptr, DType::kF32, p.a_transposed ? k : m,
            p.a_transposed ? m : k, t.convert_a ? t.a_ld : p.a.ld};
  tile.b = {nullptr, DType::kF32, p.b_transposed ? n : k,
            p.b_transposed ? k : n, t.convert_b ? t.b_ld : p.b.ld};
  tile.c = {nullptr, DType::kF32, m, n, t.convert_c ? t.c_ld : p.c.ld};
  tile.accumulate = accumulate;
  return tile;
}

// Every tile is full, or cut at the end of m, n or k.
size_t MatmulCache::Impl::ConvertedBytes(const Product& p) {
  const Shape s = ShapeOf(p);
  const Tiling t = TilingOf(p, s);
  size_t scratch = 0;
  const auto sizes = [](int64_t total, int64_t piece) {
    const int64_t rest = total % piece;
    return std::array<int64_t, 2>{std::min(total, piece),
                                  rest == 0 ? std::min(total, piece) : rest};
  };
  for (int64_t m : sizes(s.m, t.m)) {
    for (int64_t n : sizes(s.n, t.n)) {
      for (int64_t k : sizes(s.k, t.k)) {
        for (bool accumulate : {false, true}) {
          if (accumulate && s.k == t.k && !p.accumulate) continue;
          Product tile = TileProduct(p, t, m, n, k, accumulate);
          scratch = std::max(scratch, Find(tile).scratch_bytes);
        }
      }
    }
  }
  return t.a_bytes + t.b_bytes + t.c_bytes + PartBytes(scratch);
}

void MatmulCache::Impl::ToPanel(const ConstMatrix& from, float* panel,
                                int64_t ld) {
  ParallelRanges(num_threads, from.rows, RowGrain(from.cols),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     RowToF32(from.dtype, from.Row(i), panel + i * ld,
                              from.cols);
                   }
                 });
}

void MatmulCache::Impl::RoundTile(const Product& p, const float* sums,
                                  int64_t ld, int64_t row, int64_t rows,
                                  int64_t col, int64_t cols) {
  RoundRowArgs base;
  base.dtype = p.c.dtype;
  base.accumulate = p.accumulate;
  base.n = cols;
  if (p.bias.data != nullptr) {
    base.bias = ElementAt(p.bias.data, p.bias.dtype, col);
  }
  ParallelRanges(num_threads, rows, RowGrain(cols),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     RoundRowArgs args = base;
                     args.sum = sums + i * ld;
                     args.dst = At(p.c, row + i, col);
                     if (p.residual.data != nullptr) {
                       args.residual = At(p.residual, row + i, col);
                     }
                     RoundRow(args);
                   }
                 });
}

void MatmulCache::Impl::RunConverted(const Product& p, Workspace workspace) {
  const Shape s = ShapeOf(p);
  const Tiling t = TilingOf(p, s);
  char* const base = static_cast<char*>(workspace.data);
  float* const a_panel = reinterpret_cast<float*>(base);
  float* const b_panel = reinterpret_cast<float*>(base + t.a_bytes);
  float* const c_tile = reinterpret_cast<float*>(base + t.a_bytes + t.b_bytes);
  const size_t used = t.a_bytes + t.b_bytes + t.c_bytes;
  const Workspace scratch{base + used, workspace.bytes - used};

  for (int64_t m = 0; m < s.m; m += t.m) {
    const int64_t ms = std::min(t.m, s.m - m);
    for (int64_t n = 0; n < s.n; n += t.n) {
      const int64_t ns = std::min(t.n, s.n - n);
      for (int64_t k = 0; k < s.k; k += t.k) {
        const int64_t ks = std::min(t.k, s.k - k);
        const bool accumulate = k > 0 || (p.accumulate && !t.convert_c);
        Product tile = TileProduct(p, t, ms, ns, ks, accumulate);
        const ConstMatrix a{p.a_transposed ? At(p.a, k, m) : At(p.a, m, k),
                            p.a.dtype, tile.a.rows, tile.a.cols, p.a.ld};
        const ConstMatrix b{p.b_transposed ? At(p.b, n, k) : At(p.b, k, n),
                            p.b.dtype, tile.b.rows, tile.b.cols, p.b.ld};
        // The panel of a serves all n when it has all of k.
        if (t.convert_a && (n == 0 || t.k < s.k)) ToPanel(a, a_panel, t.a_ld);
        if (t.convert_b) ToPanel(b, b_panel, t.b_ld);
        tile.a.data = t.convert_a ? a_panel : a.data;
        tile.b.data = t.convert_b ? b_panel : b.data;
        tile.c.data = t.convert_c ? c_tile : At(p.c, m, n);
        RunNative(tile, scratch);
      }
      if (t.convert_c) RoundTile(p, c_tile, t.c_ld, m, ms, n, ns);
    }
  }
}

MatmulCache::MatmulCache(int num_threads, LowPrecision low_precision)
    : impl_(std::make_unique<Impl>()) {
  impl_->num_threads = num_threads;
  impl_->bf16_native =
      low_precision != LowPrecision::kConvert && impl_->HasBf16() &&
      (low_precision == LowPrecision::kNative || HasFastBf16());
}

MatmulCache::~MatmulCache() = default;

bool MatmulCache::IsNative(DType dtype) const { return impl_->Native(dtype); }

size_t MatmulCache::WorkspaceBytes(const Product& p) {
  const Shape s = ShapeOf(p);
  if (s.m == 0 || s.n == 0) return 0;
  if (impl_->Native(p)) return PartBytes(impl_->Find(p).scratch_bytes);
  return impl_->ConvertedBytes(p);
}

void MatmulCache::Run(const Product& p, Workspace workspace) {
  const Shape s = ShapeOf(p);
  if (s.m == 0 || s.n == 0) return;
  // The number of threads is part of the numerics; the caller's thread may
  // serve several devices.
  if (omp_get_max_threads() != impl_->num_threads) {
    omp_set_num_threads(impl_->num_threads);
  }
  if (impl_->Native(p)) {
    impl_->RunNative(p, workspace);
  } else {
    impl_->RunConverted(p, workspace);
  }
}

}  // namespace zero::cpu
