#include "engine/zero/swapped_states.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {

SwappedStates::SwappedStates(const Rank& rank, const Plan& plan,
                             const ExecutorOptions& options)
    : rank_(&rank),
      plan_(&plan),
      options_(options.swap),
      param_dtype_(options.param_dtype) {
  if (options.train) {
    master_dtype_ = options.master_dtype();
    num_arrays_ = options.optimizer.StateFloatsPerElement();
  }
  const auto padded = [](int64_t bytes) {
    return RoundUp(bytes, Arena::kAlignment);
  };
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const PlannedUnit& unit = plan.units[u];
    const bool optimizer_here =
        options.train && unit.homes.optimizer == Home::kNvme;
    const bool params_here = unit.homes.parameters == Home::kNvme;
    fetches_ |= params_here;
    // Whether the disk also holds the host's copies of the device's states.
    const bool copies =
        optimizer_here && unit.homes.parameters == Home::kDevice;
    places_.emplace_back(unit.segments.size());
    for (int s = 0; s < static_cast<int>(unit.segments.size()); ++s) {
      const bool trained = s < unit.num_trained_segments;
      Place& place = places_[u][s];
      place.elems = plan.Shard(unit.segments[s], rank.rank()).elems;
      const auto add = [&](int64_t bytes) {
        pieces_.push_back(bytes);
        return static_cast<int>(pieces_.size()) - 1;
      };
      if (params_here || (copies && trained)) {
        place.param_bytes =
            place.elems * static_cast<int64_t>(DTypeBytes(param_dtype_));
        place.param_piece = add(place.param_bytes);
      }
      if (optimizer_here && trained) {
        place.optimizer_bytes = num_arrays_ * padded(place.elems * 4);
        if (master_dtype_.has_value()) {
          place.optimizer_bytes += padded(
              place.elems * static_cast<int64_t>(DTypeBytes(*master_dtype_)));
        }
        place.optimizer_piece = add(place.optimizer_bytes);
      }
      param_slot_bytes_ =
          std::max(param_slot_bytes_, SwapFile::PaddedBytes(place.param_bytes));
      optimizer_slot_bytes_ = std::max(
          optimizer_slot_bytes_, SwapFile::PaddedBytes(place.optimizer_bytes));
    }
  }
}

SwappedStates::~SwappedStates() = default;

int64_t SwappedStates::ring_bytes() const {
  return Plan::kNumSwapSlots *
         (optimizer_slot_bytes_ + (fetches_ ? 2 : 1) * param_slot_bytes_);
}

void SwappedStates::Take(Arena& arena) {
  // Arenas align less than disks require.
  ring_ = Tensor::Empty(arena, {ring_bytes() + kBlockAlignment}, DType::kU8,
                        MemoryCategory::kOptimizer);
  base_ = reinterpret_cast<char*>(RoundUp(
      reinterpret_cast<uintptr_t>(ring_.data()), uintptr_t{kBlockAlignment}));
}

void SwappedStates::RemoveStale() {
  if (rank_->device->kind() == DeviceKind::kMeta) return;
  makes_folder_ = !IsFolder(options_.path);
  SwapFile::RemoveStale(options_.path);
}

absl::Status SwappedStates::Open() {
  if (rank_->device->kind() == DeviceKind::kMeta) return absl::OkStatus();
  const absl::Span<char> memory(base_, static_cast<size_t>(ring_bytes()));
  ZERO_ASSIGN_OR_RETURN(file_,
                        SwapFile::Create({.folder = options_.path,
                                          .number = rank_->rank(),
                                          .block_bytes = options_.block_bytes,
                                          .uring = options_.uring,
                                          .io = options_.io,
                                          .checksums = options_.checksums},
                                         pieces_, {&memory, 1}));
  return absl::OkStatus();
}

bool SwappedStates::HasParameters(const SegmentRef& ref) const {
  return PlaceOf(ref).param_piece >= 0;
}

bool SwappedStates::HasOptimizer(const SegmentRef& ref) const {
  return PlaceOf(ref).optimizer_piece >= 0;
}

// A slot holds parameters, then the rest.
char* SwappedStates::UpdateSlot(const SegmentRef& ref) const {
  return base_ +
         plan_->SwapSlot(ref) * (param_slot_bytes_ + optimizer_slot_bytes_);
}

char* SwappedStates::FetchSlot(const SegmentRef& ref) const {
  return base_ +
         Plan::kNumSwapSlots * (param_slot_bytes_ + optimizer_slot_bytes_) +
         plan_->SwapSlot(ref) * param_slot_bytes_;
}

Tensor SwappedStates::Parameters(const SegmentRef& ref) const {
  ZERO_CHECK(HasParameters(ref));
  return Tensor::Borrow(UpdateSlot(ref), {PlaceOf(ref).elems}, param_dtype_);
}

