// What must be the same of a collective on all ranks, as one line of text: it
// is compared and printed.
#ifndef ZERO_ENGINE_COMM_SIGNATURE_H_
#define ZERO_ENGINE_COMM_SIGNATURE_H_

#include <string>

#include "engine/comm/communicator.h"

namespace zero {

// Kind, name, dtype, root, algorithm and the elements of every segment;
// equal runs of segments are folded: `reduce_scatter "block.3" bf16 += [128, 64
// x3]`. Two collectives have the same signature exactly when they fit
// together.
std::string Signature(const Collective& collective);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_SIGNATURE_H_
