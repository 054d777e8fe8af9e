// Seeded mistakes of kernels and of streams: each is caught, and its correct
// twin passes. Compiled as kernels/cuda is for the emulator.
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/elements.cuh"
#include "tests/support/cuda_emulator/control.h"

#if defined(__SANITIZE_ADDRESS__)
#define ZERO_WITH_ASAN 1
#define ZERO_WITH_TSAN 0
#elif defined(__SANITIZE_THREAD__)
#define ZERO_WITH_ASAN 0
#define ZERO_WITH_TSAN 1
#else
#define ZERO_WITH_ASAN 0
#define ZERO_WITH_TSAN 0
#endif

namespace zero::cuda {
namespace {

using emulator::Order;

constexpr int kThreads = 128;
constexpr Order kOrders[] = {Order::kForward, Order::kReverse, Order::kRandom};

class CudaEmulatorTest : public testing::Test {
 protected:
  // In a forked child tsan no longer knows this program's fibers: under tsan
  // the program restarts for each death test.
  CudaEmulatorTest() {
    if (ZERO_WITH_TSAN) GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
};
using CudaEmulatorDeathTest = CudaEmulatorTest;

// n elements of device memory; every launch here is on the stream that runs
// at once, so that the host may read them after it.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int n, T value = T()) : size_(n) {
    ZERO_CUDA_CHECK(cudaMalloc(&data_, n * sizeof(T)));
    std::fill_n(begin(), n, value);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* begin() { return static_cast<T*>(data_); }
  T& operator[](int i) { return begin()[i]; }
  std::vector<T> values() { return {begin(), begin() + size_}; }

 private:
  int size_;
  void* data_ = nullptr;
};

// The kernel's `n` ints at the end of a run in each order.
template <class Run>
std::vector<std::vector<int>> InEachOrder(int n, Run run) {
  std::vector<std::vector<int>> results;
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    DeviceArray<int> out(n);
    run(out.begin());
    results.push_back(out.values());
  }
  return results;
}

std::vector<int> Descending(int n) {
  std::vector<int> values(n);
  std::iota(values.rbegin(), values.rend(), 0);
  return values;
}

// A missing barrier is a race: tsan ends the program, other builds see it in
// the results of some order.
template <class Run>
void ExpectRaceSeen(const std::vector<int>& want, Run run) {
  if (ZERO_WITH_TSAN) {
    EXPECT_DEATH(InEachOrder(want.size(), run), "data race");
    return;
  }
  int wrong = 0;
  for (const auto& got : InEachOrder(want.size(), run)) wrong += got != want;
  EXPECT_GT(wrong, 0);
}

template <class Run>
void ExpectRight(const std::vector<int>& want, Run run) {
  for (const auto& got : InEachOrder(want.size(), run)) EXPECT_EQ(got, want);
}

// ---- Barriers
// -----------------------------------------------------------------

template <bool kBarrier>
__global__ void ReverseBlock(int* out) {
  SHARED_ARRAY(int, values, kThreads);
  const int i = threadIdx.x;
  values[i] = i;
  if (kBarrier) __syncthreads();
  out[i] = values[kThreads - 1 - i];
}

TEST_F(CudaEmulatorTest, MissingSyncthreadsIsSeen) {
  ExpectRaceSeen(Descending(kThreads), [](int* out) {
    Launch(ReverseBlock<false>, 1, kThreads, 0, nullptr, out);
  });
  ExpectRight(Descending(kThreads), [](int* out) {
    Launch(ReverseBlock<true>, 1, kThreads, 0, nullptr, out);
  });
}

// A second round through the same array also needs a barrier before it.
template <bool kBarrier>
__global__ void ReverseTwice(int* out) {
  SHARED_ARRAY(int, values, kThreads);
  const int i = threadIdx.x;
  int value = i;
  for (int round = 0; round < 3; ++round) {
    values[i] = value;
    __syncthreads();
    value = values[kThreads - 1 - i];
    if (kBarrier) __syncthreads();
  }
  out[i] = value;
}

TEST_F(CudaEmulatorTest, MissingBarrierBeforeReuseIsSeen) {
  ExpectRaceSeen(Descending(kThreads), [](int* out) {
    Launch(ReverseTwice<false>, 1, kThreads, 0, nullptr, out);
  });
  ExpectRight(Descending(kThreads), [](int* out) {
    Launch(ReverseTwice<true>, 1, kThreads, 0, nullptr, out);
  });
}

template <bool kBarrier>
__global__ void ReverseWarp(int* out) {
  DYNAMIC_SHARED(int, values);
  const int lane = threadIdx.x;
  values[lane] = lane;
  if (kBarrier) __syncwarp();
  out[lane] = values[31 - lane];
}

TEST_F(CudaEmulatorTest, MissingSyncwarpIsSeen) {
  ExpectRaceSeen(Descending(32), [](int* out) {
    Launch(ReverseWarp<false>, 1, 32, 32 * sizeof(int), nullptr, out);
  });
  ExpectRight(Descending(32), [](int* out) {
    Launch(ReverseWarp<true>, 1, 32, 32 * sizeof(int), nullptr, out);
  });
}

__global__ void DivergentBarrier() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void BarrierOfSome() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void BarrierAgainstShuffle(int* out) {
  if (threadIdx.x == 5) {
    __syncthreads();
  } else {
    *out = __shfl_sync(kWholeWarp, 1, 0);
  }
}

TEST_F(CudaEmulatorDeathTest, DivergentBarriersNameBothPlacesAndTheThread) {
  emulator::SetOrder(Order::kForward);
  EXPECT_DEATH(Launch(DivergentBarrier, 2, 64, 0, nullptr),
               "divergent barriers: thread 63 is at .*cuda_emulator_test.cc:"
               "(.|\n)*launched at .*cuda_emulator_test.cc:[0-9]+, grid "
               "\\(2, 1, 1\\) of \\(64, 1, 1\\)"
               "(.|\n)*block \\(0, 0, 0\\), thread \\(0, 0, 0\\)");
}

TEST_F(CudaEmulatorDeathTest, BarrierThatPartOfABlockNeverReaches) {
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    EXPECT_DEATH(Launch(BarrierOfSome, 1, 64, 0, nullptr),
                 "32 of 64 threads end without reaching the barrier");
  }
}

