#include "engine/comm/tcp_store.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"

namespace zero {
namespace {

constexpr char kGreeting[] = "zero store 2";
constexpr size_t kLargestFrame = 1 << 20;
// How long the server waits for ranks that have not said goodbye and may ask
// why it ends; on busy cores a rank may sleep for seconds.
constexpr absl::Duration kLinger = absl::Seconds(5);
// How long an answer may take: the server only looks up a key.
constexpr absl::Duration kAnswer = absl::Seconds(20);

// Kinds of frames besides StoreCall's; the last three are answers.
enum Kind : char {
  kHello = 'h',
  kBye = 'b',
  kValue = 'v',
  kNothing = 'n',
  kRefused = 'r',
};

size_t ReadSize(const char* bytes) {
  uint32_t big_endian;
  std::memcpy(&big_endian, bytes, sizeof(big_endian));
  return ntohl(big_endian);
}

std::string Framed(const std::string& text) {
  const uint32_t size = htonl(static_cast<uint32_t>(text.size()));
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + text;
}

std::string SystemError() { return std::strerror(errno); }

bool SendAll(int socket, const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n =
        send(socket, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += n;
  }
  return true;
}

// Returns false if the other end has closed, or was silent for too long
// (errno).
bool ReceiveAll(int socket, char* to, size_t size) {
  for (size_t received = 0; received < size;) {
    const ssize_t n = recv(socket, to + received, size - received, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ECONNRESET;
    if (n <= 0) return false;
    received += n;
  }
  return true;
}

// Returns false as ReceiveAll does, or if the frame has a size that we never
// send.
bool ReceiveFrame(int socket, std::string* frame) {
  char size_bytes[4];
  if (!ReceiveAll(socket, size_bytes, sizeof(size_bytes))) return false;
  const size_t size = ReadSize(size_bytes);
  errno = EPROTO;
  if (size == 0 || size > kLargestFrame) return false;
  frame->resize(size);
  return ReceiveAll(socket, frame->data(), size);
}

void SetOptions(int socket, absl::Duration send, absl::Duration receive) {
  const timeval send_tv = absl::ToTimeval(send);
  const timeval receive_tv = absl::ToTimeval(receive);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &send_tv, sizeof(send_tv));
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &receive_tv, sizeof(receive_tv));
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A machine that vanishes closes no connection: probe it.
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  const int idle = 10, interval = 5, count = 3;
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof(count));
}

// All addresses of a host name and port; null: none, with the reason.
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Addresses Resolve(const char* host, int port, int flags, std::string* error) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* first = nullptr;
  const int code =
      getaddrinfo(host, absl::StrCat(port).c_str(), &hints, &first);
  if (code != 0) *error = gai_strerror(code);
  return Addresses(first, &freeaddrinfo);
}

// A listening socket, or -1 and errno.
int ListenAt(const addrinfo& address) {
  const int socket = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(socket, address.ai_addr, address.ai_addrlen) == 0 &&
      listen(socket, 1024) == 0) {
    return socket;
  }
  const int error = errno;
  close(socket);
  errno = error;
  return -1;
}

int PortOf(int socket) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  getsockname(socket, reinterpret_cast<sockaddr*>(&name), &size);
  return ntohs(name.ss_family == AF_INET6
                   ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                   : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

}  // namespace

// ---- Server ---------------------------------------------------------------

TcpStoreServer::TcpStoreServer(int listener, int port, int world,
                               std::string who)
    : listener_(listener),
      port_(port),
      world_(world),
      who_(std::move(who)),
      is_here_(world),
      accepts_([this] { Accept(); }) {}

TcpStoreServer::~TcpStoreServer() {
  shutdown(listener_, SHUT_RDWR);
  accepts_.join();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    left_.wait_for(lock, absl::ToChronoNanoseconds(kLinger),
                   [this] { return sockets_.empty(); });
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  for (std::thread& thread : answers_) thread.join();
  close(listener_);
}

void TcpStoreServer::Accept() {
  while (true) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0 && errno == EINVAL) return;  // shut down
    if (socket < 0) {
      absl::SleepFor(absl::Milliseconds(10));  // no descriptor is free
      continue;
    }
    // A rank may be silent for any time.
    SetOptions(socket, absl::Seconds(1), absl::ZeroDuration());
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      answers_.emplace_back([this, socket] { Serve(socket); });
      sockets_.insert(socket);
    } catch (const std::system_error&) {  // no thread is free: it asks again
      close(socket);
    }
  }
}

