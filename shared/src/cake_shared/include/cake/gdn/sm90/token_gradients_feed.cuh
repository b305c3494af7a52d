// The warps of token_gradients_sm90 that make no products: one fetches tiles, two fetch rows, one finishes dg and dbeta.
#pragma once

#include "cake/gdn/any/gate_option.cuh"
#include "cake/gdn/sm90/token_gradients_smem.cuh"

namespace cake::gdn::sm90 {

// Workspace tiles and scalars, by one thread.
__device__ __forceinline__ void feed_tiles(Smem& smem, const TokenGradientsParams& p) {
  const uint32_t chunks = used_chunks(p);
  Item item;
  SlotOrder order;
  uint32_t head = 0;
  for (uint32_t nth = 0; item_of(p, chunks, nth, item); ++nth) {
    order.next_rows(nth == 0);
#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      wait_products_before(smem, head);
      const Tiles tiles = order.next_head();
      const int value_head = item.key_head * p.heads.group + member;
      const int64_t record = item.record(p.heads, value_head);
      const int64_t tile = p.part.tile(p.heads.group, item.tile_record, value_head);
      const int stage = head % kScalarStages;
      ptx::mbarrier_wait(&smem.scalars_free[stage], (head / kScalarStages & 1) ^ 1);
      smem.tiles[stage] = tiles;
      ptx::mbarrier_arrive_expect_bytes(&smem.scalars_full[stage], 4 * kScalarFloats);
      ptx::bulk_load(smem.scalars[stage], p.scalars + record * kScalarFloats, 4 * kScalarFloats, &smem.scalars_full[stage]);
      const char* const from[] = {p.writes + tile * kTokenTileBytes,
                                  p.entry_states + tile * kStateTileBytes,
                                  p.entry_states + tile * kStateTileBytes + kStateBlockBytes,
                                  p.exit_gradients + tile * kStateTileBytes,
                                  p.exit_gradients + tile * kStateTileBytes + kStateBlockBytes};
#pragma unroll
      for (int i = 0; i < kTiles - kWrites; ++i) {
        const int slot = tiles.slot(kWrites + i);
        ptx::mbarrier_wait(&smem.slot_free[slot], tiles.parity(kWrites + i) ^ 1);
        ptx::mbarrier_arrive_expect_bytes(&smem.slot_full[slot], kSlotBytes);
        ptx::bulk_load(smem.slot[slot], from[i], kSlotBytes, &smem.slot_full[slot]);
      }
    }
  }
}

// Publishes the rows that the warp has copied: they are visible to wgmma when the barrier's phase ends.
__device__ __forceinline__ void publish_rows(uint64_t* full, int lane) {
  ptx::cp_async_wait<0>();
  ptx::fence_async_shared();
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(full);
}

// Rows of K, Q and dO by one warp, those of dv by another (`of_values`): any strides, and zeros past a chunk's last token.
__device__ __forceinline__ void feed_rows(Smem& smem, const TokenGradientsParams& p, bool of_values, int lane) {
  const uint32_t chunks = used_chunks(p);
  Item item;
  SlotOrder order;
  uint32_t head = 0;
  for (uint32_t nth = 0; item_of(p, chunks, nth, item); ++nth) {
    const TokenPlace at = place_of(item.first_token, p.heads.tokens_per_row);
    const Tiles rows = order.next_rows(nth == 0);
    if (!of_values) {
      wait_products_before(smem, head);
      for (int i = 0; i < 2; ++i) ptx::mbarrier_wait(&smem.slot_free[rows.slot(i)], rows.parity(i) ^ 1);
      copy_rows<32, 16>(smem.slot[rows.slot(0)], p.k, at, item.tokens, item.key_head, 0, lane);
      copy_rows<32, 16>(smem.slot[rows.slot(1)], p.q, at, item.tokens, item.key_head, 0, lane);
      const int stage = nth % kRowStages;
      if (lane == 0) {
        smem.rows[stage] = make_int4(item.first_token, item.tokens, item.key_head, rows.slots | rows.parities << 8);
        for (int i = 0; i < 2; ++i) ptx::mbarrier_arrive(&smem.slot_full[rows.slot(i)]);  // their phases go on; rows_full says it all
      }
      ptx::cp_async_commit();
      publish_rows(&smem.rows_full[stage], lane);
    }
#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      wait_products_before(smem, head);
      const Tiles tiles = order.next_head();
      const int value_head = item.key_head * p.heads.group + member, slot = tiles.slot(of_values ? kGradV : kGradO);
      ptx::mbarrier_wait(&smem.slot_free[slot], tiles.parity(of_values ? kGradV : kGradO) ^ 1);
      copy_rows<32, 16>(smem.slot[slot], of_values ? p.grad_v : p.grad_o, at, item.tokens, value_head, 0, lane);
      ptx::cp_async_commit();
      publish_rows(&smem.slot_full[slot], lane);
    }
  }
}

// Turns dR into dv in a deferred row, by one thread.
__device__ __forceinline__ void finish_deferred_row(const TokenGradientsParams& p, TokenPlace token, int head, float beta) {
  uint4* const grad = reinterpret_cast<uint4*>(row_pointer(p.grad_v, token, head));
#pragma unroll 1
  for (int unit = 0; unit < 16; ++unit) {
    uint4 x = grad[unit];
    uint32_t* const words[] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *words[i] = ptx::pack_bf16(__fmul_rn(beta, ptx::low_bf16(*words[i])), __fmul_rn(beta, ptx::high_bf16(*words[i])));
    }
    grad[unit] = x;
  }
}

