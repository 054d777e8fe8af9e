#include "engine/data/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "kernels/check.h"

namespace zero {
namespace {

utf8proc_option_t Options(NormalForm form) {
  int options = UTF8PROC_STABLE;
  const bool composed = form == NormalForm::kC || form == NormalForm::kKC;
  options |= composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::kKC || form == NormalForm::kKD) {
    options |= UTF8PROC_COMPAT;
  }
  return static_cast<utf8proc_option_t>(options);
}

void AppendNormalized(NormalForm form, absl::string_view line,
                      std::string* out) {
  utf8proc_uint8_t* mapped = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(line.data()),
      static_cast<utf8proc_ssize_t>(line.size()), &mapped, Options(form));
  ZERO_CHECK_GE(size, 0) << utf8proc_errmsg(size);
  out->append(reinterpret_cast<const char*>(mapped), size);
  std::free(mapped);
}

}  // namespace

absl::string_view Normalize(NormalForm form, absl::string_view text,
                            std::string* buffer) {
  // Characters below U+0300 (whose first byte is below 0xCC) compose with
  // nothing before them; ASCII is in every form.
  const uint8_t first_changed = form == NormalForm::kC ? 0xCC : 0x80;
  const auto may_change = [first_changed](char c) {
    return static_cast<uint8_t>(c) >= first_changed;
  };
  auto next = std::find_if(text.begin(), text.end(), may_change);
  if (next == text.end()) return text;
  buffer->clear();
  size_t done = 0;
  while (next != text.end()) {
    const size_t at = next - text.begin();
    const size_t begin = text.rfind('\n', at) + 1;  // 0 if there is none
    const size_t end = std::min(text.find('\n', at), text.size() - 1) + 1;
    buffer->append(text.data() + done, begin - done);
    AppendNormalized(form, text.substr(begin, end - begin), buffer);
    done = end;
    next = std::find_if(text.begin() + done, text.end(), may_change);
  }
  buffer->append(text.data() + done, text.size() - done);
  return *buffer;
}

}  // namespace zero
