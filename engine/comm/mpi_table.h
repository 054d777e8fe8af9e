// What zero calls of MPI, as a table of functions: out/zero_mpi.so fills it
// (engine/comm/libmpi/plugin.cc) and alone is linked with libmpi. It is loaded
// where processes are to be connected and else costs nothing.
#ifndef ZERO_ENGINE_COMM_MPI_TABLE_H_
#define ZERO_ENGINE_COMM_MPI_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "engine/comm/network.h"

namespace zero {

// Threads: all by the thread that calls `init`.
struct MpiTable {
  // What the plugin and its caller agree on; the first member, for ever.
  int version;

  // Errors are null, or a text that stays until the next call.
  // MPI_Init_thread. `library`: "Open MPI v4.1.4".
  const char* (*init)(int* process, int* num_processes, const char** library);
  // Blocks; at start-up.
  const char* (*broadcast)(void* data, int bytes, int root);

  // Begins to send or receive `num_runs` runs as one message of at most 2 GiB.
  // `tag`: any, the same at both ends.
  const char* (*start)(bool sends, const MemoryRun* runs, int num_runs,
                       int peer, uint32_t tag, void* owner);
  // Which of what was started has ended since. `owners`: what `start` was
  // given; `errors`: null, or what went wrong with it; both with room for all
  // that was started, and one more. Returns how many, or -1 and errors[0].
  int (*poll)(void** owners, const char** errors);

  const char* (*finalize)();
  // Ends all processes.
  void (*abort)(int code);
};

inline constexpr int kMpiTableVersion = 1;
inline constexpr char kMpiPlugin[] = "zero_mpi.so";
inline constexpr char kMpiTableSymbol[] = "ZeroMpiTable";

// What the plugin exports under that name.
using MpiTableFn = const MpiTable* (*)();

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_TABLE_H_
