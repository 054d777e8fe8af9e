#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/workspace.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kGroup = 8;  // elements of a thread at a time
constexpr int kTile = kThreads * kGroup;

struct RowArgs {
  void* logits;  // [rows, ld]
  int64_t ld;
  int64_t words;            // of the softmax
  int64_t cols;             // of the gradient, which is 0 behind the words
  const int32_t* targets;   // [rows]
  double* row_losses;       // [rows]
  float* losses;            // [rows] or null
  const float* grad_scale;  // null: 1
};

// Elements of the group at `first` that are words; not above 0 behind them.
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
  const int n = NumInGroup(args.words, first);
#pragma unroll
  for (int from = 0; from < kGroup; from += Chunk<Logit>::kSize) {
    const Chunk<Logit> chunk = LoadChunk(row + first + from);
#pragma unroll
    for (int i = 0; i < Chunk<Logit>::kSize; ++i) {
      x[from + i] = from + i < n ? ToFloat(chunk.x[i]) : -INFINITY;
    }
  }
}

// max(x) and sum of e^(x - max) of what was added. The maximum starts finite,
// so that e^(-inf - max) is 0.
struct OnlineSum {
  float max = -FLT_MAX;
  float sum = 0;

  __device__ void Add(const float (&x)[kGroup]) {
    float group_max = max;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) group_max = fmaxf(group_max, x[i]);
    if (group_max > max) {
      sum *= expf(max - group_max);
      max = group_max;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum += expf(x[i] - max);
  }
};

struct Softmax {
  float max;
  double sum;
};

// Over the block, in every thread. From the row's end to its beginning, which
// is then the part that the second pass still finds in L2.
template <class Logit>
__device__ inline Softmax ReduceRow(const RowArgs& args, const Logit* row) {
  SHARED_ARRAY(float, max_scratch, kThreads / kWarpSize);
  SHARED_ARRAY(double, sum_scratch, kThreads / kWarpSize);
  OnlineSum online;
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kGroup;
  const int64_t tiles = (args.words + kTile - 1) / kTile;
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    const int64_t first = tile * kTile + begin;
    if (first >= args.words) continue;
    float x[kGroup];
    LoadGroup(args, row, first, x);
    online.Add(x);
  }
  Softmax softmax;
  softmax.max = BlockReduce<Larger, kThreads>(online.max, max_scratch);
  const double scaled = static_cast<double>(online.sum) *
                        static_cast<double>(expf(online.max - softmax.max));
  softmax.sum = BlockReduce<Plus, kThreads>(scaled, sum_scratch);
  return softmax;
}

template <class T>
__device__ inline void StoreGroup(T* to, const T (&x)[kGroup]) {
#pragma unroll
  for (int from = 0; from < kGroup; from += Chunk<T>::kSize) {
    Chunk<T> chunk;
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) chunk.x[i] = x[from + i];
    StoreChunk(to + from, chunk);
  }
}

// Replaces the row by (softmax - onehot(target)) * scale from its first byte
// on. A tile of gradients that are narrower than the logits covers logits that
// earlier tiles, or this one before its barrier, have read; a group of equal
// width covers its own.
template <class Gradient, class Logit>
__device__ inline void WriteGradient(const RowArgs& args, Logit* row,
                                     const Softmax& softmax, int64_t target,
                                     float target_logit) {
  const double scale =
      args.grad_scale == nullptr ? 1.0 : static_cast<double>(*args.grad_scale);
  const float factor = static_cast<float>(scale / softmax.sum);
  // p - 1 without the cancellation of two roundings. Of a logit below the range
  // of fp16 the loss is infinite, and so is this no number: the step must be
  // skipped.
  const double at_target_p =
      target_logit == -INFINITY
          ? static_cast<double>(NAN)
          : static_cast<double>(expf(target_logit - softmax.max)) / softmax.sum;
  const float at_target = static_cast<float>((at_target_p - 1.0) * scale);
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kGroup;
  for (int64_t tile = 0; tile < args.cols; tile += kTile) {
    const int64_t first = tile + begin;
    const bool inside = first < args.cols;
    Gradient gradient[kGroup];
    if (inside) {
      float x[kGroup];
      LoadGroup(args, row, first, x);
      const int place = PlaceInGroup(target, first);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float g = expf(x[i] - softmax.max) * factor;
        gradient[i] = FromFloat<Gradient>(i == place ? at_target : g);
      }
    }
    if constexpr (sizeof(Gradient) < sizeof(Logit)) __syncthreads();
    if (inside) StoreGroup(reinterpret_cast<Gradient*>(row) + first, gradient);
  }
}

template <class Gradient>
__device__ inline void ZeroRow(const RowArgs& args, void* row) {
  Gradient zero[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) zero[i] = FromFloat<Gradient>(0.0f);
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kGroup;
  for (int64_t first = begin; first < args.cols; first += kTile) {
    StoreGroup(static_cast<Gradient*>(row) + first, zero);
  }
}

