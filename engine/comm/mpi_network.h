// The processes that mpirun or srun started, connected by MPI.
//
// One thread makes all MPI calls, from init to finalize: it starts the others'
// requests and polls for completion, sleeping in between, since MPI itself only
// waits by spinning, which takes a core from the ranks. libmpi is loaded when a
// network is opened, see mpi_table.h.
#ifndef ZERO_ENGINE_COMM_MPI_NETWORK_H_
#define ZERO_ENGINE_COMM_MPI_NETWORK_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/comm/network.h"
#include "engine/comm/store.h"

namespace zero {

struct MpiTable;

// "", or why MPI cannot be used here: nothing is loaded.
absl::Status CheckMpi();

class MpiNetwork final : public Network {
 public:
  // Loads MPI and waits for all processes. Once per process.
  // Errors: Unimplemented, with the remedy, if zero was built without MPI;
  //         Unavailable with MPI's message; Cancelled if `patience` ends.
  static absl::StatusOr<std::shared_ptr<MpiNetwork>> Open(
      const Patience& patience);

  // "Open MPI v4.1.4".
  const std::string& library() const;

  // The text of process 0, for all: called by all, at start-up.
  absl::StatusOr<std::string> Broadcast(const std::string& text);

  std::unique_ptr<Exchange> Begin(const std::string& channel,
                                  std::vector<PeerMessages> messages) override;
  void Stop() override;

  // Says goodbye together with all other processes; false: some did not within
  // `timeout`.
  bool Finish(absl::Duration timeout);

  // Without Finish MPI is not finalized: the process must end.
  ~MpiNetwork() override;

 private:
  class Courier;
  class MpiExchange;

  MpiNetwork(int process, int num_processes, std::shared_ptr<Courier> courier);

  const std::shared_ptr<Courier> courier_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_NETWORK_H_
