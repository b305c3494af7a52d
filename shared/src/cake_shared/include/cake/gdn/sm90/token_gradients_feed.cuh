// The warps of token_gradients_sm90 that make no products: one fetches tiles, one fetches rows, two finish dg and dbeta.
#pragma once

#include "cake/gdn/any/gate_option.cuh"
#include "cake/gdn/sm90/token_gradients_smem.cuh"

namespace cake::gdn::sm90 {

// Waits until both warpgroups of a chain have announced what they wrote of a chunk and value head.
__device__ __forceinline__ void wait_for_arrivals(const uint32_t* arrivals) {
  uint32_t count;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(arrivals) : "memory");
  } while (count < 2);
  cuda::ptx::fence_proxy_async();  // what was written before is read by bulk copies now
}

// Workspace tiles and scalars, by one thread.
__device__ __forceinline__ void feed_tiles(Smem& smem, const TokenGradientsParams& p, const uint32_t* arrivals, Items items) {
  Item item;
  uint32_t head = 0;
  while (items.take(p.heads, item)) {
#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      const int64_t record = int64_t{item.chunk_index} * p.heads.value_heads + item.key_head * p.heads.group + member;
      const int stage = head % kScalarStages;
      ptx::mbarrier_wait(&smem.scalars_free[stage], (head / kScalarStages & 1) ^ 1);
      ptx::mbarrier_arrive_expect_bytes(&smem.scalars_full[stage], 4 * kScalarFloats);
      ptx::bulk_load(smem.scalars[stage], p.scalars + record * kScalarFloats, 4 * kScalarFloats, &smem.scalars_full[stage]);
      wait_for_arrivals(arrivals + record);
      const char* const from[] = {p.residual_gradients + record * kTokenTileBytes,
                                  p.writes + record * kTokenTileBytes,
                                  p.entry_states + record * kStateTileBytes,
                                  p.entry_states + record * kStateTileBytes + kStateBlockBytes,
                                  p.exit_gradients + record * kStateTileBytes,
                                  p.exit_gradients + record * kStateTileBytes + kStateBlockBytes};
#pragma unroll
      for (int i = 0; i < kTiles - 1; ++i) {
        const Slot slot = slot_of(head, kResidualGrad + i);
        ptx::mbarrier_wait(&smem.slot_free[slot.index], slot.parity ^ 1);
        ptx::mbarrier_arrive_expect_bytes(&smem.slot_full[slot.index], kSlotBytes);
        ptx::bulk_load(smem.slot[slot.index], from[i], kSlotBytes, &smem.slot_full[slot.index]);
      }
    }
  }
}

// Publishes the rows that the warp has copied: they are visible to wgmma when the barrier's phase ends.
__device__ __forceinline__ void publish_rows(uint64_t* full, int lane) {
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_async_shared();
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(full);
}

