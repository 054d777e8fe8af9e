#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/slices.cuh"
#include "kernels/cuda/workspace.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kGroup = 8;  // elements of a thread at a time
constexpr int kTile = kThreads * kGroup;

// Rows of logits of one part of the vocabulary.
struct RowArgs {
  void* logits;  // [rows, ld]
  int64_t ld;
  int64_t first;            // the part's first word
  int64_t words;            // of the part
  int64_t cols;             // of the gradient: 0 from `words` on
  const int32_t* targets;   // [rows]
  LossRow* known;           // [rows]
  const float* grad_scale;  // null: 1
};

// Elements of the group at `first` that are words; 0 or less beyond them.
__device__ inline int NumInGroup(int64_t words, int64_t first) {
  return words - first < kGroup ? static_cast<int>(words - first) : kGroup;
}
// The element of the group at `first` that is the row's `target`; -1: none.
__device__ inline int PlaceInGroup(int64_t target, int64_t first) {
  const int64_t place = target - first;
  return place >= 0 && place < kGroup ? static_cast<int>(place) : -1;
}

// The logits of a group; those beyond the row's end count for nothing.
template <class Logit>
__device__ inline void LoadGroup(const RowArgs& args, const Logit* row,
                                 int64_t first, float (&x)[kGroup]) {
  const auto logits = Load<true>(row, Slice<kGroup>{first});
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = ToFloat(logits.x[i]);
  const int n = NumInGroup(args.words, first);
  if (n == kGroup) return;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (i >= n) x[i] = -INFINITY;
  }
}

// e^x, of logits in 16 bits to a few 1e-6: far below what they are rounded to.
template <class Logit>
__device__ inline float Exp(float x) {
  return sizeof(Logit) < sizeof(float) ? __expf(x) : expf(x);
}

// max(x) and sum of e^(x - max) of what was added. The maximum starts finite,
// so that e^(-inf - max) is 0.
template <class Logit>
struct OnlineSum {
  float max = -FLT_MAX;
  float sum = 0;

  __device__ void Add(const float (&x)[kGroup]) {
    float group_max = max;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group_max = fmaxf(group_max, x[i]);
    if (group_max > max) {
      sum *= Exp<Logit>(max - group_max);
      max = group_max;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += Exp<Logit>(x[i] - max);
  }
};

// One block per row: adds its logits to the row's statistics so far, which are
// empty before the first part. Moves sizeof(Logit) bytes per logit, some of
// them from L2, where the product has left them.
template <class Logit>
__global__ void __launch_bounds__(kThreads) AddToLossRows(RowArgs args) {
  SHARED_ARRAY(float, max_scratch, kThreads / kWarpSize);
  SHARED_ARRAY(double, sum_scratch, kThreads / kWarpSize);
  const int64_t i = blockIdx.x;
  const int64_t target = args.targets[i];
  if (target < 0) return;
  const Logit* const row = static_cast<const Logit*>(args.logits) + i * args.ld;
  OnlineSum<Logit> online;
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kGroup;
  for (int64_t first = begin; first < args.words; first += kTile) {
    float x[kGroup];
    LoadGroup(args, row, first, x);
    online.Add(x);
  }
  const float max = BlockReduce<Larger, kThreads>(online.max, max_scratch);
  const double sum = BlockReduce<Plus, kThreads>(
      static_cast<double>(online.sum) *
          static_cast<double>(expf(online.max - max)),
      sum_scratch);
  if (threadIdx.x > 0) return;
  LossRow known;
  if (args.first > 0) known = args.known[i];
  const float larger = fmaxf(known.max, max);
  known.sum = known.sum * static_cast<double>(expf(known.max - larger)) +
              sum * static_cast<double>(expf(max - larger));
  known.max = larger;
  const int64_t place = target - args.first;
  if (place >= 0 && place < args.words) {
    known.target_logit = ToFloat(row[place]);
  }
  args.known[i] = known;
}

template <class T>
__device__ inline void StoreGroup(T* row, int64_t first,
                                  const float (&x)[kGroup]) {
  Packed<T, kGroup> group;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) group.x[i] = FromFloat<T>(x[i]);
  Store<true>(row, Slice<kGroup>{first}, group);
}

