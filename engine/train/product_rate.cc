#include "engine/train/product_rate.h"

#include <algorithm>
#include <memory>

#include "engine/base/math.h"
#include "kernels/ops.h"

namespace zero {

double MeasureProductFlops(Device& device, DType dtype) {
  constexpr int64_t kN = 1024;
  const int64_t bytes = kN * kN * DTypeBytes(dtype);
  LinearArgs args{.x = {nullptr, dtype, kN, kN, kN},
                  .w = {nullptr, dtype, kN, kN, kN},
                  .y = {nullptr, dtype, kN, kN, kN}};
  const int64_t scratch = device.ops().LinearWorkspaceBytes(args);
  auto memory =
      device.Allocate(3 * bytes + scratch + 4096, MemoryKind::kDevice);
  if (!memory.ok()) return 0;
  char* base = static_cast<char*>(memory->data());
  args.x.data = base;
  args.w.data = base + bytes;
  args.y.data = base + 2 * bytes;
  const Workspace workspace{base + 3 * bytes, static_cast<size_t>(scratch)};
  const auto stream = device.MakeStream(StreamRole::kCompute);
  const auto start = device.MakeEvent(), end = device.MakeEvent();
  device.ops().Fill(*stream, {{base, dtype, 3 * kN * kN}, 0});
  double best_ms = 1e30;
  for (int i = 0; i < 4; ++i) {  // the first one warms up
    stream->Record(*start);
    device.ops().Linear(*stream, args, workspace);
    stream->Record(*end);
    end->Synchronize();
    if (i > 0) best_ms = std::min(best_ms, end->MillisSince(*start));
  }
  return best_ms > 0 ? 2.0 * kN * kN * kN / (best_ms * 1e-3) : 0;
}

}  // namespace zero
