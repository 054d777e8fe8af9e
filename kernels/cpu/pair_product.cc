#include "kernels/cpu/pair_product.h"

#include "dnnl.hpp"
#include "kernels/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#endif

namespace zero::cpu {

#if defined(__x86_64__)
namespace {

#define ZERO_AMX __attribute__((target("avx512f,amx-tile,amx-bf16")))
#define ZERO_AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))

// ---- AMX -------------------------------------------------------------------

// Linux lets a process use the tiles' data once it has asked.
bool MayUseTiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Eight tiles of 16 rows of 64 bytes: 0 to 3 sums, 4 and 5 rows of a, 6 and 7
// columns of b.
constexpr TileConfig EightTiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  return config;
}

ZERO_AMX void ConfigureTiles() {
  // Constant memory: GCC 12 takes the intrinsic to read only 8 bytes, and would
  // drop stores to the others.
  static constexpr TileConfig kConfig = EightTiles();
  _tile_loadconfig(&kConfig);
}

ZERO_AMX void ReleaseTiles() { _tile_release(); }

// kRows x kCols tiles of c.
template <int kRows, int kCols>
ZERO_AMX void AmxBlock(int64_t k, const PairLeft& a, const PairRight& b,
                       float* c, int64_t ldc, bool accumulate) {
  const int64_t a_bytes = a.ld * 2, b_bytes = b.ld * 4, c_bytes = ldc * 4;
  float* const below = c + 16 * ldc;
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kCols > 1) _tile_loadd(1, c + 16, c_bytes);
    if constexpr (kRows > 1) _tile_loadd(2, below, c_bytes);
    if constexpr (kRows > 1 && kCols > 1) _tile_loadd(3, below + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t p = 0; p < k; p += kPairDepth) {
    const uint16_t* const left = a.data + p;
    const uint32_t* const right = b.data + p / 2 * b.ld;
    _tile_loadd(4, left, a_bytes);
    _tile_loadd(6, right, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCols > 1) {
      _tile_loadd(7, right + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 1) {
      _tile_loadd(5, left + 16 * a.ld, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRows > 1 && kCols > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kCols > 1) _tile_stored(1, c + 16, c_bytes);
  if constexpr (kRows > 1) _tile_stored(2, below, c_bytes);
  if constexpr (kRows > 1 && kCols > 1) _tile_stored(3, below + 16, c_bytes);
}

struct Amx {
  static constexpr int64_t kMostRows = 32;

  template <int kRows, int kCols>
  static void Block(int64_t k, const PairLeft& a, const PairRight& b, float* c,
                    int64_t ldc, bool accumulate) {
    AmxBlock<kRows / 16, kCols / 16>(k, a, b, c, ldc, accumulate);
  }
};

// ---- AVX-512 ---------------------------------------------------------------

template <int kRows, int kVectors>
ZERO_AVX512_BF16 void Avx512Block(int64_t k, const PairLeft& a,
                                  const PairRight& b, float* c, int64_t ldc,
                                  bool accumulate) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) sums[i][j] = _mm512_setzero_ps();
  }
  for (int64_t p = 0; p < k; p += 2) {
    const uint32_t* const row = b.data + p / 2 * b.ld;
    __m512i right[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      right[j] = _mm512_loadu_si512(row + 16 * j);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      int pair;
      std::memcpy(&pair, a.data + i * a.ld + p, sizeof(pair));
      const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] =
            _mm512_dpbf16_ps(sums[i][j], reinterpret_cast<__m512bh>(left),
                             reinterpret_cast<__m512bh>(right[j]));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      float* const to = c + i * ldc + 16 * j;
      _mm512_storeu_ps(to, accumulate
                               ? _mm512_add_ps(_mm512_loadu_ps(to), sums[i][j])
                               : sums[i][j]);
    }
  }
}

struct Avx512 {
  static constexpr int64_t kMostRows = 8;

  template <int kRows, int kCols>
  static void Block(int64_t k, const PairLeft& a, const PairRight& b, float* c,
                    int64_t ldc, bool accumulate) {
    Avx512Block<kRows, kCols / 16>(k, a, b, c, ldc, accumulate);
  }
};

// ---- Both ------------------------------------------------------------------

template <class Isa, int kCols>
void Columns(int64_t m, int64_t k, PairLeft a, const PairRight& b, float* c,
             int64_t ldc, bool accumulate) {
  constexpr int64_t kRows = Isa::kMostRows;
  constexpr int64_t kLeast = kRows < kPairRows ? kRows : kPairRows;
  for (int64_t i = 0; i < m;) {
    if (i + kRows <= m) {
      Isa::template Block<kRows, kCols>(k, a, b, c, ldc, accumulate);
      a.data += kRows * a.ld;
      c += kRows * ldc;
      i += kRows;
    } else {
      Isa::template Block<kLeast, kCols>(k, a, b, c, ldc, accumulate);
      a.data += kLeast * a.ld;
      c += kLeast * ldc;
      i += kLeast;
    }
  }
}

template <class Isa>
void Product(int64_t m, int64_t n, int64_t k, const PairLeft& a,
             const PairRight& b, float* c, int64_t ldc, bool accumulate) {
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
    Columns<Isa, 32>(m, k, a, {b.data + j, b.ld}, c + j, ldc, accumulate);
  }
  if (j < n) {
    Columns<Isa, 16>(m, k, a, {b.data + j, b.ld}, c + j, ldc, accumulate);
  }
}

std::vector<PairIsa> FindIsas() {
  const auto isa = static_cast<int>(dnnl::get_effective_cpu_isa());
  const auto has = [isa](dnnl::cpu_isa one) {
    return (isa & static_cast<int>(one)) == static_cast<int>(one);
  };
  std::vector<PairIsa> isas;
  if (has(dnnl::cpu_isa::avx512_core_amx) && MayUseTiles()) {
    isas.push_back(PairIsa::kAmx);
  }
  if (has(dnnl::cpu_isa::avx512_core_bf16)) isas.push_back(PairIsa::kAvx512);
  return isas;
}

}  // namespace

const std::vector<PairIsa>& PairIsas() {
  static const auto& isas = *new std::vector<PairIsa>(FindIsas());
  return isas;
}

PairProducts::PairProducts(PairIsa isa) : isa_(isa) {
  if (isa_ == PairIsa::kAmx) ConfigureTiles();
}

PairProducts::~PairProducts() {
  if (isa_ == PairIsa::kAmx) ReleaseTiles();
}

void PairProducts::Run(int64_t m, int64_t n, int64_t k, const PairLeft& a,
                       const PairRight& b, float* c, int64_t ldc,
                       bool accumulate) const {
  const auto product = isa_ == PairIsa::kAmx ? Product<Amx> : Product<Avx512>;
  product(m, n, k, a, b, c, ldc, accumulate);
}

#else

const std::vector<PairIsa>& PairIsas() {
  static const auto& none = *new std::vector<PairIsa>();
  return none;
}
PairProducts::PairProducts(PairIsa isa) : isa_(isa) {}
PairProducts::~PairProducts() = default;
void PairProducts::Run(int64_t, int64_t, int64_t, const PairLeft&,
                       const PairRight&, float*, int64_t, bool) const {
  ZERO_CHECK(false) << "no instructions for products of bf16";
}

#endif

}  // namespace zero::cpu