// The sums over tokens and the stores of one value head, by one warp; a lane has tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void store_token_scalars(const TokenGradientsParams& p, const Sums& sums,
                                                    const float (&scalars)[kScalarRows][kChunk], const Item& item, int head,
                                                    int lane) {
  auto pair = [&](const float* x) { return *reinterpret_cast<const float2*>(x + 2 * lane); };
  auto both = [&](const float (&parts)[2][kChunk]) {
    const float2 x = pair(parts[0]), y = pair(parts[1]);
    return make_float2(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
  };
  float2 crossing = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int warp = 0; warp < kMatrixWarps; ++warp) {
    if (warp < lane >> 3) continue;  // its rows are before this gate
    const float2 x = pair(sums.crossing[warp]);
    crossing = make_float2(__fadd_rn(crossing.x, x.x), __fadd_rn(crossing.y, x.y));
  }
  const float2 entering = both(sums.entering), leaving = both(sums.leaving);
  float states = sums.state_dot[0];
#pragma unroll
  for (int i = 1; i < kProductWarps; ++i) states = __fadd_rn(states, sums.state_dot[i]);
  states = __fmul_rn(scalars[kGamma][kChunk - 1], states);

  float from_here = __fadd_rn(entering.x, entering.y), up_to_here = __fadd_rn(leaving.x, leaving.y);
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    const float later = __shfl_down_sync(~0u, from_here, k), earlier = __shfl_up_sync(~0u, up_to_here, k);
    if (lane + k < 32) from_here = __fadd_rn(from_here, later);
    if (lane >= k) up_to_here = __fadd_rn(up_to_here, earlier);
  }
  const float behind = __shfl_down_sync(~0u, from_here, 1), before = __shfl_up_sync(~0u, up_to_here, 1);
  const float later_tokens = lane < 31 ? behind : 0.f;   // in_i of tokens after 2 lane + 1
  const float earlier_tokens = lane > 0 ? before : 0.f;  // end_j of tokens before 2 lane
  const float gate[2] = {
      __fadd_rn(__fadd_rn(crossing.x, from_here), __fadd_rn(earlier_tokens, states)),
      __fadd_rn(__fadd_rn(crossing.y, __fadd_rn(entering.y, later_tokens)),
                __fadd_rn(__fadd_rn(earlier_tokens, leaving.x), states))};
  const TokenPlace at = place_of(item.first_token, p.heads.tokens_per_row);
  double partial[2] = {0., 0.};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row >= item.tokens) continue;
    const TokenPlace token = {at.row, at.token + row};
    float grad_gate = i ? gate[1] : gate[0];
    if (p.gate.raw.data) {
      const GateSlopes slopes = gate_slopes(p.gate, token, head);
      partial[0] += __fmul_rn(grad_gate, slopes.value);
      grad_gate = __fmul_rn(grad_gate, slopes.of_raw);
      partial[1] += grad_gate;
    }
    store_scalar(p.grad_gate, token, head, grad_gate);
    const float beta = scalars[kBeta][row];
    float grad_beta = sums.beta[row];
    if (!is_divided(beta)) {
      grad_beta = __fsub_rn(grad_beta, __fadd_rn(sums.key_residual[0][row], sums.key_residual[1][row]));
    }
    if (is_deferred(beta)) {
      finish_deferred_row(p, token, head, beta);
    } else {
      grad_beta = __fdiv_rn(grad_beta, beta);
    }
    if (p.beta_top != 0.f) {
      grad_beta = __fmul_rn(grad_beta, __fmul_rn(beta, __fsub_rn(1.f, __fdiv_rn(beta, p.beta_top))));
    }
    store_scalar(p.grad_beta, token, head, grad_beta);
  }
  if (p.gate_partials) {
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) {
      partial[0] += __shfl_xor_sync(~0u, partial[0], k);
      partial[1] += __shfl_xor_sync(~0u, partial[1], k);
    }
    if (lane < 2) p.gate_partials[2 * item.record(p.heads, head) + lane] = lane == 0 ? partial[0] : partial[1];
  }
}

// All heads of the CTA, by one warp.
__device__ __forceinline__ void finish_heads(Smem& smem, const TokenGradientsParams& p, int lane) {
  const uint32_t chunks = used_chunks(p);
  Item item;
  for (uint32_t head = 0; item_of(p, chunks, head / p.heads.group, item); ++head) {
    const int value_head = item.key_head * p.heads.group + head % p.heads.group;
    const int stage = head % kScalarStages;
    const uint32_t parity = head >> 1 & 1;
    Sums& sums = smem.sums[head & 1];
    ptx::mbarrier_wait(&smem.scalars_full[stage], head / kScalarStages & 1);
    ptx::mbarrier_wait(&smem.sums_full[head & 1], parity);
    store_token_scalars(p, sums, smem.scalars[stage], item, value_head, lane);
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(&smem.scalars_free[stage]);
      ptx::mbarrier_arrive(&smem.sums_free[head & 1]);
    }
  }
}

}  // namespace cake::gdn::sm90
