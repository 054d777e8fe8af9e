// Slows a communicator down to the speed of a network, and copies to that of a
// bus between a device and its host. Overlap can then be seen, measured and
// tested on one machine.
#ifndef ZERO_ENGINE_COMM_SHAPED_H_
#define ZERO_ENGINE_COMM_SHAPED_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "engine/comm/communicator.h"

namespace zero {

// The connection of a rank to the others, or of a device to its host.
struct Link {
  double bytes_per_second = 0;
  absl::Duration latency;  // per step of a ring, or per copy
  std::string text = {};   // what was parsed
};

// Reads "1GB/s,50us": rate in B/s, KB/s, MB/s, GB/s, kbit/s, Mbit/s or Gbit/s
// (powers of 1000), latency in ns, us, ms or s, or 0.
// Errors: InvalidArgument with the text, the reason and an example.
absl::StatusOr<Link> ParseLink(absl::string_view text);

// The minimum time of a collective, in the alpha-beta model of a ring: latency
// * (world - 1) + WireBytes / rate. A link is full duplex, and a root's link is
// everybody's bottleneck.
absl::Duration LinkTime(const Link& link, const Collective& collective,
                        int world);
// The minimum time of a copy of `bytes`.
absl::Duration LinkTime(const Link& link, int64_t bytes);

// Makes the work that `work` enqueues on `stream` take at least `least`. The
// stream's thread sleeps and does not spin; `failed` ends the sleep within
// milliseconds.
// CPU streams only: on CUDA a stream has no thread to sleep on.
void EnqueueAtLeast(Stream& stream, absl::Duration least,
                    std::function<bool()> failed,
                    const std::function<void()>& work);

// A collective begins, on each rank, when its stream reaches it. Every
// communicator has its own link: collectives of one communicator queue up,
// those of two channels do not slow each other down. Sleeps like
// EnqueueAtLeast; a failure of the group ends the sleep.
class ShapedCommunicator final : public CommunicatorWrapper {
 public:
  ShapedCommunicator(std::unique_ptr<Communicator> inner, Link link);

  void Run(Stream& stream, Collective collective) override;

 private:
  const Link link_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_SHAPED_H_
