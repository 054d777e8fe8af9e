// Event files, which TensorBoard reads.
//
// A file is a list of records: the length (uint64), its masked CRC-32C, the
// data and its masked CRC-32C, little-endian; the data is a protobuf message
// `Event`, of which we write five fields.
// Source: TensorFlow, lib/io/record_writer.h, util/event.proto and
//         framework/summary.proto.
#ifndef ZERO_ENGINE_TRAIN_TENSORBOARD_H_
#define ZERO_ENGINE_TRAIN_TENSORBOARD_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace zero {

// A file name that TensorBoard recognizes.
inline constexpr char kEventFile[] = "events.out.tfevents.0.zero";

// The contents of an event file, event by event.
class EventFile {
 public:
  EventFile();

  // Adds one event with a value for each name. `seconds`: its time.
  void Add(double seconds, int64_t step,
           const std::vector<std::pair<std::string, double>>& scalars);

  // The bytes added since the last call.
  std::string TakeContents() { return std::exchange(contents_, {}); }

 private:
  void AddRecord(const std::string& event);

  std::string contents_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TENSORBOARD_H_
