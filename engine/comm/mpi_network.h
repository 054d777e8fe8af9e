// The processes that mpirun or srun started, connected by MPI.
//
// One thread makes all MPI calls, from init to finalize. It starts the requests
// of all ranks and polls for their completion, sleeping in between: MPI itself
// only waits by spinning, which would take a core from the ranks. libmpi is
// loaded when a network is opened, see mpi_table.h.
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

// Why MPI cannot be used here, or "" if it can. Loads nothing.
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

  // Sends the text of process 0 to all processes, which all call this at
  // start-up.
  absl::StatusOr<std::string> Broadcast(const std::string& text);

  std::unique_ptr<Exchange> Begin(const std::string& channel,
                                  std::vector<PeerMessages> messages) override;
  void Stop() override;

  // Says goodbye together with all other processes. Returns false if one of
  // them did not within `timeout`.
  bool Finish(absl::Duration timeout);

  // Without Finish, MPI is not finalized, and the process must end.
  ~MpiNetwork() override;

 private:
  class Courier;
  class MpiExchange;

  MpiNetwork(int process, int num_processes, std::shared_ptr<Courier> courier);

  const std::shared_ptr<Courier> courier_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_NETWORK_H_
