// The context of a computation: device, stream, memory, tape and the batch.
//
// One Context per rank, passed down explicitly; nothing here is global. With
// a tape set, ops record their backward; without one they only compute.
#ifndef ZERO_ENGINE_AUTOGRAD_CONTEXT_H_
#define ZERO_ENGINE_AUTOGRAD_CONTEXT_H_

#include <cstdint>

#include "engine/autograd/tape.h"
#include "engine/base/recompute.h"
#include "engine/tensor/tensor.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace zero {

// One micro-batch in device memory. B rows of T tokens.
struct BatchView {
  int64_t batch = 0;                   // B
  int64_t length = 0;                  // T
  const int32_t* tokens = nullptr;     // [B * T]
  const int32_t* positions = nullptr;  // [B * T]
  PackedSequences packed;              // of rows with several sequences
  const int32_t* targets = nullptr;    // [B * T]; < 0 ignored; null: none
  const int64_t* row_ids = nullptr;    // [B * T] global token ids (dropout)
  const float* grad_scale = nullptr;   // device scalar: d(loss sum) seed
  double* loss_sum = nullptr;          // device scalar: += sum of losses
  float* losses = nullptr;             // [B * T] per token; may be null

  int64_t num_tokens() const { return batch * length; }
};

// Keys and values of earlier tokens, for generation. Layer l's keys and values
// are [B, capacity, kv heads * head width] each.
struct KvCache {
  struct Layer {
    Tensor keys, values;
  };
  std::vector<Layer> layers;
  int64_t capacity = 0;
  int64_t length = 0;  // tokens already in the cache
};

class Context {
 public:
  // `arena` holds activations and workspace; all of these outlive the context.
  Context(Device& device, Stream& stream, Arena& arena)
      : device_(&device), stream_(&stream), arena_(&arena) {}

  Device& device() const { return *device_; }
  Stream& stream() const { return *stream_; }
  Ops& ops() const { return device_->ops(); }
  Arena& arena() const { return *arena_; }

  // An uninitialized activation.
  Tensor Empty(const Shape& shape, DType dtype) const {
    return Tensor::Empty(*arena_, shape, dtype, MemoryCategory::kActivations);
  }

  // Scratch for one kernel call. Freed with the tensor, which may be as soon as
  // the call returns: the arena is ordered by the stream.
  Tensor Scratch(size_t bytes) const {
    return bytes == 0 ? Tensor()
                      : Tensor::Empty(*arena_, {static_cast<int64_t>(bytes)},
                                      DType::kU8, MemoryCategory::kWorkspace);
  }

  // The tape that ops record on; null: no gradients.
  Tape* tape = nullptr;
  // What ops recompute in backward instead of keeping it.
  Recompute recompute = Recompute::kOff;
  // Dropout acts only while training, with this key of (seed, step).
  bool training = false;
  uint64_t dropout_key = 0;
  // The micro-batch, for the first and the last unit.
  BatchView batch;
  // Set while generating; null otherwise.
  KvCache* kv_cache = nullptr;
  // `part` is the part of the vocabulary that the current unit computes with
  // (Parameter::parts). A loss's row statistics, or the logits of generation,
  // are carried from part to part. A loss may keep at most
  // max_kept_logits_bytes of a micro-batch's logits from forward to backward,
  // and recomputes the rest.
  int part = 0;
  Tensor loss_rows, logits;
  int64_t max_kept_logits_bytes = 0;

 private:
  Device* device_;
  Stream* stream_;
  Arena* arena_;
};

// The kernels' view of a scratch tensor (undefined: none).
inline Workspace AsWorkspace(const Tensor& scratch) {
  if (!scratch.defined()) return {};
  return {scratch.data(), static_cast<size_t>(scratch.bytes())};
}

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_CONTEXT_H_