TEST_F(CudaEmulatorDeathTest, ALaneAtABarrierWhileOthersShuffleIsSeen) {
  DeviceArray<int> out(1);
  EXPECT_DEATH(Launch(BarrierAgainstShuffle, 1, 32, 0, nullptr, out.begin()),
               "deadlock: lane [0-9]+ waits at .* for the lanes of mask "
               "ffffffff, of which ffffffdf have come");
}

// ---- Shuffles
// -------------------------------------------------------------------

__global__ void ShuffleAfterReturn(int* out) {
  if (threadIdx.x == 31) return;
  out[threadIdx.x] = __shfl_sync(kWholeWarp, 7, 0);
}

__global__ void ShuffleFromOutside(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 7, 16);
}

__global__ void ShuffleByAnother(int* out) {
  out[threadIdx.x] = __shfl_sync(0x7fffffffu, 7, 0);
}

TEST_F(CudaEmulatorDeathTest, ShuffleWithLanesThatAreNotThere) {
  DeviceArray<int> out(32);
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    EXPECT_DEATH(Launch(ShuffleAfterReturn, 1, 32, 0, nullptr, out.begin()),
                 "names lane 31, which has exited");
    EXPECT_DEATH(Launch(ShuffleFromOutside, 1, 32, 0, nullptr, out.begin()),
                 "reads lane 16, which mask 0000ffff leaves out");
    EXPECT_DEATH(Launch(ShuffleByAnother, 1, 32, 0, nullptr, out.begin()),
                 "mask 7fffffff .*leaves out the calling lane 31");
  }
}

struct Shuffled {
  int direct, up, down, crossed;
  double wide;
  unsigned ballot;
  int any, all;
};

__global__ void ShuffleAll(Shuffled* out, int width) {
  const int lane = threadIdx.x % 32;
  Shuffled& s = out[threadIdx.x];
  s.direct = __shfl_sync(kWholeWarp, lane, 5, width);
  s.up = __shfl_up_sync(kWholeWarp, lane, 3, width);
  s.down = __shfl_down_sync(kWholeWarp, lane, 3, width);
  s.crossed = __shfl_xor_sync(kWholeWarp, lane, 6, width);
  s.wide = __shfl_sync(kWholeWarp, lane + 0.5, 9);
  s.ballot = __ballot_sync(kWholeWarp, lane % 3 == 0);
  s.any = __any_sync(kWholeWarp, lane == 40);
  s.all = __all_sync(kWholeWarp, lane < 32);
}

