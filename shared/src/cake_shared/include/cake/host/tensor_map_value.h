// A tensor map as kernels carry it in their parameter structs: 128 opaque bytes, whose address copies take.
// cake/host/tensor_map.h makes them.
#pragma once

#include <cstdint>

namespace cake::host {

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace cake::host
