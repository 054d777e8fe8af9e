// How much backward recomputes instead of keeping it.
#ifndef ZERO_ENGINE_BASE_RECOMPUTE_H_
#define ZERO_ENGINE_BASE_RECOMPUTE_H_

namespace zero {

// Each level recomputes what the level before does, and more. No level changes
// a bit of the result, with one exception: with kKeepAll GELU may be the
// epilogue of a product (cuBLASLt), which rounds differently from GELU alone.
enum class Recompute {
  kKeepAll,
  kOff,        // what one pass over memory gives: norms, rotation, activations
  kSelective,  // products with a norm's output: q k v, the FFN's first layer
  kFull,       // all but a unit's input
};
inline constexpr Recompute kRecomputeLevels[] = {
    Recompute::kKeepAll, Recompute::kOff, Recompute::kSelective,
    Recompute::kFull};
inline constexpr const char* kRecomputeNames[] = {"keep_all", "off",
                                                  "selective", "full"};

inline const char* RecomputeName(Recompute level) {
  return kRecomputeNames[static_cast<int>(level)];
}

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_RECOMPUTE_H_
