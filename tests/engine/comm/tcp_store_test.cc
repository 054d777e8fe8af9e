#include "engine/comm/tcp_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/launch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr char kHost[] = "127.0.0.1";
constexpr absl::Duration kSoon = absl::Seconds(10);

std::unique_ptr<TcpStoreServer> Server(int world) {
  auto server = TcpStoreServer::Listen({kHost, 0}, world);
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

std::unique_ptr<TcpStore> Client(const TcpStoreServer& server, int rank,
                                 int world) {
  auto store = TcpStore::Connect({kHost, server.port()}, rank, world, kSoon);
  EXPECT_TRUE(store.ok()) << store.status();
  return *std::move(store);
}

// A connected plain TCP socket.
int RawSocket(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  inet_pton(AF_INET, kHost, &address.sin_addr);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  return fd;
}

TEST(TcpStoreTest, RanksExchangeTexts) {
  MemoryStore store;
  EXPECT_EQ(RunRanks(3,
                     [&](int rank) {
                       const auto texts =
                           ExchangeInStore(store, "names", rank, 3,
                                           absl::StrCat("rank ", rank), kSoon);
                       EXPECT_EQ(*texts, std::vector<std::string>(
                                             {"rank 0", "rank 1", "rank 2"}));
                       return texts.status();
                     }),
            absl::OkStatus());
}

TEST(TcpStoreTest, WhatOneRankWritesAllRead) {
  const auto server = Server(2);
  const auto a = Client(*server, 0, 2), b = Client(*server, 1, 2);
  EXPECT_FALSE((*b->Get("key")).has_value());
  EXPECT_EQ(a->Put("key", "one"), absl::OkStatus());
  EXPECT_EQ(**b->Get("key"), "one");
  EXPECT_EQ(b->Put("key", "two"), absl::OkStatus());
  EXPECT_EQ(**a->Get("key"), "two");
  EXPECT_EQ(*a->PutFirst("key", "three"), "two");
  EXPECT_EQ(*a->PutFirst("other", "three"), "three");
  EXPECT_EQ(**b->Get("other"), "three");
}

TEST(TcpStoreTest, AnyBytesGoThrough) {
  const auto server = Server(1);
  const auto store = Client(*server, 0, 1);
  std::string bytes;
  for (int i = 0; i < 100'000; ++i) bytes += static_cast<char>(i * 7);
  const std::string key("a\0b\n", 4);
  EXPECT_EQ(store->Put(key, bytes), absl::OkStatus());
  EXPECT_EQ(**store->Get(key), bytes);
  EXPECT_EQ(store->Put(key, ""), absl::OkStatus());
  EXPECT_EQ(**store->Get(key), "");
}

TEST(TcpStoreTest, ManyRanksMeet) {
  constexpr int kWorld = 12;
  const auto server = Server(kWorld);
  EXPECT_EQ(RunRanks(kWorld,
                     [&](int rank) -> absl::Status {
                       const auto store = Client(*server, rank, kWorld);
                       for (const char* name : {"start", "middle", "end"}) {
                         const absl::Status met =
                             MeetInStore(*store, name, rank, kWorld, kSoon);
                         if (!met.ok()) return met;
                       }
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
}

TEST(TcpStoreTest, WhoDoesNotComeIsNamed) {
  const auto server = Server(4);
  const auto a = Client(*server, 0, 4), b = Client(*server, 2, 4);
  EXPECT_EQ(b->Put("start/2", ""), absl::OkStatus());
  const absl::Status met =
      MeetInStore(*a, "start", 0, 4, absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(met));
  EXPECT_EQ(met.message(),
            "rank 1 and rank 3 did not arrive at \"start\" within 50ms");
}

TEST(TcpStoreTest, RankZeroMayComeLast) {
  const ReservedPort reserved;
  const int port = reserved.number();
  std::unique_ptr<TcpStoreServer> server;
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(300));
    server = *TcpStoreServer::Listen({kHost, port}, 2);
  });
  const auto store = TcpStore::Connect({kHost, port}, 1, 2, kSoon);
  late.join();
  EXPECT_TRUE(store.ok()) << store.status();
}

TEST(TcpStoreTest, NobodyListens) {
  const ReservedPort port;
  const auto store =
      TcpStore::Connect({kHost, port.number()}, 3, 4, absl::Milliseconds(120));
  EXPECT_TRUE(absl::IsDeadlineExceeded(store.status()));
  EXPECT_EQ(
      store.status().message(),
      absl::StrCat("rank 3 could not reach rank 0 at 127.0.0.1:", port.number(),
                   " within 120ms: Connection refused; is rank 0 "
                   "running, and are MASTER_ADDR and MASTER_PORT its "
                   "own?"));
}

TEST(TcpStoreTest, AnUnknownHostIsNamed) {
  const auto store = TcpStore::Connect({"no.such.host.invalid", 1}, 1, 2,
                                       absl::Milliseconds(50));
  EXPECT_THAT(std::string(store.status().message()),
              HasSubstr("could not reach rank 0 at no.such.host.invalid:1"));
}

TEST(TcpStoreTest, APortThatIsTakenIsNamed) {
  const auto server = Server(2);
  const auto second = TcpStoreServer::Listen({kHost, server->port()}, 2);
  EXPECT_TRUE(absl::IsUnavailable(second.status()));
  EXPECT_EQ(second.status().message(),
            absl::StrCat("rank 0 cannot listen at port ", server->port(),
                         ": Address already in use; choose another "
                         "MASTER_PORT"));
}

TEST(TcpStoreTest, AnotherWorldIsRefused) {
  const auto server = Server(4);
  const auto store = TcpStore::Connect({kHost, server->port()}, 1, 8, kSoon);
  EXPECT_TRUE(absl::IsInvalidArgument(store.status()));
  EXPECT_THAT(std::string(store.status().message()),
              HasSubstr("rank 1 has a world of 8, rank 0 has 4: give all ranks "
                        "the same WORLD_SIZE"));
}

TEST(TcpStoreTest, ARankComesOnce) {
  const auto server = Server(4);
  const auto first = Client(*server, 1, 4);
  const auto second = TcpStore::Connect({kHost, server->port()}, 1, 4, kSoon);
  EXPECT_THAT(
      std::string(second.status().message()),
      HasSubstr(
          "rank 1 has joined already: every process needs a RANK of its own"));
  EXPECT_EQ(first->Put("still", "here"), absl::OkStatus());
}

TEST(TcpStoreTest, StrangersAreSentAway) {
  const auto server = Server(2);
  const auto store = Client(*server, 0, 2);
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\0\0\0\2pq", 6),
        std::string("\0\0\0\0", 4)}) {
    const int fd = RawSocket(server->port());
    EXPECT_EQ(send(fd, words.data(), words.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(words.size()));
    char answer[256];
    while (recv(fd, answer, sizeof(answer), 0) > 0) {
    }
    close(fd);
  }
  EXPECT_EQ(store->Put("still", "here"), absl::OkStatus());
  EXPECT_EQ(StoredFailure(*store), absl::OkStatus());
}

TEST(TcpStoreTest, TheFirstFailureCountsForAll) {
  const auto server = Server(2);
  const auto a = Client(*server, 0, 2), b = Client(*server, 1, 2);
  EXPECT_EQ(StoredFailure(*a), absl::OkStatus());
  const absl::Status first = absl::DataLossError("first\nof two lines");
  EXPECT_EQ(StoreFailure(*b, first), first);
  EXPECT_EQ(StoreFailure(*a, absl::AbortedError("second")), first);
  EXPECT_EQ(StoredFailure(*a), first);
  // Waiting ranks learn of it.
  EXPECT_EQ(Await(*a, "never", "it", kSoon).status(), first);
}

TEST(TcpStoreTest, ASignalEndsAWait) {
  MemoryStore store;
  const std::atomic<bool> stop = true;
  EXPECT_EQ(
      Await(store, "never", "it", kSoon, {.stop = &stop}).status(),
      absl::CancelledError("it did not arrive before a signal ended the wait"));
}

TEST(TcpStoreTest, AFailureHasTheRanksThatAreMissing) {
  MemoryStore store;
  EXPECT_TRUE(StoredMissing(store).empty());
  const absl::Status first = absl::UnavailableError("first\nof two lines");
  EXPECT_EQ(StoreFailure(store, first, {1, 3}), first);
  EXPECT_EQ(StoreFailure(store, absl::AbortedError("second"), {2}), first);
  EXPECT_EQ(StoredMissing(store), (std::vector<int>{1, 3}));
}

// Another program has the port, and expects another protocol.
TEST(TcpStoreTest, WhoGetsNoAnswerCanBeStopped) {
  const ReservedPort taken;
  ASSERT_EQ(listen(taken.fd(), 1), 0);
  const int port = taken.number();
  std::atomic<bool> stop = false;
  std::string line;
  Patience patience{.stop = &stop,
                    .tell = [&](const std::string& said) { line = said; },
                    .tell_after = absl::ZeroDuration()};
  const absl::Time start = absl::Now();
  std::thread signal([&] {
    absl::SleepFor(absl::Milliseconds(200));
    stop = true;
  });
  const auto store = TcpStore::Connect({kHost, port}, 1, 2, kSoon, patience);
  signal.join();
  EXPECT_LT(absl::Now() - start, kSoon / 2);
  const std::string waits =
      absl::StrCat("rank 1 waits for rank 0 at 127.0.0.1:", port);
  EXPECT_EQ(store.status(), absl::CancelledError(absl::StrCat(
                                "stopped by a signal while ", waits)));
  EXPECT_EQ(line, absl::StrCat(waits, " (timeout 10s): no answer"));
}

TEST(TcpStoreTest, GoodbyeIsNoFailure) {
  const auto server = Server(2);
  const auto a = Client(*server, 0, 2);
  { const auto b = Client(*server, 1, 2); }
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(StoredFailure(*a), absl::OkStatus());
}

// The process of a rank, killed.
TEST(TcpStoreTest, AProcessThatDiesIsAFailureOfAll) {
  const auto server = Server(3);
  const auto a = Client(*server, 0, 3), b = Client(*server, 1, 3);
  const int fd = RawSocket(server->port());
  const std::string hello = "hzero store 2\n2\n3";
  const std::string frame =
      std::string("\0\0\0", 3) + static_cast<char>(hello.size()) + hello;
  ASSERT_EQ(send(fd, frame.data(), frame.size(), 0),
            static_cast<ssize_t>(frame.size()));
  char answer[5];
  ASSERT_EQ(recv(fd, answer, sizeof(answer), MSG_WAITALL), 5);
  EXPECT_EQ(answer[4], 'n');
  close(fd);  // as the system does for a process that is gone
  for (Store* store : {a.get(), b.get()}) {
    const absl::Status heard = Await(*store, "never", "it", kSoon).status();
    EXPECT_TRUE(absl::IsUnavailable(heard)) << heard;
    EXPECT_EQ(heard.message(),
              "rank 2 ended without reporting an error: its connection closed");
  }
}

TEST(TcpStoreTest, WithoutItsKeeperTheStoreIsGone) {
  auto server = Server(2);
  const auto store = Client(*server, 1, 2);
  std::thread ends([&] { server.reset(); });  // waits for us, for a while
  ends.join();
  const absl::Status status = store->Put("key", "value");
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 0, which keeps the store at 127.0.0.1:"),
                    HasSubstr(" is gone: ")));
  EXPECT_FALSE(StoredFailure(*store).ok());
}