// One block per row: replaces it by (softmax - onehot(target)) * scale from its
// first byte on. A tile of gradients that are narrower than the logits covers
// logits that earlier tiles, or this one before its barrier, have read; a group
// of equal width covers its own. Moves sizeof(Logit) + sizeof(Gradient) bytes
// per logit.
template <class Logit, class Gradient>
__global__ void __launch_bounds__(kThreads) WriteGradients(RowArgs args) {
  const int64_t i = blockIdx.x;
  Logit* const row = static_cast<Logit*>(args.logits) + i * args.ld;
  const bool valid = args.targets[i] >= 0;
  const int64_t target = args.targets[i] - args.first;
  const LossRow known = args.known[i];
  const double scale =
      args.grad_scale == nullptr ? 1.0 : static_cast<double>(*args.grad_scale);
  const float factor = static_cast<float>(scale / known.sum);
  // p - 1 without the cancellation of two roundings. For a logit below the
  // range of fp16 the loss is infinite, and this is not a number: the step must
  // be skipped.
  const double at_target_p =
      known.target_logit == -INFINITY
          ? static_cast<double>(NAN)
          : static_cast<double>(expf(known.target_logit - known.max)) /
                known.sum;
  const float at_target = static_cast<float>((at_target_p - 1.0) * scale);
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kGroup;
  for (int64_t tile = 0; tile < args.cols; tile += kTile) {
    const int64_t first = tile + begin;
    const bool inside = first < args.cols;
    float x[kGroup] = {};
    if (inside && valid) {
      LoadGroup(args, row, first, x);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        x[j] = Exp<Logit>(x[j] - known.max) * factor;
      }
      const int place = PlaceInGroup(target, first);
      if (place >= 0) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (j == place) x[j] = at_target;
        }
      }
    }
    if constexpr (sizeof(Gradient) < sizeof(Logit)) __syncthreads();
    if (inside) StoreGroup(reinterpret_cast<Gradient*>(row), first, x);
  }
}

constexpr int kLossThreads = 128;

// losses (null: not wanted), row_losses = logsumexp(row) - row[target]. Moves
// 32 bytes per row: bound by latency.
__global__ void __launch_bounds__(kLossThreads)
    WriteLosses(const LossRow* known, const int32_t* targets, int64_t rows,
                double* row_losses, float* losses) {
  const int64_t i =
      static_cast<int64_t>(blockIdx.x) * kLossThreads + threadIdx.x;
  if (i >= rows) return;
  double loss = 0;
  if (targets[i] >= 0) {
    loss = static_cast<double>(known[i].max) + log(known[i].sum) -
           static_cast<double>(known[i].target_logit);
  }
  row_losses[i] = loss;
  if (losses != nullptr) losses[i] = static_cast<float>(loss);
}

constexpr int kSumThreads = 256;
constexpr int64_t kRun = 256;  // rows that one thread adds up

// sum += (rows of run 0, in order) + (of run 1) + ..., one block. Moves 8 bytes
// per row, 0.5 MB for 65536 of them: bound by latency.
__global__ void __launch_bounds__(kSumThreads)
    AddLosses(const double* losses, int64_t rows, double* sum) {
  SHARED_ARRAY(double, runs, kSumThreads);
  double total = 0;
  for (int64_t base = 0; base < rows; base += kSumThreads * kRun) {
    const int64_t begin = base + static_cast<int64_t>(threadIdx.x) * kRun;
    const int64_t end = begin + kRun < rows ? begin + kRun : rows;
    double run = 0;
    for (int64_t i = begin; i < end; ++i) run += losses[i];
    runs[threadIdx.x] = run;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSumThreads; ++i) total += runs[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum += total;
}

void RunAddToLossRows(cudaStream_t stream, const RowArgs& rows,
                      int64_t num_rows, DType logits) {
  void (*kernel)(RowArgs) = nullptr;
  ZERO_CUDA_WITH_FLOAT_TYPE(logits, T, kernel = AddToLossRows<T>);
  Launch(kernel, static_cast<unsigned>(num_rows), kThreads, 0, stream, rows);
}

// `gradient`: the dtype of the gradients, and of logits that are not fp32.
void RunWriteGradients(cudaStream_t stream, const RowArgs& rows,
                       int64_t num_rows, DType logits, DType gradient) {
  void (*kernel)(RowArgs) = nullptr;
  ZERO_CUDA_WITH_FLOAT_TYPE(gradient, T, {
    kernel =
        logits == DType::kF32 ? WriteGradients<float, T> : WriteGradients<T, T>;
  });
  Launch(kernel, static_cast<unsigned>(num_rows), kThreads, 0, stream, rows);
}

}  // namespace