Tensor SwappedStates::Fetched(const SegmentRef& ref) const {
  ZERO_CHECK(HasParameters(ref) && fetches_);
  return Tensor::Borrow(FetchSlot(ref), {PlaceOf(ref).elems}, param_dtype_);
}

Tensor SwappedStates::Array(const SegmentRef& ref, int array) const {
  ZERO_CHECK(HasOptimizer(ref) && array < num_arrays_);
  const int64_t elems = PlaceOf(ref).elems;
  return Tensor::Borrow(UpdateSlot(ref) + param_slot_bytes_ +
                            array * RoundUp(elems * 4, Arena::kAlignment),
                        {elems}, DType::kF32);
}

Tensor SwappedStates::Master(const SegmentRef& ref) const {
  ZERO_CHECK(HasOptimizer(ref) && master_dtype_.has_value());
  const int64_t elems = PlaceOf(ref).elems;
  return Tensor::Borrow(UpdateSlot(ref) + param_slot_bytes_ +
                            num_arrays_ * RoundUp(elems * 4, Arena::kAlignment),
                        {elems}, *master_dtype_);
}

template <typename Work>
void SwappedStates::Try(const Work& work) {
  if (file_ == nullptr || failed_) return;
  const absl::Status status = work();
  if (status.ok() || failed_.exchange(true)) return;
  rank_->scalar->Abort(status);
}

void SwappedStates::Read(const SegmentRef& ref) {
  const Place& place = PlaceOf(ref);
  Try([&]() -> absl::Status {
    char* const slot = UpdateSlot(ref);
    if (place.param_piece >= 0) {
      ZERO_RETURN_IF_ERROR(file_->Read(place.param_piece, slot));
    }
    if (place.optimizer_piece < 0) return absl::OkStatus();
    return file_->Read(place.optimizer_piece, slot + param_slot_bytes_);
  });
}

void SwappedStates::Write(const SegmentRef& ref) {
  const Place& place = PlaceOf(ref);
  Try([&]() -> absl::Status {
    const char* const slot = UpdateSlot(ref);
    if (place.param_piece >= 0) {
      ZERO_RETURN_IF_ERROR(file_->Write(place.param_piece, slot));
    }
    if (place.optimizer_piece < 0) return absl::OkStatus();
    return file_->Write(place.optimizer_piece, slot + param_slot_bytes_);
  });
}

void SwappedStates::ReadParameters(const SegmentRef& ref) {
  Try([&] { return file_->Read(PlaceOf(ref).param_piece, FetchSlot(ref)); });
}

void SwappedStates::Clear() {
  held_.reset();
  changed_ = false;
  for (auto& unit : places_) {
    for (Place& place : unit) place.written = false;
  }
}

void SwappedStates::Hold(const SegmentRef& ref, bool change, Stream& compute) {
  if (!HasParameters(ref) && !HasOptimizer(ref)) return;
  if (held_ != ref) {
    Settle(compute);
    held_ = ref;
    if (PlaceOf(ref).written) {
      Read(ref);
    } else if (file_ != nullptr) {
      std::memset(UpdateSlot(ref), 0,
                  param_slot_bytes_ + optimizer_slot_bytes_);
    }
  }
  changed_ |= change;
}

void SwappedStates::Settle(Stream& compute) {
  if (!held_.has_value()) return;
  compute.Synchronize();
  if (std::exchange(changed_, false)) {
    Write(*held_);
    PlaceOf(*held_).written = true;
  }
  held_.reset();
}

int64_t SwappedStates::disk_bytes() const {
  return SwapFile::FileBytes(pieces_);
}

int64_t SwappedStates::BytesOf(const SegmentRef& ref) const {
  const Place& place = PlaceOf(ref);
  return SwapFile::PaddedBytes(place.param_bytes) +
         SwapFile::PaddedBytes(place.optimizer_bytes);
}

SwappedStates::Traffic SwappedStates::CountTraffic(
    const std::vector<Action>& actions) const {
  Traffic traffic;
  for (const Action& action : actions) {
    const SegmentRef ref{action.index, action.phase};
    if (action.kind == ActionKind::kReadStates) {
      traffic.read += BytesOf(ref);
    } else if (action.kind == ActionKind::kWriteStates) {
      traffic.written += BytesOf(ref);
    } else if (action.kind == ActionKind::kReadParameters) {
      traffic.read += SwapFile::PaddedBytes(PlaceOf(ref).param_bytes);
    }
  }
  return traffic;
}

std::string SwappedStates::folder() const {
  std::error_code error;
  const auto absolute = std::filesystem::absolute(options_.path, error);
  return error ? options_.path : absolute.lexically_normal().string();
}

std::vector<std::string> SwappedStates::notes() const {
  std::vector<std::string> notes;
  if (file_ == nullptr) return notes;
  if (makes_folder_) {
    notes.push_back(absl::StrCat("made the folder '", folder(),
                                 "' (nvme_path), which stays"));
  }
  notes.insert(notes.end(), file_->notes().begin(), file_->notes().end());
  return notes;
}

}  // namespace zero
