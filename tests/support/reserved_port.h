#ifndef ZERO_TESTS_SUPPORT_RESERVED_PORT_H_
#define ZERO_TESTS_SUPPORT_RESERVED_PORT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace zero {

// A port of 127.0.0.1 where nothing listens. While this exists, the system
// assigns it to no one who asks for any free port, such as another test;
// TcpStoreServer can listen there.
class ReservedPort {
 public:
  ReservedPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(fd_, generic, size), 0);
    EXPECT_EQ(getsockname(fd_, generic, &size), 0);
    number_ = ntohs(address.sin_port);
  }
  ~ReservedPort() { close(fd_); }
  ReservedPort(const ReservedPort&) = delete;

  int fd() const { return fd_; }
  int number() const { return number_; }

 private:
  const int fd_;
  int number_ = 0;
};

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_RESERVED_PORT_H_