void CudaOps::LinearCrossEntropy(Stream& stream,
                                 const LinearCrossEntropyArgs& args,
                                 Workspace workspace) {
  using Work = LossPart::Work;
  const Work work = args.part.work;
  const bool with_dx = args.dx.data != nullptr;
  const bool backward =
      work == Work::kGradients || (work == Work::kAll && with_dx);
  const bool with_dw = backward && args.dw.data != nullptr;
  if (args.x.rows == 0) {
    if (with_dw && !args.accumulate_dw) Zero(*this, stream, args.dw);
    return;
  }
  LossChunks chunks(args, options_);
  char* at = static_cast<char*>(workspace.data);
  const auto take = [&at](size_t bytes) {
    char* const begin = at;
    at += bytes;
    return begin;
  };
  const bool kept = args.part.logits != nullptr;
  const bool owns_statistics = args.part.statistics == nullptr;
  LossLogits all = chunks.logits;
  if (kept) all.rows = args.x.rows;
  all.data = kept ? args.part.logits : take(chunks.logits_bytes);
  LossRow* const statistics =
      owns_statistics ? reinterpret_cast<LossRow*>(take(chunks.known_bytes))
                      : args.part.statistics;
  double* const row_losses = reinterpret_cast<double*>(take(chunks.loss_bytes));
  const bool summed = chunks.dx_bytes > 0;
  chunks.dx.data = take(chunks.dx_bytes);
  const Workspace rest{
      at, workspace.bytes -
              static_cast<size_t>(at - static_cast<char*>(workspace.data))};
  const int64_t num_parts = NumLossParts(args);

  for (int64_t row = 0; row < args.x.rows; row += chunks.logits.rows) {
    const int64_t rows = std::min(chunks.logits.rows, args.x.rows - row);
    const Matrix dx = args.dx.Rows(row, rows);
    const Matrix dx_sum = summed ? chunks.dx.Rows(0, rows) : dx;
    const int32_t* const targets = args.targets + row;
    LossRow* const known = statistics + (owns_statistics ? 0 : row);
    const auto products = [&](int64_t part) {
      return LossProducts(args, part, all, args.x.dtype,
                          {row, rows, kept ? row : 0}, dx_sum,
                          args.accumulate_dw || row > 0);
    };
    const auto rows_of = [&](const LossProducts& p) {
      RowArgs of;
      of.logits = p.logits.c.data;
      of.ld = p.logits.c.ld;
      of.first = p.first;
      of.words = p.words;
      of.cols = p.logits.c.cols;
      of.targets = targets;
      of.known = known;
      of.grad_scale = args.grad_scale;
      return of;
    };
    if (work != Work::kGradients) {
      for (int64_t part = 0; part < num_parts; ++part) {
        const LossProducts p = products(part);
        matmul_->Run(stream, {p.logits}, rest);
        RunAddToLossRows(HandleOf(stream), rows_of(p), rows, all.dtype);
      }
    }
    if (work == Work::kAll) {
      Launch(WriteLosses, NumBlocks(rows, kLossThreads), kLossThreads, 0,
             HandleOf(stream), known, targets, rows, row_losses + row,
             args.losses == nullptr ? nullptr : args.losses + row);
    }
    if (!backward) continue;
    for (int64_t part = num_parts - 1; part >= 0; --part) {
      const LossProducts p = products(part);
      if (work == Work::kGradients && !kept) {
        matmul_->Run(stream, {p.logits}, rest);
      }
      RunWriteGradients(HandleOf(stream), rows_of(p), rows, all.dtype,
                        args.x.dtype);
      if (with_dx) matmul_->Run(stream, {p.dx}, rest);
      if (with_dw) matmul_->Run(stream, {p.dw}, rest);
    }
    if (summed) Convert(*this, stream, dx_sum, dx);
  }
  if (args.loss_sum != nullptr && work == Work::kAll) {
    Launch(AddLosses, 1, kSumThreads, 0, HandleOf(stream), row_losses,
           args.x.rows, args.loss_sum);
  }
}

}  // namespace zero::cuda
