#include "engine/train/tensorboard.h"

#include <functional>

#include "boost/crc.hpp"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"

namespace zero {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

std::string Message(const std::function<void(CodedOutputStream*)>& write) {
  std::string message;
  google::protobuf::io::StringOutputStream text(&message);
  CodedOutputStream stream(&text);
  write(&stream);
  stream.Trim();
  return message;
}

// A CRC of data that holds CRCs would be weak: hence the mask.
uint32_t MaskedCrc(const std::string& data) {
  boost::crc_optimal<32, 0x1EDC6F41, 0xFFFFFFFF, 0xFFFFFFFF, true, true> crc;
  crc.process_bytes(data.data(), data.size());
  const uint32_t sum = crc.checksum();
  return ((sum >> 15) | (sum << 17)) + 0xA282EAD8;
}

}  // namespace

EventFile::EventFile() {
  AddRecord(Message([](CodedOutputStream* event) {
    WireFormatLite::WriteString(/*file_version*/ 3, "brain.Event:2", event);
  }));
}

void EventFile::Add(
    double seconds, int64_t step,
    const std::vector<std::pair<std::string, double>>& scalars) {
  const std::string summary = Message([&](CodedOutputStream* values) {
    for (const auto& [name, number] : scalars) {
      WireFormatLite::WriteBytes(
          /*value*/ 1, Message([&](CodedOutputStream* value) {
            WireFormatLite::WriteString(/*tag*/ 1, name, value);
            WireFormatLite::WriteFloat(/*simple_value*/ 2,
                                       static_cast<float>(number), value);
          }),
          values);
    }
  });
  AddRecord(Message([&](CodedOutputStream* event) {
    WireFormatLite::WriteDouble(/*wall_time*/ 1, seconds, event);
    WireFormatLite::WriteInt64(/*step*/ 2, step, event);
    WireFormatLite::WriteBytes(/*summary*/ 5, summary, event);
  }));
}

void EventFile::AddRecord(const std::string& event) {
  const std::string length = Message([&](CodedOutputStream* stream) {
    stream->WriteLittleEndian64(event.size());
  });
  contents_ += length + Message([&](CodedOutputStream* stream) {
                 stream->WriteLittleEndian32(MaskedCrc(length));
                 stream->WriteString(event);
                 stream->WriteLittleEndian32(MaskedCrc(event));
               });
}

}  // namespace zero