// Serves a socket until the peer closes it or breaks the protocol.
void TcpStoreServer::Serve(int socket) {
  Peer peer;
  std::string frame, answer;
  while (ReceiveFrame(socket, &frame)) {
    answer = Answer(peer, frame);
    if (!SendAll(socket, Framed(answer)) || answer[0] == kRefused) break;
  }
  if (peer.rank >= 0 && !peer.said_bye) {
    StoreFailure(
        values_,
        absl::UnavailableError(absl::StrCat(
            who_, " ", peer.rank,
            " ended without reporting an error: its connection closed")))
        .IgnoreError();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  sockets_.erase(socket);
  close(socket);
  left_.notify_all();
}

std::string TcpStoreServer::Answer(Peer& one, const std::string& frame) {
  if (frame[0] == kHello) return Greet(one, frame.substr(1));
  if (one.rank < 0) return std::string(1, kRefused) + "no greeting";
  if (frame[0] == kBye) {
    one.said_bye = true;
    return std::string(1, kNothing);
  }
  const size_t key_size = frame.size() >= 5 ? ReadSize(&frame[1]) : 0;
  if (frame.size() < 5 + key_size) {
    return std::string(1, kRefused) + "a request cut short";
  }
  const std::string key = frame.substr(5, key_size);
  const std::string value = frame.substr(5 + key_size);
  const auto call = static_cast<StoreCall>(frame[0]);
  switch (call) {
    case StoreCall::kPut:
    case StoreCall::kPutFirst:
    case StoreCall::kGet: {
      const absl::optional<std::string> found = *values_.Do(call, key, value);
      return found.has_value() ? std::string(1, kValue) + *found
                               : std::string(1, kNothing);
    }
  }
  return std::string(1, kRefused) + "a request of an unknown kind";
}

std::string TcpStoreServer::Greet(Peer& one, const std::string& text) {
  const auto refuse = [this](const std::string& reason) {
    StoreRefusal(values_, reason);
    return std::string(1, kRefused) + reason;
  };
  const std::vector<std::string> parts = absl::StrSplit(text, '\n');
  int rank = -1, world = 0;
  if (parts.size() != 3 || parts[0] != kGreeting ||
      !absl::SimpleAtoi(parts[1], &rank) ||
      !absl::SimpleAtoi(parts[2], &world)) {
    return refuse("this port belongs to another version of zero");
  }
  if (world != world_) {
    return refuse(absl::StrCat("rank ", rank, " has a world of ", world,
                               ", rank 0 has ", world_,
                               ": give all ranks the same WORLD_SIZE"));
  }
  if (rank < 0 || rank >= world_) {
    return refuse(absl::StrCat("rank ", rank, " is not in [0, ", world_, ")"));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_here_[rank]) {
    return refuse(absl::StrCat(
        "rank ", rank,
        " has joined already: every process needs a RANK of its own"));
  }
  is_here_[rank] = true;
  one.rank = rank;
  return std::string(1, kNothing);
}

std::string AddressText(const TcpStoreAddress& address) {
  return absl::StrCat(address.host, ":", address.port);
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Listen(
    const TcpStoreAddress& address, int world, const std::string& who) {
  // A wildcard IPv6 socket takes IPv4 as well; without IPv6, the other address
  // of the list is IPv4's.
  const bool local = IsLoopback(address.host);
  std::string reason;
  const Addresses found = Resolve(local ? address.host.c_str() : nullptr,
                                  address.port, AI_PASSIVE, &reason);
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* one = found.get(); one != nullptr;
         one = one->ai_next) {
      if (one->ai_family != family) continue;
      const int socket = ListenAt(*one);
      if (socket >= 0) {
        return std::unique_ptr<TcpStoreServer>(
            new TcpStoreServer(socket, PortOf(socket), world, who));
      }
      reason = SystemError();
      if (errno == EADDRINUSE) {
        return absl::UnavailableError(
            absl::StrCat("rank 0 cannot listen at port ", address.port, ": ",
                         reason, "; choose another MASTER_PORT"));
      }
    }
  }
  return absl::UnavailableError(absl::StrCat(
      "rank 0 cannot listen at ", AddressText(address), ": ", reason));
}

// ---- Client ---------------------------------------------------------------

namespace {

// Whether `events` come to the socket while `waits` says so; else errno.
bool IsReady(int socket, int16_t events, const std::function<bool()>& waits) {
  const absl::Time deadline = absl::Now() + kAnswer;
  pollfd fd = {socket, events, 0};
  while (poll(&fd, 1, /*milliseconds=*/50) <= 0) {
    if (waits() && absl::Now() < deadline) continue;
    errno = ETIMEDOUT;
    return false;
  }
  return true;
}

// Whether `socket` connects to `address` while `waits` says so; else errno.
bool Connects(int socket, const addrinfo& address,
              const std::function<bool()>& waits) {
  if (connect(socket, address.ai_addr, address.ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  // The wait has an end: another address may answer.
  if (!IsReady(socket, POLLOUT, waits)) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  return error == 0;
}

// If nothing listens yet, a socket of the same machine that was given the same
// port connects to itself.
bool IsItsOwnPeer(int socket) {
  sockaddr_storage here = {}, there = {};
  socklen_t size = sizeof(here), peer_size = sizeof(there);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&here), &size) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&there), &peer_size) ==
             0 &&
         std::memcmp(&here, &there, sizeof(here)) == 0;
}

