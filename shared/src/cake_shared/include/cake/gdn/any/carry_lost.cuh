// Rounds T to BF16 so that what is summed down its columns keeps its digits. Device side.
//
// Where keys repeat and beta is nearly 1, T's first subdiagonal is nearly -1, all else is small, and what is written, V' = T R,
// is summed down the columns: there each loss in BF16, up to 2^-9, would meet every later token. So the element below, on the
// second subdiagonal, gets what the next token takes back of a write: the loss times beta_i Gamma_{i,i-1} (k_i . k_{i-1}), at
// most all of it. For one key and beta 0.998 the error of o is 1.4e-2, 7e-2 without. Behind a closed gate and where beta is 0
// the share is 0: what was forgotten stays so, and such a token writes nothing.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"

namespace cake::gdn {

// What a row gets of the loss above it. Both are T on the first subdiagonal, exactly, which is -A.
__device__ __forceinline__ float carried_loss(float above, float here) {
  const float lost = __fsub_rn(above, ptx::low_bf16(ptx::pack_bf16(above, 0.f)));
  return __fmul_rn(lost, fminf(fmaxf(-here, -1.f), 1.f));
}

// Adds it to `row` of the tile, whose block row this warp has written: a lane a row of the block row.
__device__ __forceinline__ void carry_lost(char* tile_of_t, int row, float lost) {
  const int column = row - 2;
  auto* element = reinterpret_cast<__nv_bfloat16*>(tile_of_t + tile::unit_offset<kChunk>(row, column >> 3) + 2 * (column & 7));
  *element = __float2bfloat16_rn(__fadd_rn(__bfloat162float(*element), lost));
}

}  // namespace cake::gdn