// Brings a head's rows of V into L2, where the consumers will look for them.
__device__ __forceinline__ void prefetch_values(const TokenRows& values, TokenPlace first, int tokens, int head, int lane) {
#pragma unroll 1
  for (int i = lane; i < 2 * tokens; i += 32) {
    const char* line = row_pointer(values, {first.row, first.token + (i >> 1)}, head) + 128 * (i & 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// Rows of K and Q an item ahead, and of dO, by one warp: any strides, and zeros past a chunk's last token.
__device__ __forceinline__ void feed_rows(Smem& smem, const TokenGradientsParams& p, Items items, int lane) {
  auto feed_keys = [&](const Item& item, uint32_t nth) {
    const int buffer = nth & 1;
    ptx::mbarrier_wait(&smem.rows_free[buffer], (nth >> 1 & 1) ^ 1);
    if (item.tokens > 0) {
      const TokenPlace at = place_of(item.first_token, p.heads.tokens_per_row);
      copy_rows<32, 16>(smem.k[buffer], p.k, at, item.tokens, item.key_head, 0, lane);
      copy_rows<32, 16>(smem.q[buffer], p.q, at, item.tokens, item.key_head, 0, lane);
    }
    if (lane == 0) smem.rows[buffer] = make_int4(item.first_token, item.tokens, item.chunk_index, item.key_head);
    publish_rows(&smem.rows_full[buffer], lane);
  };
  Item item, following;
  uint32_t head = 0;
  if (!items.take(p.heads, item)) item.tokens = 0;
  feed_keys(item, 0);
  for (uint32_t nth = 1; item.tokens > 0; ++nth) {
    const TokenPlace at = place_of(item.first_token, p.heads.tokens_per_row);
    if (!items.take(p.heads, following)) following.tokens = 0;
#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      const Slot slot = slot_of(head, kGradO);
      ptx::mbarrier_wait(&smem.slot_free[slot.index], slot.parity ^ 1);
      copy_rows<32, 16>(smem.slot[slot.index], p.grad_o, at, item.tokens, item.key_head * p.heads.group + member, 0, lane);
      prefetch_values(p.v, at, item.tokens, item.key_head * p.heads.group + member, lane);
      publish_rows(&smem.slot_full[slot.index], lane);
      if (member == 0) feed_keys(following, nth);
    }
    item = following;
  }
}

// The sums over tokens and the stores of one value head, by one warp; a lane has tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void store_token_scalars(const TokenGradientsParams& p, const Sums& sums,
                                                    const float (&scalars)[kScalarRows][kChunk], const int4& item, int lane) {
  auto pair = [&](const float* x) { return *reinterpret_cast<const float2*>(x + 2 * lane); };
  auto both = [&](const float (&parts)[2][kChunk]) {
    const float2 x = pair(parts[0]), y = pair(parts[1]);
    return make_float2(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
  };
  float2 crossing = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    if ((warp & 3) < lane >> 3) continue;  // its rows are before this gate
    const float2 x = pair(sums.crossing[warp]);
    crossing = make_float2(__fadd_rn(crossing.x, x.x), __fadd_rn(crossing.y, x.y));
  }
  const float2 entering = both(sums.entering), leaving = both(sums.leaving);
  float states = sums.state_dot[0];
#pragma unroll
  for (int i = 1; i < kConsumerWarps; ++i) states = __fadd_rn(states, sums.state_dot[i]);
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
  const TokenPlace at = place_of(item.x, p.heads.tokens_per_row);
  const int head = item.w;
  double partial[2] = {0., 0.};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row >= item.y) continue;
    const TokenPlace token = {at.row, at.token + row};
    float grad_gate = i ? gate[1] : gate[0];
    if (p.gate.raw.data) {
      const GateSlopes slopes = gate_slopes(p.gate, token, head);
      partial[0] += __fmul_rn(grad_gate, slopes.value);
      grad_gate = __fmul_rn(grad_gate, slopes.of_raw);
      partial[1] += grad_gate;
    }
    store_scalar(p.grad_gate, token, head, grad_gate);
    float grad_beta = __fadd_rn(sums.key_residual[0][row], sums.key_residual[1][row]);
    grad_beta = __fadd_rn(__fsub_rn(__fadd_rn(sums.beta_value[0][row], sums.beta_value[1][row]), grad_beta), sums.beta_matrix[row]);
    if (p.beta_top != 0.f) {
      const float beta = scalars[kBeta][row];
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
    if (lane < 2) p.gate_partials[2 * (int64_t{item.z} * p.heads.value_heads + head) + lane] = lane == 0 ? partial[0] : partial[1];
  }
}

// Every second head of the CTA, by one warp of two.
__device__ __forceinline__ void finish_heads(Smem& smem, const TokenGradientsParams& p, uint32_t turn, int lane) {
  Sums& sums = smem.sums[turn];
  for (uint32_t head = turn;; head += 2) {
    const int stage = head % kScalarStages;
    ptx::mbarrier_wait(&smem.sums_full[turn], head >> 1 & 1);
    const int4 item = sums.item;
    if (item.y == 0) return;
    ptx::mbarrier_wait(&smem.scalars_full[stage], head / kScalarStages & 1);
    store_token_scalars(p, sums, smem.scalars[stage], item, lane);
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(&smem.scalars_free[stage]);
      ptx::mbarrier_arrive(&smem.sums_free[turn]);
    }
  }
}

}  // namespace cake::gdn::sm90
