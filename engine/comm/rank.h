// One rank of a run: its device and its ends of the communicators. Passed
// down, never global, so that ranks can be threads of one process.
#ifndef ZERO_ENGINE_COMM_RANK_H_
#define ZERO_ENGINE_COMM_RANK_H_

#include <memory>

#include "absl/status/status.h"
#include "engine/comm/counting.h"
#include "engine/comm/null.h"
#include "kernels/device.h"

namespace zero {

struct Rank {
  Device* device = nullptr;
  // Parameters and gradients move independently, each on a stream of its own.
  std::unique_ptr<CountingCommunicator> gather;
  std::unique_ptr<CountingCommunicator> reduce;
  // The few numbers that ranks agree on, on the compute stream.
  std::unique_ptr<CountingCommunicator> scalar;

  int rank() const { return gather->rank(); }
  int world() const { return gather->world(); }

  // The first error of any of the three.
  absl::Status status() const {
    for (const auto* end : {&gather, &reduce, &scalar}) {
      if (absl::Status status = (*end)->status(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
};

// Rank `rank` of `world` whose collectives move nothing: a world of one, or
// the meta device's stand-in for any world.
inline Rank MakeLoneRank(Device& device, int rank = 0, int world = 1) {
  const auto end = [&] {
    return std::make_unique<CountingCommunicator>(
        std::make_unique<NullCommunicator>(rank, world));
  };
  return {&device, end(), end(), end()};
}

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RANK_H_