// ---- Processes ------------------------------------------------------------

// Runs fn in `world` processes with torchrun's variables; each has a store as
// `zero train` has it. Exit codes by rank; 256 and more: killed.
std::vector<int> RunProcesses(
    int world, const std::function<absl::Status(int, Store&)>& fn) {
  const ReservedPort port;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    setenv("RANK", absl::StrCat(rank).c_str(), 1);
    setenv("WORLD_SIZE", absl::StrCat(world).c_str(), 1);
    setenv("MASTER_ADDR", kHost, 1);
    setenv("MASTER_PORT", absl::StrCat(port.number()).c_str(), 1);
    const absl::Status status = [&]() -> absl::Status {
      ZERO_ASSIGN_OR_RETURN(const auto launch, ReadLaunch());
      if (!launch.has_value()) return absl::NotFoundError("no launcher");
      std::unique_ptr<TcpStoreServer> server;
      if (launch->rank == 0) {
        ZERO_ASSIGN_OR_RETURN(server,
                              TcpStoreServer::Listen(*launch->store, world));
      }
      ZERO_ASSIGN_OR_RETURN(
          const auto store,
          TcpStore::Connect(*launch->store, launch->rank, world, kSoon));
      return fn(launch->rank, *store);
    }();
    if (!status.ok()) std::cerr << "rank " << rank << ": " << status << "\n";
    _exit(status.ok() ? 0 : 1);
  }
  std::vector<int> codes;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status)
                                      : 256 + WTERMSIG(status));
  }
  return codes;
}

