#include "models/layers/params.h"

namespace zero {

KvCache MakeCache(Context& ctx, int64_t num_layers, int64_t batch,
                  int64_t capacity, int64_t kv_width, DType dtype) {
  KvCache cache{.capacity = capacity};
  const Shape shape{batch, capacity, kv_width};
  for (int64_t i = 0; i < num_layers; ++i) {
    cache.layers.push_back({ctx.Empty(shape, dtype), ctx.Empty(shape, dtype)});
  }
  return cache;
}

}  // namespace zero
