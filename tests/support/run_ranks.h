// The ranks of a test, as threads.
#ifndef ZERO_TESTS_SUPPORT_RUN_RANKS_H_
#define ZERO_TESTS_SUPPORT_RUN_RANKS_H_

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zero {

// Runs fn(rank) on `world` threads and waits for all of them.
// Errors: the first in time that any rank returned, or threw, with its rank.
inline absl::Status RunRanks(int world,
                             const std::function<absl::Status(int)>& fn) {
  std::mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      absl::Status status;
      try {
        status = fn(rank);
      } catch (const std::exception& error) {
        status = absl::InternalError(absl::StrCat("threw: ", error.what()));
      }
      if (status.ok()) return;
      std::lock_guard<std::mutex> lock(mutex);
      first.Update(absl::Status(
          status.code(), absl::StrCat("rank ", rank, ": ", status.message())));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_RUN_RANKS_H_
