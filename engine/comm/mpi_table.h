// The MPI functions that zero calls, as a table: out/zero_mpi.so fills it
// (engine/comm/libmpi/plugin.cc) and is the only file linked with libmpi. It is
// loaded only to connect processes.
#ifndef ZERO_ENGINE_COMM_MPI_TABLE_H_
#define ZERO_ENGINE_COMM_MPI_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "engine/comm/network.h"

namespace zero {

// Threads: only the thread that calls `init`.
struct MpiTable {
  // The table's version; always the first member.
  int version;

  // Errors are null, or a text that is valid until the next call.
  // MPI_Init_thread. `library`: "Open MPI v4.1.4".
  const char* (*init)(int* process, int* num_processes, const char** library);
  // Blocks; at start-up.
  const char* (*broadcast)(void* data, int bytes, int root);

  // Begins to send or receive `num_runs` runs as one message of at most 2 GiB.
  // `tag`: any, the same at both ends.
  const char* (*start)(bool sends, const MemoryRun* runs, int num_runs,
                       int peer, uint32_t tag, void* owner);
  // Finds started messages that have ended since the last call. `owners`: as
  // passed to `start`. `errors`: null, or the failure. Both have room for all
  // started messages plus one. Returns how many ended, or -1 and errors[0].
  int (*poll)(void** owners, const char** errors);

  const char* (*finalize)();
  // Ends all processes.
  void (*abort)(int code);
};

inline constexpr int kMpiTableVersion = 1;
inline constexpr char kMpiPlugin[] = "zero_mpi.so";
inline constexpr char kMpiTableSymbol[] = "ZeroMpiTable";

// The symbol that the plugin exports.
using MpiTableFn = const MpiTable* (*)();

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_TABLE_H_
