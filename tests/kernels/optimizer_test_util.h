// Helpers for the tests of the fused optimizers: a flat span with ranges and
// gaps, in every combination of storage types.
#ifndef ZERO_TESTS_KERNELS_OPTIMIZER_TEST_UTIL_H_
#define ZERO_TESTS_KERNELS_OPTIMIZER_TEST_UTIL_H_

#include <cstring>
#include <utility>

#include "kernels/rounding.h"
#include "tests/kernels/kernel_test.h"

namespace zero {

// Elements [begin, end) of a whole.
struct Piece {
  int64_t begin, end;
};

// The pieces of `whole`, end to end.
inline Array Pick(const Array& whole, const std::vector<Piece>& pieces) {
  int64_t size = 0;
  for (const Piece& piece : pieces) size += piece.end - piece.begin;
  Array picked(whole.dtype(), size);
  void* to = picked.data();
  for (const Piece& piece : pieces) {
    const int64_t elems = piece.end - piece.begin;
    std::memcpy(to, ElementAt(whole.data(), whole.dtype(), piece.begin),
                elems * DTypeBytes(whole.dtype()));
    to = ElementAt(to, whole.dtype(), elems);
  }
  return picked;
}

// The parameter of a master.
inline double RoundedMaster(DType dtype, double master) {
  const auto value = static_cast<float>(master);
  return dtype == DType::kBF16 ? BF16ToF32(SplitMaster(value).param)
                               : F16ToF32(F32ToF16(value));
}

// Parameters with their masters and gradients. fp32 parameters are their own
// masters.
struct FlatParams {
  FlatParams(DType param_dtype, DType grad_dtype, int64_t size)
      : param(Array::Normal(param_dtype, size, 1)),
        master(DType::kF32, size),
        grad(Array::Normal(grad_dtype, size, 2)) {
    // Masters hold more digits than the parameters that are cast from them.
    const Array noise = Array::Normal(DType::kF32, size, 3, 1e-4);
    for (int64_t i = 0; i < size; ++i) master.Set(i, param[i] + noise[i]);
  }

  bool has_master() const { return param.dtype() != DType::kF32; }

  // Splits the masters into bf16 parameters and the rest.
  void Split() {
    Array rest(DType::kU16, master.size());
    for (int64_t i = 0; i < master.size(); ++i) {
      const auto [high, low] = SplitMaster(master.floats()[i]);
      static_cast<uint16_t*>(param.data())[i] = high;
      static_cast<uint16_t*>(rest.data())[i] = low;
    }
    master = std::move(rest);
  }
  // The other way.
  void Join() {
    Array joined(DType::kF32, master.size());
    for (int64_t i = 0; i < master.size(); ++i) {
      joined.floats()[i] =
          JoinMaster(static_cast<const uint16_t*>(param.data())[i],
                     static_cast<const uint16_t*>(master.data())[i]);
    }
    master = std::move(joined);
  }

  double value(int64_t i) const { return has_master() ? master[i] : param[i]; }

  UpdateState state(const std::vector<UpdateRange>& ranges) {
    UpdateState s;
    s.param = param.vector();
    if (has_master()) s.master = master.vector();
    s.grad = grad.vector();
    s.ranges = ranges;
    return s;
  }

  // Of parameters and masters.
  bool SameBits(const FlatParams& other) const {
    return param.SameBits(other.param) && master.SameBits(other.master);
  }

  Array param, master, grad;
};

// With the arrays of Adam and LAMB; v is zero at first.
struct Moments {
  explicit Moments(FlatParams of)
      : params(std::move(of)),
        m(Array::Normal(DType::kF32, params.param.size(), 4, 0.1)),
        v(DType::kF32, params.param.size()) {}

  // Of masters and arrays; the parameters stay whole.
  void KeepPieces(const std::vector<Piece>& pieces) {
    for (Array* array : {&params.master, &m, &v}) {
      *array = Pick(*array, pieces);
    }
  }
  bool SameBits(const Moments& other) const {
    return params.SameBits(other.params) && m.SameBits(other.m) &&
           v.SameBits(other.v);
  }

