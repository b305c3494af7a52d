// Rounds T to BF16 so that what is summed down its columns keeps its digits. Device side.
//
// What T's first subdiagonal loses in BF16 goes to the element below, on the second: where keys repeat and beta is nearly 1,
// the first is nearly -1, all else is small, and what is written, V' = T R, is summed down the columns. There each loss, up to
// 2^-9, would meet every later token: 7e-2 of o for one key and beta 0.998, with this 1.5e-2.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"

namespace cake::gdn {

// `exact` is T on the first subdiagonal, which is -A.
__device__ __forceinline__ float lost_in_bf16(float exact) {
  return __fsub_rn(exact, __bfloat162float(__float2bfloat16_rn(exact)));
}

// Adds what row - 1 lost to `row` of the tile, whose block row this warp has written: a lane a row of the block row.
__device__ __forceinline__ void carry_lost(char* tile_of_t, int row, float lost) {
  const int column = row - 2;
  auto* element = reinterpret_cast<__nv_bfloat16*>(tile_of_t + tile::unit_offset<kChunk>(row, column >> 3) + 2 * (column & 7));
  *element = __float2bfloat16_rn(__fadd_rn(__bfloat162float(*element), lost));
}

}  // namespace cake::gdn
