// Who owns what: a pure function of the model's shapes and the world size.
//
// A unit's parameters lie in one flat buffer, each at a multiple of 64
// elements. The buffer is cut into fixed segments, each padded to a multiple
// of 64 * world; rank r owns the r-th equal piece of every segment. So
// reduce-scatter and all-gather run in place for any world size, pieces stay
// aligned, and no bucket size ever moves an owner. Nothing here knows a
// thread, a device or a file.
// Invariants: parameters are disjoint; segments tile the unit;
//   padded_elems = sum of segment elems; segment elems % (64 * world) = 0.
#ifndef ZERO_ENGINE_ZERO_PLAN_H_
#define ZERO_ENGINE_ZERO_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tensor/shape.h"

namespace zero {

// What the plan needs to know of a parameter.
struct ParameterSpec {
  std::string name;
  Shape shape;  // stored shape
  bool decay = false;
  bool frozen = false;
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  std::vector<std::string> borrowed;  // names of other units' parameters
};

struct PlannedParameter {
  ParameterSpec spec;
  int64_t offset = 0;  // in the unit's flat buffer, in elements
  int64_t elems = 0;
};

// Elements [begin, begin + elems) of a unit.
struct Segment {
  int64_t begin = 0;
  int64_t elems = 0;
};

struct PlannedUnit {
  std::string name;
  std::vector<PlannedParameter> parameters;
  // Parameters of other units that this one reads: they must be in place while
  // it runs, and their gradients are complete only when their own unit's are.
  std::vector<std::string> borrowed;
  std::vector<Segment> segments;
  int64_t offset = 0;  // of this unit among all units, in elements
  int64_t padded_elems = 0;
};

struct Plan {
  // Alignment of every parameter and piece, in elements.
  static constexpr int64_t kAlignElems = 64;
  // Units above this are cut into several segments: 16 MiB of fp32, small
  // enough that the first reduction of a step starts early.
  static constexpr int64_t kMaxSegmentElems = int64_t{4} << 20;

  int64_t world = 1;
  std::vector<PlannedUnit> units;
  int64_t padded_elems = 0;  // over all units
  int64_t num_parameters = 0;

  // Rank r's piece of a segment.
  Segment Piece(const Segment& segment, int64_t rank) const {
    const int64_t elems = segment.elems / world;
    return {segment.begin + rank * elems, elems};
  }
};

Plan MakePlan(const std::vector<UnitSpec>& units, int64_t world);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_PLAN_H_
