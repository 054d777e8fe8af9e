#include "engine/zero/rank_numbers.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {

void RankNumbers::Take(Arena& arena) {
  agreed_ = Tensor::Empty(arena, {rank_->world() * kMaxValues}, DType::kF64,
                          MemoryCategory::kInputs);
}

absl::Status RankNumbers::Reserve(int64_t read_bytes) {
  ZERO_ASSIGN_OR_RETURN(host_agreed_,
                        device_->Allocate(agreed_.bytes(), MemoryKind::kHost));
  ZERO_ASSIGN_OR_RETURN(host_,
                        device_->Allocate(read_bytes, MemoryKind::kHost));
  agreed_read_ = device_->MakeEvent();
  read_ = device_->MakeEvent();
  return absl::OkStatus();
}

void RankNumbers::Gather(const std::string& name,
                         const std::vector<Tensor>& numbers) {
  std::vector<CollectiveSegment> segments;
  for (const Tensor& all : numbers) {
    const int64_t elems = all.num_elems() / rank_->world();
    segments.push_back({all.Slice(rank_->rank() * elems, {elems}).data(),
                        all.data(), all.num_elems()});
  }
  clock_->Wait(Channel::kScalar, name, [&] {
    rank_->scalar->AllGather(*compute_, name, numbers[0].dtype(),
                             std::move(segments));
  });
}

absl::Status RankNumbers::AllReduce(const std::string& name, ReduceOp op,
                                    absl::Span<double> values) {
  Start(name, op, values);
  return Finish(values);
}

absl::Status RankNumbers::Meet(const std::string& name) {
  if (rank_->agree) return rank_->agree(name, true).status();
  double here = 1;
  return AllReduce(name, ReduceOp::kMax, {&here, 1});
}

void RankNumbers::Start(const std::string& name, ReduceOp op,
                        absl::Span<const double> values) {
  if (alone()) return;
  const int64_t size = static_cast<int64_t>(values.size());
  ZERO_CHECK_GE(kMaxValues, size);
  op_ = op;
  const Tensor all = agreed_.Slice(0, {rank_->world() * size});
  const Tensor own = all.Slice(rank_->rank() * size, {size});
  // An unfinished reduction may still read and write the numbers.
  if (!agreed_read_->IsDone()) agreed_read_->Synchronize();
  std::memcpy(host_agreed_.data(), values.data(), own.bytes());
  device_->Copy(*compute_, own.data(), host_agreed_.data(), own.bytes());
  Gather(name, {all});
  device_->Copy(*compute_, host_agreed_.data(), all.data(), all.bytes());
  compute_->Record(*agreed_read_);
}

absl::Status RankNumbers::Finish(absl::Span<double> values) {
  if (alone()) return absl::OkStatus();
  agreed_read_->Synchronize();
  ZERO_RETURN_IF_ERROR(rank_->status());
  const double* const all = static_cast<const double*>(host_agreed_.data());
  brought_ = {all, rank_->world() * values.size()};
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = all[i];
    for (int rank = 1; rank < rank_->world(); ++rank) {
      const double other = all[rank * values.size() + i];
      values[i] = op_ == ReduceOp::kSum ? values[i] + other
                                        : std::max(values[i], other);
    }
  }
  return absl::OkStatus();
}

absl::Status RankNumbers::CheckSchedule(const std::string& hash, Arena& arena) {
  if (rank_->world() == 1) return absl::OkStatus();
  const int64_t size = static_cast<int64_t>(hash.size());
  const Tensor all = Tensor::Empty(arena, {rank_->world() * size}, DType::kU8,
                                   MemoryCategory::kInputs);
  if (alone()) return absl::OkStatus();
  ZERO_CHECK_LE(all.bytes(), static_cast<int64_t>(host_.bytes()));
  std::memcpy(host_.data(), hash.data(), size);
  device_->Copy(*compute_, all.Slice(rank_->rank() * size, {size}).data(),
                host_.data(), size);
  Gather("schedule", {all});
  const std::string hashes(
      static_cast<const char*>(Read(all.data(), all.bytes())), all.bytes());
  ZERO_RETURN_IF_ERROR(rank_->status());
  const auto rank_text = [&](int64_t rank) {
    return absl::StrCat("rank ", rank, " (schedule ",
                        hashes.substr(rank * size, size), ")");
  };
  std::vector<std::string> others;
  for (int64_t rank = 1; rank < rank_->world(); ++rank) {
    if (hashes.compare(rank * size, size, hashes, 0, size) != 0) {
      others.push_back(rank_text(rank));
    }
  }
  if (others.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      absl::StrJoin(others, " and "), " planned another step than ",
      rank_text(0), "; give all ranks the same config"));
}

const void* RankNumbers::Read(const void* from, int64_t bytes) {
  device_->Copy(*compute_, host_.data(), from, bytes);
  compute_->Record(*read_);
  read_->Synchronize();
  return host_.data();
}

void RankNumbers::Read(const Tensor& from, float* to) {
  if (device_->kind() == DeviceKind::kMeta) return;
  const auto piece = static_cast<int64_t>(host_.bytes() / sizeof(float));
  for (int64_t begin = 0; begin < from.num_elems(); begin += piece) {
    const Tensor part =
        from.Slice(begin, {std::min(piece, from.num_elems() - begin)});
    std::memcpy(to + begin, Read(part.data(), part.bytes()), part.bytes());
  }
}

}  // namespace zero
