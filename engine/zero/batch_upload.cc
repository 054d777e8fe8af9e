#include "engine/zero/batch_upload.h"

#include <algorithm>
#include <cstring>

#include "engine/base/status.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// A batch as one block: tokens, positions, targets, of packed rows the offsets
// of their sequences, then 8-byte row ids.
struct BatchLayout {
  int64_t tokens;
  int64_t id_bytes;      // of each of the first three
  int64_t offset_bytes;  // 0: none

  int64_t offsets() const { return 3 * id_bytes; }
  int64_t row_ids() const { return offsets() + offset_bytes; }
  int64_t bytes() const { return row_ids() + tokens * 8; }

  void Fill(const HostBatch& batch, char* to) const {
    for (const int32_t* ids : {batch.tokens, batch.positions, batch.targets}) {
      if (ids != nullptr) std::memcpy(to, ids, tokens * sizeof(int32_t));
      to += id_bytes;
    }
    if (batch.offsets != nullptr) {
      std::memcpy(to, batch.offsets, (tokens + 1) * sizeof(int32_t));
    }
    int64_t* const row_ids = reinterpret_cast<int64_t*>(to + offset_bytes);
    for (int64_t i = 0; i < tokens; ++i) {
      row_ids[i] = batch.sample_ids == nullptr
                       ? 0
                       : batch.sample_ids[i / batch.length] * batch.length +
                             i % batch.length;
    }
  }
};

BatchLayout LayoutOf(const HostBatch& batch) {
  const int64_t tokens = batch.batch * batch.length;
  const int64_t id_bytes = RoundUp(tokens * sizeof(int32_t), 64);
  const int64_t offset_bytes =
      batch.offsets == nullptr ? 0
                               : RoundUp((tokens + 1) * sizeof(int32_t), 64);
  return {tokens, id_bytes, offset_bytes};
}

}  // namespace

absl::Status BatchUpload::Reserve(int64_t bytes) {
  bytes_ = std::max(bytes_, bytes);
  for (Staging& buffer : buffers_) {
    if (buffer.sent == nullptr) buffer.sent = device_->MakeEvent();
    if (static_cast<int64_t>(buffer.memory.bytes()) >= bytes) continue;
    buffer.sent->Synchronize();
    ZERO_ASSIGN_OR_RETURN(buffer.memory,
                          device_->Allocate(bytes, MemoryKind::kHost));
  }
  return absl::OkStatus();
}

absl::Status BatchUpload::Reserve(absl::Span<const HostBatch> batches) {
  int64_t bytes = 0;
  for (const HostBatch& batch : batches) {
    bytes = std::max(bytes, LayoutOf(batch).bytes());
  }
  return Reserve(bytes);
}

void BatchUpload::Load(const HostBatch& batch, Arena& arena) {
  const BatchLayout layout = LayoutOf(batch);
  next_memory_ = Tensor::Empty(arena, {layout.bytes()}, DType::kU8,
                               MemoryCategory::kInputs);
  const char* const base = static_cast<const char*>(next_memory_.data());
  const auto ids_at = [&](int64_t place, const int32_t* ids) {
    const char* const at = base + place * layout.id_bytes;
    return ids == nullptr ? nullptr : reinterpret_cast<const int32_t*>(at);
  };
  next_ = {
      .batch = batch.batch,
      .length = batch.length,
      .tokens = ids_at(0, batch.tokens),
      .positions = ids_at(1, batch.positions),
      .targets = ids_at(2, batch.targets),
      .row_ids = reinterpret_cast<const int64_t*>(base + layout.row_ids())};
  if (batch.offsets != nullptr) {
    next_.packed = {
        .positions = next_.positions,
        .offsets = reinterpret_cast<const int32_t*>(base + layout.offsets()),
        .count = batch.num_sequences};
  }
  if (device_->kind() == DeviceKind::kMeta) return;  // nothing on the host
  // Usually the batch before the last one has arrived, and the host continues.
  Staging& buffer = Next();
  if (!buffer.sent->IsDone()) buffer.sent->Synchronize();
  layout.Fill(batch, static_cast<char*>(buffer.memory.data()));
  device_->Copy(*compute_, next_memory_.data(), buffer.memory.data(),
                layout.bytes());
  compute_->Record(*buffer.sent);
}

void BatchUpload::Stage(const std::function<void(void* host)>& fill,
                        const std::function<void(const void* host)>& launch) {
  Staging& buffer = Next();
  buffer.sent->Synchronize();
  fill(buffer.memory.data());
  launch(buffer.memory.data());
  compute_->Record(*buffer.sent);
}

}  // namespace zero
