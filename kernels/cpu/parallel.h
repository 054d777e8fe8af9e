// Loops over OpenMP threads.
#ifndef ZERO_KERNELS_CPU_PARALLEL_H_
#define ZERO_KERNELS_CPU_PARALLEL_H_

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/cpu/numa.h"

namespace zero::cpu {

// The threads of a loop. With `nodes`, each stays on its NUMA node, near the
// memory that it touched first.
struct Team {
  // The conversion is implicit: most loops run anywhere.
  Team(int threads) : num_threads(threads) {}
  Team(int threads, const NumaNodes* on) : num_threads(threads), nodes(on) {}

  int num_threads;
  const NumaNodes* nodes = nullptr;
};

// Calls fn(begin, end) once per thread with contiguous pieces of [0, n), each
// beginning at a multiple of `grain`. A loop of one grain or less stays on the
// calling thread. The partition depends only on the arguments. `args` go to fn
// before begin.
template <class Fn, class... Args>
void ParallelRanges(const Team& of, int64_t n, int64_t grain, Fn fn,
                    const Args&... args) {
  const int64_t num_grains = (n + grain - 1) / grain;
  const int threads =
      static_cast<int>(std::min<int64_t>(of.num_threads, num_grains));
  if (threads <= 1) {
    if (n > 0) fn(args..., int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    // The runtime may grant fewer threads than were asked for.
    const int64_t team = omp_get_num_threads();
    const int64_t rank = omp_get_thread_num();
    if (of.nodes != nullptr) {
      BindToNode(*of.nodes, static_cast<int>(rank), of.num_threads);
    }
    const int64_t begin = num_grains * rank / team * grain;
    const int64_t end = std::min(n, num_grains * (rank + 1) / team * grain);
    if (begin < end) fn(args..., begin, end);
  }
}

// Calls fn(task, thread) for all tasks of [0, num_tasks), the next free thread
// taking the next task; thread < num_threads.
template <class Fn>
void ParallelTasks(int num_threads, int64_t num_tasks, const Fn& fn) {
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
  for (int64_t i; (i = next.fetch_add(1)) < num_tasks;) {
    fn(i, omp_get_thread_num());
  }
}

// Grains of loops over elements: whole cache lines of any dtype, and enough
// work that waking a thread pays.
inline constexpr int64_t kElementGrain = 4096;

// Rows of `width` elements that make about one element grain.
inline int64_t RowGrain(int64_t width) {
  return std::max<int64_t>(1, kElementGrain / std::max<int64_t>(1, width));
}

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_PARALLEL_H_
