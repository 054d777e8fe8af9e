// What backward recomputes instead of keeping it.
#ifndef ZERO_ENGINE_BASE_RECOMPUTE_H_
#define ZERO_ENGINE_BASE_RECOMPUTE_H_

namespace zero {

// Each level adds to the previous one; none changes a bit of the result.
enum class Recompute {
  kOff,        // results of one pass over memory: norms, rotation, activations
  kSelective,  // products with a norm's output: q k v, the FFN's first layer
  kFull,       // all but a unit's input
};
inline constexpr Recompute kRecomputeLevels[] = {
    Recompute::kOff, Recompute::kSelective, Recompute::kFull};
inline constexpr const char* kRecomputeNames[] = {"off", "selective", "full"};

inline const char* RecomputeName(Recompute level) {
  return kRecomputeNames[static_cast<int>(level)];
}

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_RECOMPUTE_H_