// One block per row: loss = logsumexp(row) - row[target], and the gradient in
// place (Gradient void: none). Forward moves sizeof(Logit) bytes per logit;
// with the gradient 2 sizeof(Logit) + sizeof(Gradient), 6 in 16 bits, some of
// it from L2, where the front of a row is still found (all rows at work are
// 53 MB of GPT-2's 16-bit logits on an H100). Should reach 85 % of copy
// bandwidth.
template <class Logit, class Gradient>
__global__ void __launch_bounds__(kThreads) SoftmaxRows(RowArgs args) {
  constexpr bool kGradient = !std::is_void_v<Gradient>;
  const int64_t i = blockIdx.x;
  Logit* const row = static_cast<Logit*>(args.logits) + i * args.ld;
  const int64_t target = args.targets[i];
  double loss = 0;
  if (target >= 0) {
    const float target_logit = ToFloat(row[target]);
    const Softmax softmax = ReduceRow(args, row);
    if (threadIdx.x == 0) {
      loss = static_cast<double>(softmax.max) + log(softmax.sum) -
             static_cast<double>(target_logit);
    }
    // All of the row has been read: ReduceRow ends with a barrier.
    if constexpr (kGradient) {
      WriteGradient<Gradient>(args, row, softmax, target, target_logit);
    }
  } else if constexpr (kGradient) {
    ZeroRow<Gradient>(args, row);
  }
  if (threadIdx.x == 0) {
    args.row_losses[i] = loss;
    if (args.losses != nullptr) args.losses[i] = static_cast<float>(loss);
  }
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

// `gradient`: the dtype of the gradients, and of logits that are not fp32.
void RunSoftmax(cudaStream_t stream, const RowArgs& rows, int64_t num_rows,
                DType logits, DType gradient, bool backward) {
  void (*kernel)(RowArgs) = nullptr;
  ZERO_CUDA_WITH_FLOAT_TYPE(gradient, T, {
    if (logits == DType::kF32) {
      kernel = backward ? SoftmaxRows<float, T> : SoftmaxRows<float, void>;
    } else {
      kernel = backward ? SoftmaxRows<T, T> : SoftmaxRows<T, void>;
    }
  });
  Launch(kernel, static_cast<unsigned>(num_rows), kThreads, 0, stream, rows);
}

}  // namespace

void CudaOps::LinearCrossEntropy(Stream& stream,
                                 const LinearCrossEntropyArgs& args,
                                 Workspace workspace) {
  using Work = LossPart::Work;
  const Work work = args.part.work;
  const bool backward = args.dx.data != nullptr;
  const bool with_dw = backward && args.dw.data != nullptr;
  if (args.x.rows == 0) {
    if (with_dw && !args.accumulate_dw) Zero(*this, stream, args.dw);
    return;
  }
  const LossChunks chunks(args, options_);
  char* at = static_cast<char*>(workspace.data);
  const auto take = [&at](size_t bytes) {
    char* const begin = at;
    at += bytes;
    return begin;
  };
  const bool kept = args.part.logits != nullptr;
  void* const base = kept ? args.part.logits : take(chunks.logits_bytes);
  const Matrix all{base, chunks.dtype, kept ? args.x.rows : chunks.rows,
                   args.rows(), chunks.ld};
  double* const row_losses = reinterpret_cast<double*>(take(chunks.loss_bytes));
  Matrix dx_sum = chunks.dx;
  dx_sum.data = take(chunks.dx_bytes);
  const Workspace rest{
      at, workspace.bytes -
              static_cast<size_t>(at - static_cast<char*>(workspace.data))};
  const int64_t num_parts = NumLossParts(args);

  for (int64_t row = 0; row < args.x.rows; row += chunks.rows) {
    const int64_t rows = std::min(chunks.rows, args.x.rows - row);
    const Matrix logits = all.Rows(kept ? row : 0, rows);
    const Matrix dx = args.dx.Rows(row, rows);
    const bool summed = chunks.dx_bytes > 0;
    const auto products = [&](int64_t part) {
      return LossProducts(args, part, logits, args.x.dtype, row,
                          summed ? dx_sum.Rows(0, rows) : dx,
                          args.accumulate_dw || row > 0);
    };
    if (work != Work::kGradients) {
      for (int64_t part = 0; part < num_parts; ++part) {
        matmul_->Run(stream, {products(part).logits}, rest);
      }
    }
    if (work == Work::kLogits) continue;
    if (work == Work::kAll) {
      RowArgs softmax;
      softmax.logits = logits.data;
      softmax.ld = chunks.ld;
      softmax.words = args.vocab;
      softmax.cols = logits.cols;
      softmax.targets = args.targets + row;
      softmax.row_losses = row_losses + row;
      softmax.losses = args.losses == nullptr ? nullptr : args.losses + row;
      softmax.grad_scale = args.grad_scale;
      RunSoftmax(HandleOf(stream), softmax, rows, chunks.dtype, args.x.dtype,
                 backward);
    }
    if (!backward) continue;
    for (int64_t part = num_parts - 1; part >= 0; --part) {
      const LossProducts p = products(part);
      matmul_->Run(stream, {p.dx}, rest);
      if (with_dw) matmul_->Run(stream, {p.dw}, rest);
    }
    if (!summed) continue;
    const Matrix sum = dx_sum.Rows(0, rows);
    const Runs runs = RunsOf({sum, dx});
    for (int64_t i = 0; i < runs.count; ++i) {
      Cast(stream, {RunOf(sum, runs, i), RunOf(dx, runs, i)});
    }
  }
  if (args.loss_sum != nullptr && work == Work::kAll) {
    Launch(AddLosses, 1, kSumThreads, 0, HandleOf(stream), row_losses,
           args.x.rows, args.loss_sum);
  }
}

}  // namespace zero::cuda