// OK if what a rank heard is an UnavailableError with `words`, else that.
absl::Status Says(const absl::Status& heard, const std::string& words) {
  if (absl::IsUnavailable(heard) && absl::StrContains(heard.message(), words)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("heard \"", heard.ToString(), "\", not \"", words, "\""));
}

TEST(TcpStoreTest, ProcessesMeet) {
  EXPECT_EQ(RunProcesses(3,
                         [](int rank, Store& store) {
                           ZERO_RETURN_IF_ERROR(
                               MeetInStore(store, "start", rank, 3, kSoon));
                           return MeetInStore(store, "end", rank, 3, kSoon);
                         }),
            (std::vector<int>{0, 0, 0}));
}

TEST(TcpStoreTest, AKilledProcessIsNamedInAllOthers) {
  EXPECT_EQ(RunProcesses(3,
                         [](int rank, Store& store) {
                           ZERO_RETURN_IF_ERROR(
                               MeetInStore(store, "start", rank, 3, kSoon));
                           if (rank == 1) raise(SIGKILL);
                           return Says(
                               Await(store, "never", "it", kSoon).status(),
                               "rank 1 ended without reporting an error: its "
                               "connection closed");
                         }),
            (std::vector<int>{0, 256 + SIGKILL, 0}));
}

TEST(TcpStoreTest, WithoutRankZeroAllOthersEnd) {
  EXPECT_EQ(RunProcesses(3,
                         [](int rank, Store& store) {
                           absl::Status heard =
                               MeetInStore(store, "start", rank, 3, kSoon);
                           if (rank == 0) raise(SIGKILL);
                           if (heard.ok()) {
                             heard =
                                 Await(store, "never", "it", kSoon).status();
                           }
                           return Says(heard, "rank 0, which keeps the store");
                         }),
            (std::vector<int>{256 + SIGKILL, 0, 0}));
}

TEST(MemoryStoreTest, TheFirstPutFirstCountsAndPutReplaces) {
  MemoryStore store;
  EXPECT_FALSE((*store.Get("key")).has_value());
  EXPECT_EQ(*store.PutFirst("key", "a"), "a");
  EXPECT_EQ(*store.PutFirst("key", "b"), "a");
  EXPECT_EQ(store.Put("key", "c"), absl::OkStatus());
  EXPECT_EQ(**store.Get("key"), "c");
}

}  // namespace
}  // namespace zero