TEST_F(CudaEmulatorTest, ShufflesAndVotesFollowTheManual) {
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    for (const int width : {8, 16, 32}) {
      DeviceArray<Shuffled> out(64);
      Launch(ShuffleAll, 1, 64, 0, nullptr, out.begin(), width);
      for (int i = 0; i < 64; ++i) {
        const int lane = i % 32, first = lane / width * width;
        const Shuffled& s = out[i];
        EXPECT_EQ(s.direct, first + 5);
        EXPECT_EQ(s.up, lane - 3 < first ? lane : lane - 3);
        EXPECT_EQ(s.down, lane + 3 >= first + width ? lane : lane + 3);
        EXPECT_EQ(s.crossed, lane ^ 6);
        EXPECT_EQ(s.wide, 9.5);
        EXPECT_EQ(s.ballot, 0x49249249u);
        EXPECT_EQ(s.any, 0);
        EXPECT_EQ(s.all, 1);
      }
    }
  }
}

// ---- Memory
// ---------------------------------------------------------------------

template <int kExtra>
__global__ void FillTail(int* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n + kExtra) out[i] = 1;
}

TEST_F(CudaEmulatorTest, TailThatIsOffByOneIsSeen) {
  constexpr int kSize = kThreads - 3;
  DeviceArray<int> exact(kSize);
  Launch(FillTail<0>, 1, kThreads, 0, nullptr, exact.begin(), kSize);
  EXPECT_EQ(exact.values(), std::vector<int>(kSize, 1));
  if (ZERO_WITH_ASAN) {
    EXPECT_DEATH(
        Launch(FillTail<1>, 1, kThreads, 0, nullptr, exact.begin(), kSize),
        "heap-buffer-overflow");
  } else {
    DeviceArray<int> longer(kSize + 1);
    Launch(FillTail<1>, 1, kThreads, 0, nullptr, longer.begin(), kSize);
    EXPECT_EQ(longer[kSize], 1);  // a guard after the array shows it
  }
}

__global__ void WriteBeyondShared(int* out, int n) {
  SHARED_ARRAY(int, first, 8);
  SHARED_ARRAY(int, second, 8);
  if (threadIdx.x < 8) second[threadIdx.x] = 0;
  if (threadIdx.x == 0) first[n] = 1;
  __syncthreads();
  out[threadIdx.x] = first[0] + second[threadIdx.x % 8];
}

TEST_F(CudaEmulatorDeathTest, WriteBeyondASharedArray) {
  DeviceArray<int> out(32);
  Launch(WriteBeyondShared, 1, 32, 0, nullptr, out.begin(), 0);
  EXPECT_EQ(out[31], 1);
  EXPECT_DEATH(Launch(WriteBeyondShared, 1, 32, 0, nullptr, out.begin(), 8),
               ZERO_WITH_ASAN
                   ? "use-after-poison|unknown-crash|index 8 out of bounds"
                   : "beyond a shared array of 32 bytes");
}

__global__ void ReadUnwritten(float* out) {
  SHARED_ARRAY(float, partial, 4);
  DYNAMIC_SHARED(float, more);
  if (threadIdx.x == 0) partial[0] = more[0] = 1;
  __syncthreads();
  out[blockIdx.x * 32 + threadIdx.x] =
      partial[threadIdx.x % 4] + more[threadIdx.x % 4];
}

TEST_F(CudaEmulatorTest, SharedMemoryStartsAsNan) {
  DeviceArray<float> out(4 * 32);
  Launch(ReadUnwritten, 4, 32, 4 * sizeof(float), nullptr, out.begin());
  for (int block = 0; block < 4; ++block) {
    EXPECT_EQ(out[block * 32], 2);
    EXPECT_TRUE(std::isnan(out[block * 32 + 1]));
    EXPECT_TRUE(std::isnan(out[block * 32 + 3]));
  }
}

TEST_F(CudaEmulatorTest, DeviceMemoryStartsAsNan) {
  void* data = nullptr;
  ASSERT_EQ(cudaMalloc(&data, 4 * sizeof(float)), cudaSuccess);
  EXPECT_TRUE(std::isnan(static_cast<float*>(data)[3]));
  cudaFree(data);
}

