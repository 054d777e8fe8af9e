// What ranks tell each other before, beside and after their collectives: a few
// short texts under names. Start-up (an id to connect by), the reason of a
// failure, the last handshake; never data.
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
  kPut = 'p',  // writes a value, over what the key has; returns nothing
  kPutFirst =
      'f',     // writes it where the key has none; returns what it has then
  kGet = 'g',  // returns what the key has; nothing: nobody has written it
};

// Errors:  Unavailable where whoever keeps the store is gone, or does not
//          answer: no call waits for longer than 20 s (TcpStore's kAnswer).
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

  // The door of all three.
  virtual absl::StatusOr<absl::optional<std::string>> Do(
      StoreCall call, const std::string& key, const std::string& value) = 0;
};

// What a process does while ranks gather at the start: schedulers start them
// minutes apart.
struct Patience {
  // Set by a signal: whoever waits gives up. Null: nobody asks.
  const std::atomic<bool>* stop = nullptr;
  // Is told once for whom or what this process waits, in one line. Null:
  // nobody.
  std::function<void(const std::string& line)> tell;
  absl::Duration tell_after = absl::Seconds(5);

  bool ends() const { return stop != nullptr && stop->load(); }
};

// Waits until somebody writes `key`. `what` is said of it where nobody does:
// Errors: DeadlineExceeded: "WHAT did not arrive within 2s"; Cancelled where
//         `patience` ends; why the run failed (StoredFailure); those of the
//         store.
absl::StatusOr<std::string> Await(Store& store, const std::string& key,
                                  const std::string& what,
                                  absl::Duration timeout,
                                  const Patience& patience = {});

// Waits until all ranks have called this with the same name.
// Errors: DeadlineExceeded with the ranks that did not; as Await.
absl::Status MeetInStore(Store& store, const std::string& name, int rank,
                         int world, absl::Duration timeout);
// Likewise; every rank brings a text and gets all of them, in rank order.
absl::StatusOr<std::vector<std::string>> ExchangeInStore(
    Store& store, const std::string& name, int rank, int world,
    const std::string& text, absl::Duration timeout);

// The ranks that have not come to `name`, which is one of these.
absl::StatusOr<std::vector<int>> MissingInStore(Store& store,
                                                const std::string& name,
                                                int world);

// Compares what `index` has with what 0 has, a line each. `who`: "nccl: rank",
// for the message.
// Errors: InvalidArgument with the first line that differs, which is the
//         failure of the run; as Await.
absl::Status MatchInStore(Store& store, const std::string& who, int index,
                          const std::vector<std::string>& own,
                          absl::Duration timeout,
                          const Patience& patience = {});

// Why the run failed, if it did: the first that anybody says counts. Returns
// what counts. `missing`: ranks for which others waited in vain.
absl::Status StoreFailure(Store& store, const absl::Status& failure,
                          const std::vector<int>& missing = {});
// OK: it did not fail. Errors of the store count as failures, too.
absl::Status StoredFailure(Store& store);
// The missing ranks of that failure, in rank order.
std::vector<int> StoredMissing(Store& store);

// Who keeps the store sent a process away, and why: the last one.
void StoreRefusal(Store& store, const std::string& reason);
// "; refused: ...", or nothing.
std::string StoredRefusal(Store& store);

// For ranks that are threads of one process.
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
