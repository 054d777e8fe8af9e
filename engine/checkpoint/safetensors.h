// Hugging Face's safetensors: reader (one file, or a folder of shards with
// model.safetensors.index.json) and an atomic writer.
//
// Layout: uint64 little-endian header length; that many bytes of JSON
//   {"__metadata__": {string: string}, NAME: {"dtype": "F32",
//    "shape": [2, 3], "data_offsets": [begin, end]}, ...}
// padded with spaces to a multiple of 8; then the data, which the offsets
// cover without gap or overlap. Values are little-endian and row-major.
// Non-goals: types of fewer than 8 bits.
#ifndef ZERO_ENGINE_CHECKPOINT_SAFETENSORS_H_
#define ZERO_ENGINE_CHECKPOINT_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/base/direct_file.h"
#include "engine/base/file.h"
#include "kernels/dtype.h"

namespace zero {

// A tensor inside an open file.
struct StoredTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // empty: one element
  int64_t num_elements = 0;
  int64_t num_bytes = 0;
  // Mapped; valid while the reader lives; may be unaligned, so copy from it.
  const uint8_t* data = nullptr;
  std::string file;
  int64_t offset = 0;  // of data in the file

  std::string ShapeString() const;  // "[768, 2304]"
};

// Threads: const methods may be called from many threads.
class SafetensorsReader {
 public:
  // `path` is a .safetensors file, an index.json, or a folder that holds
  // model.safetensors or model.safetensors.index.json.
  // Errors: NotFound; InvalidArgument or DataLoss naming file and tensor: too
  //         short, header not JSON, duplicate name, unknown dtype, offsets
  //         outside the file, overlapping, with gaps, or not shape * dtype; an
  //         index that names a missing shard or tensor.
  static absl::StatusOr<std::unique_ptr<SafetensorsReader>> Open(
      const std::string& path);

  // Sorted by name.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }

  // Null when there is none.
  const StoredTensor* Find(absl::string_view name) const;

 private:
  SafetensorsReader() = default;
  absl::Status AddFile(const std::string& path);
  absl::Status AddIndex(const std::string& path);

  std::vector<MappedFile> files_;
  std::vector<StoredTensor> tensors_;
};

// Whether a folder has model.safetensors or its index.
bool HoldsModel(const std::string& dir);

// Elements [begin, begin + n) of a float tensor, converted to fp32.
// REQUIRES: IsFloat(tensor.dtype), the range inside the tensor.
void ReadAsF32(const StoredTensor& tensor, int64_t begin, int64_t n,
               float* out);

// The tensors of a file to be written.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
};

// Writes a file atomically: tensors in any order, in any number of pieces. In
// the file, wider element types come first and otherwise the order is that of
// `specs`, so that every tensor is aligned to its element. transformers
// requires the metadata {"format": "pt"}.
class SafetensorsWriter {
 public:
  // Errors: InvalidArgument for a duplicate or reserved name or a bad shape;
  //         those of the file, here and below.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::vector<TensorSpec> specs,
      const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

  // Writes bytes [offset, offset + bytes) of specs[tensor]. Each is given once.
  // Errors: InvalidArgument for bytes outside the tensor. Nothing may follow
  //         an error.
  absl::Status Write(size_t tensor, int64_t offset, const void* data,
                     int64_t bytes);
  // Errors: InvalidArgument for a tensor with too few or too many bytes; then
  //         no file appears.
  absl::Status Commit();

 private:
  struct Place {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    int64_t num_given = 0;  // bytes so far
  };
  SafetensorsWriter() = default;

  std::vector<TensorSpec> specs_;
  std::vector<Place> places_;  // of specs_
  std::unique_ptr<DirectWriter> file_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_SAFETENSORS_H_