// ---- Sums
// -----------------------------------------------------------------------

template <bool kAtomic>
__global__ void CountThreads(int* count) {
  if (kAtomic) {
    atomicAdd(count, 1);
  } else {
    *count = *count + 1;
  }
}

// Fibers switch only at barriers, so a sum without an atomic looks right in
// every order: only tsan detects it.
TEST_F(CudaEmulatorTest, PlainAddWhereAnAtomicBelongsIsSeenByTsan) {
  if (ZERO_WITH_TSAN) {
    EXPECT_DEATH(InEachOrder(1,
                             [](int* out) {
                               Launch(CountThreads<false>, 2, 32, 0, nullptr,
                                      out);
                             }),
                 "data race");
  }
  ExpectRight({256}, [](int* out) {
    Launch(CountThreads<true>, 2, kThreads, 0, nullptr, out);
  });
}

// Adds the blocks' numbers in the order in which blocks run.
__global__ void SumAsTheyCome(float* sum) {
  if (threadIdx.x != 0) return;
  *sum = *sum * 0.5f + static_cast<float>(blockIdx.x);
}

TEST_F(CudaEmulatorTest, SumThatDependsOnTheOrderOfBlocksDiffers) {
  if (ZERO_WITH_TSAN) GTEST_SKIP() << "a race, and tsan says so";
  std::vector<float> sums;
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    DeviceArray<float> sum(1);
    Launch(SumAsTheyCome, 5, 32, 0, nullptr, sum.begin());
    sums.push_back(sum[0]);
  }
  EXPECT_NE(sums[0], sums[1]);
}

__global__ void WriteTheSame(int* out) { out[threadIdx.x] = blockIdx.x; }

TEST_F(CudaEmulatorTest, BlocksThatWriteTheSamePlaceAreSeen) {
  const auto run = [](int* out) {
    Launch(WriteTheSame, 3, 32, 0, nullptr, out);
  };
  if (ZERO_WITH_TSAN) {
    EXPECT_DEATH(InEachOrder(32, run), "data race");
    return;
  }
  const auto results = InEachOrder(32, run);
  EXPECT_NE(results[0], results[1]);
}

// ---- Grids
// ----------------------------------------------------------------------

__global__ void CountVisits(int* visits) {
  const unsigned block =
      blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread =
      threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&visits[block * 64 + thread], 1);
}

TEST_F(CudaEmulatorTest, EveryThreadOfEveryBlockRunsOnce) {
  constexpr int kVisits = 2 * 3 * 5 * 64;
  ExpectRight(std::vector<int>(kVisits, 1), [](int* out) {
    Launch(CountVisits, dim3(2, 3, 5), dim3(4, 8, 2), 0, nullptr, out);
  });
}

TEST_F(CudaEmulatorTest, EmptyGridLaunchesNothing) {
  const int64_t before = emulator::NumKernels();
  Launch(DivergentBarrier, dim3(4, 0, 1), 64, 0, nullptr);
  EXPECT_EQ(emulator::NumKernels(), before);
}

TEST_F(CudaEmulatorDeathTest, BlocksHaveWholeWarps) {
  EXPECT_DEATH(Launch(DivergentBarrier, 1, 48, 0, nullptr),
               "blocks of 48 x 1 x 1 threads: not 32, 64, ..., 1024");
}

