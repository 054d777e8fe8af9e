// Messages between the processes of a run, which all have the same number of
// consecutive ranks as threads. This is LocalGroup's interface to MPI, or to a
// fake network.
#ifndef ZERO_ENGINE_COMM_NETWORK_H_
#define ZERO_ENGINE_COMM_NETWORK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace zero {

// Consecutive bytes of a message.
struct MemoryRun {
  char* data = nullptr;
  int64_t bytes = 0;
};

// The data for another process and the data from it, each as one message. No
// runs: no message.
struct PeerMessages {
  int process = 0;
  std::vector<MemoryRun> send, receive;
};

// Messages of one channel between two processes arrive in the order in which
// both began them.
// Threads: used by any.
class Network {
 public:
  Network(int process, int num_processes)
      : process_(process), num_processes_(num_processes) {}
  virtual ~Network() = default;

  int process() const { return process_; }
  int num_processes() const { return num_processes_; }
  // The process of `rank` among `world`.
  int ProcessOf(int rank, int world) const {
    return rank / (world / num_processes_);
  }

  // Messages in flight. It uses the messages' memory until it is destroyed.
  class Exchange {
   public:
    // Ends the exchange as Stop does, unless Await has ended it.
    virtual ~Exchange() = default;
    // Waits until all messages have been sent and received.
    // Errors: DeadlineExceeded: still in flight; Cancelled after Stop; else the
    //         network's own. After any but DeadlineExceeded, the memory is no
    //         longer used.
    virtual absl::Status Await(absl::Duration timeout) = 0;
  };

  // Starts the messages of a channel, which has the same name in all processes.
  virtual std::unique_ptr<Exchange> Begin(
      const std::string& channel, std::vector<PeerMessages> messages) = 0;

  // Ends all exchanges, for good: the run has failed. Does not wait.
  virtual void Stop() = 0;

 private:
  const int process_;
  const int num_processes_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NETWORK_H_