// A connected socket, or -1 and why not.
int TryConnect(const TcpStoreAddress& address,
               const std::function<bool()>& waits, std::string* reason) {
  const Addresses found =
      Resolve(address.host.c_str(), address.port, /*flags=*/0, reason);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    const int socket =
        ::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket < 0) continue;
    const bool connects = Connects(socket, *one, waits);
    if (connects && IsItsOwnPeer(socket)) {
      // Closed by a reset: else the port would not be free for rank 0.
      const linger none = {.l_onoff = 1, .l_linger = 0};
      setsockopt(socket, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
      errno = ECONNREFUSED;
    } else if (connects) {
      fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) & ~O_NONBLOCK);
      SetOptions(socket, kAnswer, kAnswer);
      return socket;
    }
    *reason = SystemError();
    close(socket);
  }
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStore>> TcpStore::Connect(
    const TcpStoreAddress& address, int rank, int world, absl::Duration timeout,
    const Patience& patience) {
  const std::string waits_for = absl::StrCat(
      "rank ", rank, " waits for rank 0 at ", AddressText(address));
  const absl::Time start = absl::Now();
  std::string reason = "no answer";
  bool told = patience.tell == nullptr;
  const auto waits = [&] {
    const absl::Time now = absl::Now();
    if (!told && now >= start + patience.tell_after) {
      told = true;
      patience.tell(absl::StrCat(waits_for, " (timeout ",
                                 absl::FormatDuration(timeout), "): ", reason));
    }
    return now < start + timeout && !patience.ends();
  };
  int socket = TryConnect(address, waits, &reason);
  while (socket < 0 && waits()) {
    absl::SleepFor(absl::Milliseconds(50));
    socket = TryConnect(address, waits, &reason);
  }
  const absl::Status cancelled = absl::CancelledError(
      absl::StrCat("stopped by a signal while ", waits_for));
  if (socket < 0 && patience.ends()) return cancelled;
  if (socket < 0) {
    return absl::DeadlineExceededError(absl::StrCat(
        "rank ", rank, " could not reach rank 0 at ", AddressText(address),
        " within ", absl::FormatDuration(timeout), ": ", reason,
        "; is rank 0 running, and are MASTER_ADDR and MASTER_PORT its own?"));
  }
  std::unique_ptr<TcpStore> store(new TcpStore(socket, AddressText(address)));
  // The peer may be another program, which does not answer.
  reason = "no answer";
  const absl::Status greeted =
      store
          ->Ask(absl::StrCat(std::string(1, kHello), kGreeting, "\n", rank,
                             "\n", world),
                waits)
          .status();
  if (absl::IsUnavailable(greeted) && patience.ends()) return cancelled;
  ZERO_RETURN_IF_ERROR(greeted);
  return store;
}

TcpStore::~TcpStore() {
  Ask(std::string(1, kBye)).IgnoreError();
  close(socket_);
}

absl::StatusOr<std::string> TcpStore::Ask(const std::string& request,
                                          const std::function<bool()>& waits) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!broken_.ok()) return broken_;
  std::string answer;
  if (!SendAll(socket_, Framed(request)) ||
      (waits != nullptr && !IsReady(socket_, POLLIN, waits)) ||
      !ReceiveFrame(socket_, &answer)) {
    broken_ = absl::UnavailableError(absl::StrCat(
        "rank 0, which keeps the store at ", where_, ", is gone: ",
        errno == EAGAIN
            ? absl::StrCat("no answer within ", absl::FormatDuration(kAnswer))
            : SystemError()));
  } else if (answer[0] == kRefused) {
    broken_ = absl::InvalidArgumentError(
        absl::StrCat("the store at ", where_, ": ", answer.substr(1)));
  }
  if (!broken_.ok()) return broken_;
  return answer;
}

absl::StatusOr<absl::optional<std::string>> TcpStore::Do(
    StoreCall call, const std::string& key, const std::string& value) {
  const absl::StatusOr<std::string> answer = Ask(absl::StrCat(
      std::string(1, static_cast<char>(call)), Framed(key), value));
  if (!answer.ok()) return answer.status();
  if (answer->front() != kValue) return absl::optional<std::string>();
  return absl::optional<std::string>(answer->substr(1));
}

}  // namespace zero
