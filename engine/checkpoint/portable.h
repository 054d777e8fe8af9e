// Models in Hugging Face's folder layout: config.json + model.safetensors, or,
// for large models, shards with model.safetensors.index.json.
//
// Our parameters are packed (q/k/v in one) and [out, in]; a model's
// PortableTensors say how each is cut and transposed. Sharded, resumable
// checkpoints are another format; this one carries parameters only.
#ifndef ZERO_ENGINE_CHECKPOINT_PORTABLE_H_
#define ZERO_ENGINE_CHECKPOINT_PORTABLE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/base/atomic_folder.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/nn/module.h"
#include "kernels/dtype.h"

namespace zero {

// The size of a shard by default, 5 GB, as in transformers.
inline constexpr int64_t kMaxShardBytes = 5'000'000'000;

// Writes DIR/config.json, the weights and further files, such as a tokenizer.
// Weights of more than `max_shard_bytes` are cut between tensors into
// model-00001-of-00003.safetensors ... and an index. The folder appears
// atomically and replaces an earlier one (base/atomic_folder.h), whose other
// files except weights are kept.
// Errors: as FileError, here and below; an earlier DIR is then unchanged.
class PortableWriter {
 public:
  // The tensors are written in `dtype`, rounded as parameters are. `model` must
  // outlive the writer.
  static absl::StatusOr<std::unique_ptr<PortableWriter>> Create(
      const std::string& dir, const Model& model, DType dtype,
      int64_t max_shard_bytes = kMaxShardBytes);

  // The model's parameters, grouped by the file in which they begin. Threads
  // that take a group each write files concurrently, each in order.
  const std::vector<std::vector<const Parameter*>>& groups() const {
    return groups_;
  }

  // Takes elements of a parameter from `begin` on, in its own layout; each must
  // be passed once, in any order. Tensors that are transposed in the file are
  // buffered until complete. Errors are Commit's.
  // Threads: may be called from many threads.
  void Write(const Parameter& parameter, int64_t begin,
             absl::Span<const float> values);

  // `files`: names and contents, config.json among them. Returns a note on
  // everything that could not be kept: the earlier folder is then DIR.previous.
  absl::StatusOr<std::vector<std::string>> Commit(
      const std::map<std::string, std::string>& files);

 private:
  PortableWriter(std::string dir, std::vector<PortableTensor> tensors,
                 DType dtype)
      : dir_(std::move(dir)), tensors_(std::move(tensors)), dtype_(dtype) {}

  // A file that is open from its first byte to its last and then made durable.
  struct File {
    std::string name;
    std::vector<TensorSpec> specs;
    std::unique_ptr<SafetensorsWriter> writer;
    int64_t missing_bytes = 0;
    absl::Status status;  // the first error
    std::mutex mutex;
  };
  struct Place {
    size_t file = 0, number = 0;  // of a tensor in its file
  };

  int64_t TensorBytes(size_t tensor) const;
  void PlanFiles(const Model& model, int64_t max_shard_bytes);
  absl::Status WriteTo(File& file, size_t tensor, int64_t offset,
                       const char* data, int64_t bytes);
  void WriteBytes(size_t tensor, int64_t offset, const char* data,
                  int64_t bytes);
  // Writes elements of a transposed tensor to `bytes` at run.at.
  void WriteTurned(size_t tensor, int64_t elems,
                   const std::function<void(char* bytes)>& fill);
  absl::Status WriteIndex();

  const std::string dir_;
  const std::vector<PortableTensor> tensors_;
  const DType dtype_;
  std::unique_ptr<AtomicFolder> folder_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<Place> places_;  // of tensors_
  std::vector<std::vector<const Parameter*>> groups_;
  // Incomplete transposed tensors, by number.
  struct Turned {
    std::vector<char> bytes;
    int64_t missing;  // elements
  };
  std::mutex mutex_;  // guards the members below
  std::map<size_t, Turned> turned_;
  absl::Status status_;  // the first error of Write
};

// Writes fp32 values [begin, begin + count) of a parameter, in its own layout,
// to `out`.
using ReadParameterFn = std::function<void(const Parameter&, int64_t begin,
                                           int64_t count, float* out)>;

// A reader of the parameters of `model`, which must outlive it, from DIR's
// weights: reads only the bytes that hold the requested values.
// Threads: it may be called from many threads.
// Errors: NotFound; InvalidArgument listing tensors that are missing,
//         unexpected or of another shape.
absl::StatusOr<ReadParameterFn> OpenPortable(const std::string& dir,
                                             const Model& model);

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_PORTABLE_H_
