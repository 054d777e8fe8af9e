// Matrices for kernels of flat spans: one run if no operand has padding between
// its rows, else one per row.
#ifndef ZERO_KERNELS_RUNS_H_
#define ZERO_KERNELS_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/ops.h"

namespace zero {

struct Runs {
  int64_t count = 0;
  int64_t rows = 0;  // of each
};

// REQUIRES: all of one shape.
inline Runs RunsOf(std::initializer_list<ConstMatrix> operands) {
  const int64_t rows = operands.begin()->rows;
  const bool packed =
      std::all_of(operands.begin(), operands.end(),
                  [](const ConstMatrix& x) { return x.ld == x.cols; });
  return packed ? Runs{1, rows} : Runs{rows, 1};
}

template <class Data>
VectorView<Data> RunOf(const MatrixView<Data>& x, const Runs& runs, int64_t i) {
  return {x.Row(i * runs.rows), x.dtype, runs.rows * x.cols};
}

inline void Zero(Ops& ops, Stream& stream, const Matrix& x) {
  const Runs runs = RunsOf({x});
  for (int64_t i = 0; i < runs.count; ++i) {
    ops.Fill(stream, {RunOf(x, runs, i), 0});
  }
}

// to = from, rounded.
inline void Convert(Ops& ops, Stream& stream, const ConstMatrix& from,
                    const Matrix& to) {
  const Runs runs = RunsOf({from, to});
  for (int64_t i = 0; i < runs.count; ++i) {
    ops.Cast(stream, {RunOf(from, runs, i), RunOf(to, runs, i)});
  }
}

}  // namespace zero

#endif  // ZERO_KERNELS_RUNS_H_
