#include "engine/checkpoint/checkpoint_reads.h"

#include <cstring>
#include <utility>

#include "absl/strings/string_view.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {

absl::StatusOr<std::unique_ptr<CheckpointReads>> CheckpointReads::Open(
    const CheckpointReader& reader,
    const std::vector<CheckpointRange>& ranges) {
  std::unique_ptr<CheckpointReads> reads(new CheckpointReads(reader));
  for (const CheckpointRange& range : ranges) {
    ZERO_ASSIGN_OR_RETURN(
        std::vector<CheckpointReader::Slice> slices,
        reader.Find(range.state, range.parameter, range.begin, range.elems));
    for (const CheckpointReader::Slice& slice : slices) reads->Add(slice.block);
    reads->ranges_.push_back(std::move(slices));
  }
  return reads;
}

void CheckpointReads::Add(const CheckpointReader::Block& block) {
  if (!windows_.empty()) {
    Window& last = windows_.back();
    if (last.blocks.back() == block) return;
    const int64_t end = block.offset + block.bytes;
    if (last.part == block.part && last.end == block.offset &&
        end - last.begin <= kWindowBytes) {
      last.end = end;
      last.blocks.push_back(block);
      return;
    }
  }
  windows_.push_back(
      {block.part, block.offset, block.offset + block.bytes, {block}});
}

void CheckpointReads::Load(size_t number, Loaded* loaded) {
  const Window& window = windows_[number];
  const auto load = [&]() -> absl::Status {
    if (file_ == nullptr || part_ != window.part) {
      ZERO_ASSIGN_OR_RETURN(
          file_, DirectReader::Open(reader_->parts()[window.part].file));
      part_ = window.part;
    }
    ZERO_ASSIGN_OR_RETURN(loaded->data,
                          file_->Read(window.begin, window.end - window.begin,
                                      &loaded->memory, &read_bytes_));
    for (const CheckpointReader::Block& block : window.blocks) {
      ZERO_RETURN_IF_ERROR(
          reader_->Check(block, {loaded->data + (block.offset - window.begin),
                                 static_cast<size_t>(block.bytes)}));
    }
    return absl::OkStatus();
  };
  loaded->status = load();
}

absl::Status CheckpointReads::Advance() {
  if (began_ && ++block_ < windows_[window_].blocks.size()) {
    return absl::OkStatus();
  }
  block_ = 0;
  if (began_) {
    ++window_;
    reading_.Wait().IgnoreError();
    std::swap(now_, next_);
  } else {
    Load(0, &now_);
  }
  began_ = true;
  if (window_ + 1 < windows_.size() && now_.status.ok()) {
    reading_.Start([this, following = window_ + 1] {
      Load(following, &next_);
      return absl::OkStatus();
    });
  }
  return now_.status;
}

absl::Status CheckpointReads::Next(void* out) {
  ZERO_CHECK_LT(range_, ranges_.size());
  char* to = static_cast<char*>(out);
  for (const CheckpointReader::Slice& slice : ranges_[range_]) {
    if (!began_ || windows_[window_].blocks[block_] != slice.block) {
      ZERO_RETURN_IF_ERROR(Advance());
    }
    const int64_t bytes = slice.end - slice.begin;
    if (to == nullptr) continue;
    std::memcpy(to,
                now_.data + (slice.block.offset - windows_[window_].begin) +
                    slice.begin,
                bytes);
    to += bytes;
  }
  ++range_;
  return absl::OkStatus();
}

absl::Status CheckpointReader::VerifyPart(size_t part) const {
  const std::vector<CheckpointRange>& ranges = parts_[part].ranges;
  ZERO_ASSIGN_OR_RETURN(const auto reads, CheckpointReads::Open(*this, ranges));
  for (size_t i = 0; i < ranges.size(); ++i) {
    ZERO_RETURN_IF_ERROR(reads->Next(nullptr));
  }
  return absl::OkStatus();
}

}  // namespace zero