  FlatParams params;
  Array m, v;
};

// Ranges with gaps between them, one empty, and one long enough for two
// threads; [0, 12000) of a span of kSpan elements.
inline constexpr int64_t kSpan = 12000;
inline std::vector<UpdateRange> TestRanges() {
  return {{0, 1, 0.1f},     {3, 34, 0.0f},     {64, 97, 0.01f},
          {100, 100, 0.5f}, {128, 1151, 0.1f}, {1152, 11999, 0.05f}};
}
inline bool InRanges(const std::vector<UpdateRange>& ranges, int64_t i) {
  for (const UpdateRange& r : ranges) {
    if (i >= r.begin && i < r.end) return true;
  }
  return false;
}

// Runs fn(params, grads) for every pair of storage types that a config can
// have: gradients accumulate in fp32 or in the parameters' dtype.
inline void ForEachDtypePair(const std::function<void(DType, DType)>& fn) {
  for (const DType param : kFloatTypes) {
    for (const DType grad : kFloatTypes) {
      if (grad != DType::kF32 && grad != param) continue;
      SCOPED_TRACE(std::string(DTypeName(param)) + " parameters, " +
                   DTypeName(grad) + " gradients");
      fn(param, grad);
    }
  }
}

// The CPU, on every path: every device has its bits.
inline void OnCpu(const std::function<void(const Path&)>& fn) {
  const std::unique_ptr<Device> device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  fn({"cpu", *device, device->ops(), *stream, false});
}

// kSpan in 400 ranges of 29 elements with gaps of one: more than go into one
// launch of a GPU.
inline std::vector<UpdateRange> ManyRanges() {
  std::vector<UpdateRange> ranges;
  for (int64_t i = 0; i < 400; ++i) {
    ranges.push_back({30 * i, 30 * i + 29, i % 2 == 0 ? 0.1f : 0.0f});
  }
  return ranges;
}

// Runs step(path, state, its UpdateState) with and without stochastic rounding
// from equal states: the masters must have the same bits, and the parameters
// those of kernels/rounding.h, wherever their first element is in the layout.
template <class State>
void CheckStochasticRounding(
    const State& before,
    const std::function<void(const Path&, State&, const UpdateState&)>& step) {
  const std::vector<UpdateRange> ranges = TestRanges();
  for (const int64_t first : {int64_t{0}, int64_t{6}, (int64_t{3} << 40) + 5}) {
    ForEachPath([&](const Path& path) {
      State nearest = before, rounded = before;
      step(path, nearest, nearest.params.state(ranges));
      UpdateState state = rounded.params.state(ranges);
      state.stochastic_rounding = true;
      state.rounding_key = 0x123456789abcdefull;
      state.first_element = first;
      step(path, rounded, state);
      EXPECT_TRUE(rounded.params.master.SameBits(nearest.params.master));
      Array want = before.params.param;
      auto* bits = static_cast<uint16_t*>(want.data());
      for (const UpdateRange& range : ranges) {
        for (int64_t i = range.begin; i < range.end; ++i) {
          const uint32_t word = RoundingWord(state.rounding_key, first + i);
          const float value = rounded.params.master.floats()[i];
          bits[i] = want.dtype() == DType::kBF16 ? StochasticBF16(value, word)
                                                 : StochasticF16(value, word);
        }
      }
      EXPECT_TRUE(rounded.params.param.SameBits(want)) << first;
    });
  }
}

// Runs step(path, state, its UpdateState) several times on bf16 parameters with
// whole masters and with split ones: all must have the same bits.
template <class State>
void CheckSplitMasters(
    State whole_at_first,
    const std::function<void(const Path&, State&, const UpdateState&)>& step) {
  const std::vector<UpdateRange> ranges = TestRanges();
  State split_at_first = whole_at_first;
  split_at_first.params.Split();
  whole_at_first.params.param = split_at_first.params.param;
  ForEachPath([&](const Path& path) {
    State whole = whole_at_first, split = split_at_first;
    for (int i = 0; i < 3; ++i) {
      step(path, whole, whole.params.state(ranges));
      step(path, split, split.params.state(ranges));
    }
    EXPECT_FALSE(whole.SameBits(whole_at_first));
    split.params.Join();
    EXPECT_TRUE(split.SameBits(whole));
  });
}

// Runs step(path, state, its UpdateState) on pieces of a whole: of a state that
// keeps those of masters and arrays (KeepPieces), and whose parameters and
// gradients may be whole. All must have the bits that they get in an update of
// the whole, and the others keep theirs.
template <class State>
void CheckPiecesOfAWhole(
    const State& before,
    const std::function<void(const Path&, State&, const UpdateState&)>& step) {
  const auto state_of = [](State& state,
                           const std::vector<UpdateRange>& ranges) {
    UpdateState s = state.params.state(ranges);
    s.stochastic_rounding = state.params.has_master() && !s.splits_master();
    s.rounding_key = 7;
    s.first_element = 12;
    return s;
  };
  const std::vector<Piece> aligned = {{64, 1088}, {2048, 8192}};
  const std::vector<Piece> odd = {{3, 500}, {501, 4002}, {11'000, 11'001}};
  for (const std::vector<Piece>& pieces : {aligned, odd}) {
    std::vector<UpdateRange> in_whole, in_pieces;
    int64_t begin = 0;
    for (const Piece& piece : pieces) {
      const int64_t size = piece.end - piece.begin;
      for (const auto& [from, to] :
           {Piece{0, size / 3}, Piece{size / 3, size}}) {
        const float decay = from == 0 ? 0.0f : 0.1f;
        in_whole.push_back({piece.begin + from, piece.begin + to, decay});
        in_pieces.push_back(
            {begin + from, begin + to, decay, piece.begin - begin});
      }
      begin += size;
    }
    for (const bool whole_param : {false, true}) {
      for (const bool whole_grad : {false, true}) {
        ForEachPath([&](const Path& path) {
          State whole = before;
          step(path, whole, state_of(whole, in_whole));
          State own = before, want = whole;
          own.KeepPieces(pieces);
          want.KeepPieces(pieces);
          if (!whole_param) {
            own.params.param = Pick(before.params.param, pieces);
            want.params.param = Pick(whole.params.param, pieces);
          }
          if (!whole_grad) own.params.grad = Pick(before.params.grad, pieces);
          UpdateState state = state_of(own, in_pieces);
          state.whole_param = whole_param;
          state.whole_grad = whole_grad;
          step(path, own, state);
          EXPECT_TRUE(own.SameBits(want)) << whole_param << whole_grad;
        });
      }
    }
  }
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_OPTIMIZER_TEST_UTIL_H_
