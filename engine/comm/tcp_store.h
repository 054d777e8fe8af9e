// The store of a run of several processes. Rank 0 serves it; every rank,
// including rank 0, has one connection to it.
//
// If a connection ends without a goodbye, its rank has died: the server tells
// all others (StoredFailure). A rank that cannot reach the server knows that
// rank 0 died.
// Wire: frames of a 4-byte big-endian size and that many bytes; a request's
//       first byte is its kind, an answer's whether there is a value. Every
//       rank first sends a greeting with a version and its world. Not a
//       protocol for untrusted networks: no encryption or authentication.
#ifndef ZERO_ENGINE_COMM_TCP_STORE_H_
#define ZERO_ENGINE_COMM_TCP_STORE_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/comm/store.h"

namespace zero {

struct TcpStoreAddress {
  std::string host;  // a name or a number
  int port = 0;
};

// "127.0.0.1:29500".
std::string AddressText(const TcpStoreAddress& address);

// Whether `host` names the machine itself: "localhost", 127.0.0.1.
bool IsLoopback(const std::string& host);

// Rank 0's part. One thread accepts connections; each connection has a thread
// that answers.
class TcpStoreServer {
 public:
  // Listens only for this machine if the host is its loopback, else on all
  // addresses. Port 0: any free one.
  // `who`: the clients' name in messages: "rank".
  // Errors: Unavailable with the port, e.g. another program listens there.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> Listen(
      const TcpStoreAddress& address, int world,
      const std::string& who = "rank");
  // Waits until all connected ranks have left, but at most 5 s: they may still
  // ask why the run failed.
  ~TcpStoreServer();

  int port() const { return port_; }

 private:
  struct Peer {
    int rank = -1;  // until it has greeted
    bool said_bye = false;
  };

  TcpStoreServer(int listener, int port, int world, std::string who);
  void Accept();
  void Serve(int socket);
  std::string Answer(Peer& one, const std::string& frame);
  std::string Greet(Peer& one, const std::string& text);

  const int listener_;
  const int port_;
  const int world_;
  const std::string who_;
  MemoryStore values_;
  std::vector<std::thread> answers_;  // added by the accepting thread

  std::mutex mutex_;  // guards all below
  std::condition_variable left_;
  std::vector<bool> is_here_;  // by rank: it has connected, and may have left
  std::set<int> sockets_;

  std::thread accepts_;  // last: it uses all above
};

class TcpStore final : public Store {
 public:
  // Connects as `rank` of `world`; retries until `timeout`, since rank 0 may
  // start last.
  // Errors: DeadlineExceeded with the address and the last reason (refused, no
  //         such host); Cancelled if `patience` ends; InvalidArgument with the
  //         server's message: another world, a rank that has joined already,
  //         another program.
  static absl::StatusOr<std::unique_ptr<TcpStore>> Connect(
      const TcpStoreAddress& address, int rank, int world,
      absl::Duration timeout, const Patience& patience = {});
  // Says goodbye.
  ~TcpStore() override;

  absl::StatusOr<absl::optional<std::string>> Do(
      StoreCall call, const std::string& key,
      const std::string& value) override;

 private:
  TcpStore(int socket, std::string where)
      : socket_(socket), where_(std::move(where)) {}

  // Sends one request and returns its answer. Gives up when `waits`, which is
  // polled, returns false. Null: never gives up.
  absl::StatusOr<std::string> Ask(const std::string& request,
                                  const std::function<bool()>& waits = nullptr);

  const int socket_;
  const std::string where_;  // "127.0.0.1:29500"
  std::mutex mutex_;         // guards the socket and all below
  absl::Status broken_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_TCP_STORE_H_
