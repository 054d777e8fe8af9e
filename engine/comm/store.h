// A few short named texts that ranks exchange outside their collectives: at
// start-up (an id to connect by), on a failure (its reason), and for the last
// handshake; never data.
#ifndef ZERO_ENGINE_COMM_STORE_H_
#define ZERO_ENGINE_COMM_STORE_H_

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace zero {

enum class StoreCall : char {
  kPut = 'p',       // writes a value, replacing any; returns nothing
  kPutFirst = 'f',  // writes it if the key has none; returns the key's value
  kGet = 'g',       // returns the key's value; nothing: not written
};

// Errors:  Unavailable if the store's server is gone or does not answer: no
//          call waits longer than 20 s (TcpStore's kAnswer).
// Threads: used by any.
class Store {
 public:
  virtual ~Store() = default;

  absl::Status Put(const std::string& key, const std::string& value) {
    return Do(StoreCall::kPut, key, value).status();
  }
  absl::StatusOr<std::string> PutFirst(const std::string& key,
                                       const std::string& value);
  absl::StatusOr<absl::optional<std::string>> Get(const std::string& key) {
    return Do(StoreCall::kGet, key, "");
  }

  // Performs one request of any of the three kinds.
  virtual absl::StatusOr<absl::optional<std::string>> Do(
      StoreCall call, const std::string& key, const std::string& value) = 0;
};

// How a process waits for ranks to start, which schedulers may start minutes
// apart.
struct Patience {
  // Set by a signal: stop waiting. Null: never.
  const std::atomic<bool>* stop = nullptr;
  // Receives, once, a line that says what this process waits for. Null: nobody.
  std::function<void(const std::string& line)> tell;
  absl::Duration tell_after = absl::Seconds(5);

  bool ends() const { return stop != nullptr && stop->load(); }
};

// Waits until `key` is written. `what` names the awaited value in messages.
// Errors: DeadlineExceeded: "WHAT did not arrive within 2s"; Cancelled if
//         `patience` ends; why the run failed (StoredFailure); those of the
//         store.
absl::StatusOr<std::string> Await(Store& store, const std::string& key,
                                  const std::string& what,
                                  absl::Duration timeout,
                                  const Patience& patience = {});

// Waits until all ranks have called this with the same name.
// Errors: DeadlineExceeded with the missing ranks; those of Await.
absl::Status MeetInStore(Store& store, const std::string& name, int rank,
                         int world, absl::Duration timeout);
// The same; every rank passes a text and gets all of them, in rank order.
absl::StatusOr<std::vector<std::string>> ExchangeInStore(
    Store& store, const std::string& name, int rank, int world,
    const std::string& text, absl::Duration timeout);

// The ranks that have not arrived at `name`, one of the barriers above.
absl::StatusOr<std::vector<int>> MissingInStore(Store& store,
                                                const std::string& name,
                                                int world);

// Compares the lines of rank `index` with those of rank 0. `who`: "nccl: rank",
// for the message.
// Errors: InvalidArgument with the first line that differs, which becomes the
//         run's failure; those of Await.
absl::Status MatchInStore(Store& store, const std::string& who, int index,
                          const std::vector<std::string>& own,
                          absl::Duration timeout,
                          const Patience& patience = {});

// Records why the run failed. The first report counts and is returned.
// `missing`: ranks that others waited for in vain.
absl::Status StoreFailure(Store& store, const absl::Status& failure,
                          const std::vector<int>& missing = {});
// Why the run failed; OK if it did not. Errors of the store count as failures.
absl::Status StoredFailure(Store& store);
// The missing ranks of that failure, in rank order.
std::vector<int> StoredMissing(Store& store);

// Records the last process that the store's server refused, and why.
void StoreRefusal(Store& store, const std::string& reason);
// "; refused: ...", or nothing.
std::string StoredRefusal(Store& store);

// A store for ranks that are threads of one process.
class MemoryStore final : public Store {
 public:
  absl::StatusOr<absl::optional<std::string>> Do(
      StoreCall call, const std::string& key,
      const std::string& value) override;

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_STORE_H_