__global__ void SumOfRows(const Bf16* x, float* sums, int width) {
  SHARED_ARRAY(float, scratch, kThreads / kWarpSize);
  float sum = 0;
  const Bf16* const row = x + static_cast<int64_t>(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += kThreads) sum += ToFloat(row[i]);
  sum = BlockReduce<Plus, kThreads>(sum, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

TEST_F(CudaEmulatorTest, SumsByAFixedTreeHaveTheSameBitsInEveryOrder) {
  constexpr int kRows = 3, kWidth = 1000;
  DeviceArray<Bf16> x(kRows * kWidth);
  for (int i = 0; i < kRows * kWidth; ++i) {
    x[i] = __float2bfloat16_rn(std::sin(static_cast<float>(i)));
  }
  std::vector<std::vector<float>> results;
  for (const Order order : kOrders) {
    emulator::SetOrder(order);
    DeviceArray<float> sums(kRows);
    Launch(SumOfRows, kRows, kThreads, 0, nullptr, x.begin(), sums.begin(),
           kWidth);
    results.push_back(sums.values());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// ---- Streams
// --------------------------------------------------------------------

__global__ void Increment(int* value) {
  if (threadIdx.x == 0) *value += 1;
}

// value = ((0 + 1) + 1) * 2 over two streams, with or without the event.
int TwoStreams(bool wait, uint64_t seed) {
  emulator::SetStreamSeed(seed);
  cudaStream_t first, second;
  cudaEvent_t event;
  ZERO_CUDA_CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
  ZERO_CUDA_CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
  ZERO_CUDA_CHECK(cudaEventCreate(&event));
  DeviceArray<int> value(1), copy(1, -1);
  for (int i = 0; i < 2; ++i) {
    Launch(Increment, 1, 32, 0, first, value.begin());
  }
  ZERO_CUDA_CHECK(cudaEventRecord(event, first));
  if (wait) ZERO_CUDA_CHECK(cudaStreamWaitEvent(second, event, 0));
  ZERO_CUDA_CHECK(cudaMemcpyAsync(copy.begin(), value.begin(), sizeof(int),
                                  cudaMemcpyDefault, second));
  ZERO_CUDA_CHECK(cudaStreamSynchronize(second));
  const int result = copy[0];
  ZERO_CUDA_CHECK(cudaStreamDestroy(first));
  ZERO_CUDA_CHECK(cudaStreamDestroy(second));
  ZERO_CUDA_CHECK(cudaEventDestroy(event));
  return result;
}

TEST_F(CudaEmulatorTest, MissingWaitForAnEventGivesAWrongResult) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(TwoStreams(true, seed), 2);
    wrong += TwoStreams(false, seed) != 2;
  }
  EXPECT_GT(wrong, 5);
}

TEST_F(CudaEmulatorTest, NothingRunsBeforeSomebodyWaits) {
  cudaStream_t stream;
  ZERO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceArray<int> value(1);
  Launch(Increment, 1, 32, 0, stream, value.begin());
  EXPECT_EQ(value[0], 0);
  while (cudaStreamQuery(stream) == cudaErrorNotReady) {
  }
  EXPECT_EQ(value[0], 1);
  ZERO_CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_F(CudaEmulatorTest, PinnedSourceIsReadLateAndPageableAtOnce) {
  cudaStream_t stream;
  ZERO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceArray<int> copies(2);
  void* pinned = nullptr;
  ZERO_CUDA_CHECK(cudaHostAlloc(&pinned, sizeof(int), cudaHostAllocDefault));
  int& late = *static_cast<int*>(pinned);
  int pageable = late = 1;
  for (int* const source : {&late, &pageable}) {
    ZERO_CUDA_CHECK(cudaMemcpyAsync(&copies[source == &pageable], source,
                                    sizeof(int), cudaMemcpyDefault, stream));
  }
  late = pageable = 2;  // a bug, for the one of them
  ZERO_CUDA_CHECK(cudaStreamSynchronize(stream));
  EXPECT_EQ(copies.values(), (std::vector<int>{2, 1}));
  ZERO_CUDA_CHECK(cudaFreeHost(pinned));
  ZERO_CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_F(CudaEmulatorTest, LaunchOnAStreamOfAnotherDeviceFails) {
  cudaStream_t stream;
  ZERO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceArray<int> value(1);
  ZERO_CUDA_CHECK(cudaSetDevice(1));
  EXPECT_THROW(Launch(Increment, 1, 32, 0, stream, value.begin()), DeviceError);
  ZERO_CUDA_CHECK(cudaSetDevice(0));
  ZERO_CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST_F(CudaEmulatorTest, ACallFailsWhenATestAsksForIt) {
  emulator::FailCall("launch", 2, cudaErrorLaunchFailure);
  DeviceArray<int> value(1);
  Launch(Increment, 1, 32, 0, nullptr, value.begin());
  EXPECT_THROW(Launch(Increment, 1, 32, 0, nullptr, value.begin()),
               DeviceError);
  EXPECT_EQ(value[0], 1);
}

}  // namespace
}  // namespace zero::cuda
