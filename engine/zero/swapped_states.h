// Model states on a disk: this rank's part of them, segment by segment, in a
// file (engine/base/swap_file.h), and the host buffers that segments pass
// through.
//
// In a step segments take turns in Plan::kNumSwapSlots places: one is read
// while another is updated and a third is written. Between steps one segment at
// a time is held in its place and stored when the next one comes. Parameters
// that are read for a computation have places of their own.
// Layout: two pieces of the file per segment: its parameters; and, each at a
//   multiple of Arena::kAlignment, its masters and optimizer arrays.
#ifndef ZERO_ENGINE_ZERO_SWAPPED_STATES_H_
#define ZERO_ENGINE_ZERO_SWAPPED_STATES_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "engine/base/swap_file.h"
#include "engine/comm/rank.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/options.h"
#include "engine/zero/plan.h"
#include "engine/zero/schedule.h"

namespace zero {

class SwappedStates {
 public:
  // Rank and plan must outlive the states.
  SwappedStates(const Rank& rank, const Plan& plan,
                const ExecutorOptions& options);
  ~SwappedStates();

  // Takes the places from the host's `arena`.
  void Take(Arena& arena);
  // Removes what dead runs left in the folder. All ranks call it before any of
  // them calls Open.
  void RemoveStale();
  // Creates the file, unless the device has no memory (a rehearsal).
  // Errors: as SwapFile::Create.
  absl::Status Open();

  // The states of a segment on the disk; parameters also as a copy of the
  // device's, for the host's update.
  bool HasParameters(const SegmentRef& ref) const;
  bool HasOptimizer(const SegmentRef& ref) const;

  // This rank's elements of a segment, in their place: parameters, masters, one
  // of the optimizer's arrays.
  Tensor Parameters(const SegmentRef& ref) const;
  Tensor Master(const SegmentRef& ref) const;
  Tensor Array(const SegmentRef& ref, int array) const;
  // Parameters read for a computation.
  Tensor Fetched(const SegmentRef& ref) const;

  // Reads, in a step, all of a segment's states on the disk. After an error,
  // which ends the run on all ranks, nothing more is read or written.
  // Threads: one thread reads, one writes.
  void Read(const SegmentRef& ref);
  void Write(const SegmentRef& ref);
  void ReadParameters(const SegmentRef& ref);

  // Loads a segment into its place, after `compute` has finished with the
  // previous one. Unwritten data is zero. With `change` the caller will write
  // to it. Called between steps, when no stream uses the disk.
  void Hold(const SegmentRef& ref, bool change, Stream& compute);
  // Makes all states read as zero until they are written. Called between steps.
  void Clear();
  // Writes the held segment to the disk if it was changed. Call it before a
  // step, which changes segments that are not held.
  void Settle(Stream& compute);

  // The folder of the file, as an absolute path.
  std::string folder() const;
  // Bytes of the file; bytes that `actions` read from and write to it.
  int64_t disk_bytes() const;
  struct Traffic {
    int64_t read = 0, written = 0;
  };
  Traffic CountTraffic(const std::vector<Action>& actions) const;
  std::vector<std::string> notes() const;

 private:
  // A segment's place; 0 bytes: the disk has no such piece.
  struct Place {
    int64_t elems = 0;
    int64_t param_bytes = 0, optimizer_bytes = 0;
    int param_piece = -1, optimizer_piece = -1;  // of the file
    bool written = false;
  };

  const Place& PlaceOf(const SegmentRef& ref) const {
    return places_[ref.unit][ref.segment];
  }
  Place& PlaceOf(const SegmentRef& ref) {
    return places_[ref.unit][ref.segment];
  }
  char* UpdateSlot(const SegmentRef& ref) const;
  char* FetchSlot(const SegmentRef& ref) const;
  int64_t ring_bytes() const;
  int64_t BytesOf(const SegmentRef& ref) const;
  // Runs `work` unless something failed before; an error ends the run.
  template <typename Work>
  void Try(const Work& work);

  const Rank* rank_;
  const Plan* plan_;
  const SwapOptions options_;
  const DType param_dtype_;
  absl::optional<DType> master_dtype_;
  int num_arrays_ = 0;
  std::vector<std::vector<Place>> places_;  // by unit and segment
  std::vector<int64_t> pieces_;             // bytes of each, of the file
  int64_t param_slot_bytes_ = 0, optimizer_slot_bytes_ = 0;
  bool fetches_ = false;
  bool makes_folder_ = false;  // it is not there before any rank's Open
  Tensor ring_;
  char* base_ = nullptr;  // in ring_, aligned
  std::unique_ptr<SwapFile> file_;
  std::atomic<bool> failed_ = false;
  absl::optional<SegmentRef> held_;
  bool changed_ = false;  // the held segment
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_SWAPPED_STATES_H_
