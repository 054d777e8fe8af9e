// ZERO_CHECK: caller mistakes stop the program and print both values.
//
// World errors (a file, a config, a peer) are absl::Status instead; see
// engine/base/status.h. The lowest room owns this header because every room
// needs it and kernels may include nothing above themselves.
#ifndef ZERO_KERNELS_CHECK_H_
#define ZERO_KERNELS_CHECK_H_

#include <sstream>

namespace zero {
namespace internal {

// Collects the message of a failed check; the destructor prints it to stderr
// and aborts.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

}  // namespace internal
}  // namespace zero

// The `while` form lets a check be followed by `<< "message"`.
#define ZERO_CHECK(condition) \
  while (!(condition))        \
  ::zero::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

#define ZERO_CHECK_OP(a, op, b)                                         \
  while (!((a)op(b)))                                                   \
  ::zero::internal::CheckFailure(__FILE__, __LINE__, #a " " #op " " #b) \
          .stream()                                                     \
      << "(" << (a) << " against " << (b) << ") "

#define ZERO_CHECK_EQ(a, b) ZERO_CHECK_OP(a, ==, b)
#define ZERO_CHECK_NE(a, b) ZERO_CHECK_OP(a, !=, b)
#define ZERO_CHECK_LE(a, b) ZERO_CHECK_OP(a, <=, b)
#define ZERO_CHECK_LT(a, b) ZERO_CHECK_OP(a, <, b)
#define ZERO_CHECK_GE(a, b) ZERO_CHECK_OP(a, >=, b)
#define ZERO_CHECK_GT(a, b) ZERO_CHECK_OP(a, >, b)

#endif  // ZERO_KERNELS_CHECK_H_
