#include "kernels/cpu/matmul.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "dnnl.hpp"
#include "kernels/check.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/onednn.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/parallel.h"
#include "kernels/sizes.h"

namespace zero::cpu {
namespace {

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

// The key of a primitive.
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

// A primitive and the descriptions of its operands.
struct Primitive {
  dnnl::matmul matmul;  // empty where oneDNN has only its slow reference
  dnnl::memory::desc a, b, c, bias, residual, scratchpad;
  bool add_residual_after = false;
};

// How a product is cut. One thread computes a tile of c.
struct Tiling {
  bool native;
  int64_t m, n;  // of one tile
  int64_t row_tiles, col_tiles;
  size_t bytes;  // of the workspace, for each thread
};

// Most rows of an fp32 c that go to oneDNN: packing b for them takes longer
// than multiplying.
constexpr int64_t kFewRows = 16;

constexpr int64_t kNoLimit = int64_t{1} << 62;

struct TileLimits {
  int64_t rows, cols, elems;
};

// Chooses the tiles of c[m, n]: minimizes the slowest thread's elements plus
// the cost of packing the two operands, in elements (a twelfth of a tile of 128
// x 1024).
void CutResult(int64_t m, int64_t n, int num_threads, const TileLimits& max,
               Tiling* t) {
  constexpr int64_t kCols = 48, kRows = 8;  // of the kernels with AVX-512
  constexpr int64_t kPacking = 10;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t cols = kCols; cols <= max.cols; cols += kCols) {
    const int64_t tile_n = std::min(n, cols);
    const int64_t limit = std::min(max.rows, max.elems / tile_n);
    const int64_t fewest = CeilDiv(m, limit / kRows * kRows);
    for (int64_t pieces = fewest; pieces <= fewest + num_threads; ++pieces) {
      const int64_t tile_m = std::min(m, RoundUp(CeilDiv(m, pieces), kRows));
      const int64_t row_tiles = CeilDiv(m, tile_m);
      const int64_t col_tiles = CeilDiv(n, tile_n);
      const int64_t rounds = CeilDiv(row_tiles * col_tiles, num_threads);
      const int64_t cost =
          rounds * (tile_m * tile_n + kPacking * (tile_m + tile_n));
      if (cost >= least) continue;
      least = cost;
      t->m = tile_m;
      t->n = tile_n;
      t->row_tiles = row_tiles;
      t->col_tiles = col_tiles;
    }
    if (tile_n == n) break;
  }
}

TileLimits LimitsOf(const Product& p, bool native) {
  // oneDNN packs 384 k of 384 rows and of these columns, in less than 4
  // MiB per thread that it allocates itself; with 1 / rows + 1 / cols above
  // 0.00196 oneDNN 2.6 does not pack, which costs the gradient of a weight up
  // to a fifth of its speed. It keeps fp32 sums of a 16-bit c, and a little
  // more.
  constexpr int64_t kCols = 2064;
  constexpr int64_t kSums = MatmulCache::kThreadBytes / 4 - 1024;
  // For panels, columns whose packed k mostly stays in an L2 cache. On a Xeon
  // with AVX-512, 1920 columns made x w^T 7 % slower, 384 a tall dw 6 % slower.
  // With sums besides, tiles about as large as that cache.
  constexpr int64_t kPanelCols = 768, kSide = 1152, kElems = int64_t{1} << 18;
  const bool f32 = p.c.dtype == DType::kF32;
  if (native) return {kNoLimit, kCols, f32 ? kNoLimit : kSums};
  return f32 ? TileLimits{kNoLimit, kPanelCols, kNoLimit}
             : TileLimits{kSide, kSide, kElems};
}

template <class Data>
Data* At(const MatrixView<Data>& x, int64_t row, int64_t col) {
  return ElementAt(x.Row(row), x.dtype, col);
}

// Rows [row, row + rows) and columns [col, col + cols) of c.
Product TileOf(const Product& p, int64_t row, int64_t rows, int64_t col,
               int64_t cols) {
  Product tile = p;
  tile.a.data = p.a_transposed ? At(p.a, 0, row) : At(p.a, row, 0);
  (p.a_transposed ? tile.a.cols : tile.a.rows) = rows;
  tile.b.data = p.b_transposed ? At(p.b, col, 0) : At(p.b, 0, col);
  (p.b_transposed ? tile.b.rows : tile.b.cols) = cols;
  tile.c = {At(p.c, row, col), p.c.dtype, rows, cols, p.c.ld};
  if (p.bias.data != nullptr) {
    tile.bias = {ElementAt(p.bias.data, p.bias.dtype, col), p.bias.dtype, cols};
  }
  if (p.residual.data != nullptr) {
    tile.residual = {At(p.residual, row, col), p.residual.dtype, rows, cols,
                     p.residual.ld};
  }
  return tile;
}

// The sizes that occur if `total` is cut into pieces of `piece` and a rest.
std::array<int64_t, 2> Sizes(int64_t total, int64_t piece) {
  const int64_t rest = total % piece;
  return {piece, rest == 0 ? piece : rest};
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
  absl::flat_hash_map<Key, Tiling> tilings;
  // Primitives by the tile's product. Nothing is added while a product runs.
  absl::flat_hash_map<Key, std::unique_ptr<Primitive>> primitives;

  bool Native(DType dtype) const {
    return dtype == DType::kF32 || (dtype == DType::kBF16 && bf16_native);
  }
  bool HasBf16();
  const Tiling& Prepare(const Product& p, const Shape& s);
  bool PrepareNative(const Product& p, const Shape& s, Tiling* t);
  const Primitive& Make(const Product& p);
  dnnl::matmul::primitive_desc Describe(const Product& p, const Shape& s);
  std::optional<dnnl::matmul::primitive_desc> TryDescribe(const Product& p,
                                                          const Shape& s);

  // Runs on one thread of the team.
  void RunNative(const Product& tile, void* scratch);
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
  const bool along_k = !p.a_transposed && p.b_transposed;
  return ChooseMatmul(desc, attr, engine,
                      /*packing=*/p.a.dtype == DType::kF32 || !along_k);
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

// None if oneDNN has no primitive, or only its reference.
std::optional<dnnl::matmul::primitive_desc> MatmulCache::Impl::TryDescribe(
    const Product& p, const Shape& s) {
  try {
    auto desc = Describe(p, s);
    if (!IsKind(desc, "ref")) return desc;
  } catch (const dnnl::error&) {
  }
  return std::nullopt;
}

const Primitive& MatmulCache::Impl::Make(const Product& p) {
  const Shape s = ShapeOf(p);
  std::unique_ptr<Primitive>& slot = primitives[KeyOf(p, s)];
  if (slot != nullptr) return *slot;
  slot = std::make_unique<Primitive>();
  Primitive& made = *slot;
  // Primitives keep the number of threads at their creation.
  omp_set_num_threads(1);
  auto desc = TryDescribe(p, s);
  if (!desc.has_value() && p.residual.data != nullptr) {
    // A residual of one row or column looks like a broadcast to oneDNN 2.6.
    Product plain = p;
    plain.residual = {};
    desc = TryDescribe(plain, s);
    made.add_residual_after = true;
  }
  if (desc.has_value()) made.matmul = dnnl::matmul(*desc);
  omp_set_num_threads(num_threads);
  if (!desc.has_value()) return made;
  made.a = desc->src_desc();
  made.b = desc->weights_desc();
  made.c = desc->dst_desc();
  made.bias = desc->bias_desc();
  made.residual = Desc(s.m, s.n, p.c.dtype, p.residual.ld, false);
  made.scratchpad = desc->scratchpad_desc();
  return made;
}

const Tiling& MatmulCache::Impl::Prepare(const Product& p, const Shape& s) {
  const auto [it, added] = tilings.try_emplace(KeyOf(p, s));
  Tiling& t = it->second;
  if (!added || PrepareNative(p, s, &t)) return t;
  t = {};
  CutResult(s.m, s.n, num_threads, LimitsOf(p, false), &t);
  t.bytes = PanelProductBytes(TileOf(p, 0, t.m, 0, t.n));
  return t;
}

// False if panels are better, or oneDNN lacks a primitive.
bool MatmulCache::Impl::PrepareNative(const Product& p, const Shape& s,
                                      Tiling* t) {
  if (p.a.dtype != p.b.dtype || !Native(p.a.dtype)) return false;
  if (p.a.dtype == DType::kF32 && s.m > kFewRows) return false;
  *t = {.native = true};
  CutResult(s.m, s.n, num_threads, LimitsOf(p, true), t);
  for (int64_t m : Sizes(s.m, t->m)) {
    for (int64_t n : Sizes(s.n, t->n)) {
      const Primitive& made = Make(TileOf(p, 0, m, 0, n));
      if (!made.matmul) return false;
      t->bytes = std::max(t->bytes, RoundUp(made.scratchpad.get_size(), 64));
    }
  }
  return true;
}

void MatmulCache::Impl::RunNative(const Product& tile, void* scratch) {
  const Primitive& made = *primitives.at(KeyOf(tile, ShapeOf(tile)));
  std::array<dnnl::memory, 6> operands;
  std::array<dnnl_exec_arg_t, 6> args;
  size_t n = 0;
  const auto add = [&](int arg, const dnnl::memory::desc& desc,
                       const void* data) {
    operands[n] = dnnl::memory(desc, engine, const_cast<void*>(data));
    args[n] = {arg, operands[n].get()};
    ++n;
  };
  add(DNNL_ARG_SRC, made.a, tile.a.data);
  add(DNNL_ARG_WEIGHTS, made.b, tile.b.data);
  add(DNNL_ARG_DST, made.c, tile.c.data);
  if (tile.bias.data != nullptr) {
    add(DNNL_ARG_BIAS, made.bias, tile.bias.data);
  }
  if (tile.residual.data != nullptr && !made.add_residual_after) {
    add(DNNL_ARG_ATTR_MULTIPLE_POST_OP(tile.accumulate ? 1 : 0) |
            DNNL_ARG_SRC_1,
        made.residual, tile.residual.data);
  }
  if (made.scratchpad.get_size() > 0) {
    add(DNNL_ARG_SCRATCHPAD, made.scratchpad, scratch);
  }
  const dnnl_status_t status = dnnl_primitive_execute(
      made.matmul.get(), stream.get(), static_cast<int>(n), args.data());
  ZERO_CHECK_EQ(status, dnnl_success);
  if (!made.add_residual_after) return;
  for (int64_t i = 0; i < tile.c.rows; ++i) {
    AddToRow(tile.c.dtype, tile.residual.Row(i), tile.c.Row(i), tile.c.cols);
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
  return static_cast<size_t>(impl_->num_threads) * impl_->Prepare(p, s).bytes;
}

void MatmulCache::Run(const Product& p, Workspace workspace) {
  const Shape s = ShapeOf(p);
  if (s.m == 0 || s.n == 0) return;
  const Tiling& t = impl_->Prepare(p, s);
  ZERO_CHECK_GE(workspace.bytes,
                static_cast<size_t>(impl_->num_threads) * t.bytes);
  // Within a team of one, oneDNN uses the thread count of the next team; the
  // caller's thread may serve several devices.
  if (omp_get_max_threads() != impl_->num_threads) {
    omp_set_num_threads(impl_->num_threads);
  }
  ParallelTasks(impl_->num_threads, t.row_tiles * t.col_tiles,
                [&](int64_t i, int thread) {
                  const int64_t row = i % t.row_tiles * t.m;
                  const int64_t col = i / t.row_tiles * t.n;
                  const Product tile = TileOf(p, row, std::min(t.m, s.m - row),
                                              col, std::min(t.n, s.n - col));
                  char* const mine = static_cast<char*>(workspace.data) +
                                     static_cast<size_t>(thread) * t.bytes;
                  if (t.native) {
                    impl_->RunNative(tile, mine);
                  } else {
                    PanelProduct(tile, mine);
                  }
                });
}

}  // namespace zero::cpu
