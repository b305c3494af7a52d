// token_gradients_sm90: dq, dk, the gradients of the gates and of beta; persistent CTAs, an item is a chunk and key head.
//
//   dP   = scale (dO V'^T) Gamma                       M = -strict_lower(dV V'^T) Gamma
//   dQ  += scale gamma (dO S0^T) + dP K                dK += -gamma (dV S0^T) + e (V' dS1^T) + (M + M^T) K + dP^T Q
//   dbeta_i = dV_i . U_i / beta_i
//   E = M (K K^T) + dP (Q K^T), below the diagonal
//   dg_t = sum_{i >= t > j} E_ij + sum_{i >= t} in_i + sum_{j < t} end_j + gamma_C <dS1, S0>
//
// V' comes as U = V' / beta, U_i = X_i - sum_j (Gamma K K^T)_ij V'_j over j < i; its products get beta with the gates, Gamma_ij beta_j =
// 2^(b_i - (b_j - log2 beta_j)). Where beta is below kDividedFrom a row of U is V' itself, and
//   dbeta_i = (dV_i . V_i - gamma_i k_i . (dV S0^T)_i + sum_j M_ij (K K^T)_ij) / beta_i
// dV is beta dR. Where |beta| is too small to divide by, the row of dV holds dR: there M = beta N, N = -strict_lower(dR V'^T) Gamma, the
// sums for dbeta are of dR and N and not divided, and the warp that finishes the head puts dv into the row.
//
// Two warpgroups own a half of the key columns each, over all value heads of the group in order, dQ and dK in registers. A third one makes
// dP, M + M^T, and the sums of E, up to a head ahead of them. In a fourth, warp 12 fetches tiles by bulk copy, warp 13 copies rows of
// K, Q and dO, warp 14 those of dv, all into one ring of 16 KB slots whose order follows the order of release; warp 15 writes what no chunk
// writes and makes the sums over tokens. Every sum has one order, whatever the grid.
// barriers  slot_full[12], scalars_full[4] (which slots a head has, too), rows_full[4] (K and Q): arrived; *_free: their readers are done
//           products_done[2]: those with a head's tiles that dP and M are made of
//           matrices_full: dP and M + M^T are there; matrices_free: the products with them are done
//           sums_full[2] -> finishing warp -> sums_free[2]
//           named 1: both halves have left, and read, the dots of normalised rows; named 2, 3: a half is past its rows; named 4: a head's
//           `columns` are there
#pragma once

#include "cake/gdn/any/uncovered.cuh"
#include "cake/gdn/sm90/token_gradients_feed.cuh"
#include "cake/gdn/sm90/token_gradients_math.cuh"

namespace cake::gdn::sm90 {

// The CTA's nth item and the slots of its K and Q, when they are there.
struct ItemRows {
  int first_token, tokens, key_head;
  int k_slot, q_slot;
};
__device__ __forceinline__ ItemRows rows_of(const Smem& smem, uint32_t nth) {
  const int4 rows = smem.rows[nth % kRowStages];
  return {rows.x, rows.y, rows.z, rows.w & 15, rows.w >> 4 & 15};
}
__device__ __forceinline__ ItemRows wait_rows(Smem& smem, uint32_t nth) {
  ptx::mbarrier_wait(&smem.rows_full[nth % kRowStages], nth / kRowStages & 1);
  const ItemRows item = rows_of(smem, nth);
  const int parities = smem.rows[nth % kRowStages].w >> 8;
  ptx::mbarrier_wait(&smem.slot_full[item.k_slot], parities & 1);  // at once
  ptx::mbarrier_wait(&smem.slot_full[item.q_slot], parities >> 1 & 1);
  return item;
}

// The address of a head's tile, when it is there.
__device__ __forceinline__ uint32_t arrived(Smem& smem, const Tiles& tiles, int tile) {
  ptx::mbarrier_wait(&smem.slot_full[tiles.slot(tile)], tiles.parity(tile));
  return ptx::shared_address(smem.slot[0]) + tiles.slot(tile) * kSlotBytes;
}

// One thread of each warp of products says that the warp is past a slot. The warps that make dP and M say it too, of the slots that they
// read longer than the products with dP and M of an earlier head wait for them; of the others half of the warps of products count double.
__device__ __forceinline__ void release_slot(Smem& smem, int slot, bool alone, const Place& at) {
  ptx::mbarrier_arrive(&smem.slot_free[slot]);
  if (alone && at.half == 0) ptx::mbarrier_arrive(&smem.slot_free[slot]);
}

// Makes dP and M + M^T of all items, by one warpgroup.
__device__ __forceinline__ void prepare(Smem& smem, const TokenGradientsParams& p, const Place& place) {
  const uint32_t slots = ptx::shared_address(smem.slot[0]);
  uint32_t head = 0, nth = 0;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < smem.items; index += gridDim.x, ++nth) {
    const ItemRows rows = wait_rows(smem, nth);
    const uint32_t k_tile = slots + rows.k_slot * kSlotBytes, q_tile = slots + rows.q_slot * kSlotBytes;
    Products query_key;
    uint4* const key_key = &smem.key_key[place.block * (place.block + 1) / 2][place.lane];
    {
      Fragment x, y;
      ptx::wgmma_keep(x);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      rows_times_rows(x, q_tile, k_tile);
      rows_times_rows(y, k_tile, k_tile);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(x);
      ptx::wgmma_keep(y);
      pack_operand(query_key, x);
      Products products;
      pack_operand(products, y);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (s <= place.block) key_key[32 * s] = make_uint4(products[4 * s], products[4 * s + 1], products[4 * s + 2], products[4 * s + 3]);
      }
    }

#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      const Place at = place.again();
      const int stage = head % kScalarStages;
      ptx::mbarrier_wait(&smem.scalars_full[stage], head / kScalarStages & 1);
      const Tiles tiles = smem.tiles[stage];
      const auto& scalars = smem.scalars[stage];
      auto& columns = smem.columns[head & 1];
      if (at.block < 2) {
        const int token = 32 * at.block + at.lane;
        const float b = scalars[kLog2Decay][token], beta = scalars[kBeta][token];
        columns[token] = is_divided(beta) ? __fsub_rn(b, ptx::log2_approx(beta)) : b;
      }
      Sums& sums = smem.sums[head & 1];
      const ItemRows item = rows_of(smem, nth);
      const uint32_t grad_o = arrived(smem, tiles, kGradO), grad_v = arrived(smem, tiles, kGradV);
      const uint32_t writes = arrived(smem, tiles, kWrites);
      Fragment x, y;
      ptx::wgmma_keep(x);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      rows_times_rows(x, grad_o, writes);
      rows_times_rows(y, grad_v, writes);
      ptx::wgmma_commit();
      ptx::named_barrier_sync(4, kWarpgroupThreads);  // columns
      const bool undivided = any_undivided(scalars[kBeta], item.tokens, at);
      ptx::mbarrier_wait(&smem.sums_free[head & 1], (head >> 1 & 1) ^ 1);

      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(x);
      ptx::wgmma_keep(y);
      Rows of_beta = diagonal(y, place.block, at);
      if (undivided) {
        const Rows values = dot_values(smem.slot[tiles.slot(kGradV)], p.v, place_of(item.first_token, p.heads.tokens_per_row), item.tokens,
                                       item.key_head * p.heads.group + member, at);
        const Rows pairs = sum_interactions(y, key_key, scalars[kLog2Decay], columns, place.block, at);
        const Rows beta = of_rows(scalars[kBeta], at.row);
        if (!is_divided(beta.x)) of_beta.x = __fadd_rn(values.x, pairs.x);
        if (!is_divided(beta.y)) of_beta.y = __fadd_rn(values.y, pairs.y);
      }
      if (has_diagonal(at)) {
        sums.beta[at.row] = of_beta.x;
        sums.beta[at.row + 8] = of_beta.y;
      }
      __syncwarp();
      if (at.lane == 0) {
        for (int tile : {kGradO, kGradV, kWrites}) ptx::mbarrier_arrive(&smem.slot_free[tiles.slot(tile)]);
        ptx::mbarrier_arrive(&smem.products_done[head & 1]);
      }
      ptx::mbarrier_wait(&smem.matrices_free, (head & 1) ^ 1);
      PairTerms pairs;
      const Place here = place.again();
      const LaneOffsets offsets(here.lane);
      make_matrices(ptx::shared_address(smem.attention_grad), ptx::shared_address(smem.interaction_grad), pairs, x, y, query_key, key_key,
                    scalars[kLog2Decay], columns, from_rows(scalars[kBeta], here.row), p.scale, place.block, here, offsets);
      ptx::fence_async_shared();
      __syncwarp();
      if (at.lane == 0) ptx::mbarrier_arrive(&smem.matrices_full);

      sum_crossing(sums.crossing[place.block], pairs, place.block, at);
      __syncwarp();
      if (at.lane == 0) ptx::mbarrier_arrive(&smem.sums_full[head & 1]);
    }
  }
}

// One warpgroup's share of all items: its half of the columns of dQ and dK.
__device__ __forceinline__ void accumulate(Smem& smem, const TokenGradientsParams& p, const Place& place) {
  const uint32_t attention_grad = ptx::shared_address(smem.attention_grad);
  const uint32_t interaction_grad = ptx::shared_address(smem.interaction_grad);
  const uint32_t slots = ptx::shared_address(smem.slot[0]);

  uint32_t head = 0, nth = 0;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < smem.items; index += gridDim.x, ++nth) {
    wait_rows(smem, nth);
    Fragment grad_q, grad_k;
#pragma unroll
    for (int i = 0; i < 32; ++i) grad_q[i] = grad_k[i] = 0.f;

#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      const Place at = place.again();
      const LaneOffsets offsets(at.lane);
      const int stage = head % kScalarStages;
      ptx::mbarrier_wait(&smem.scalars_full[stage], head / kScalarStages & 1);
      const Tiles tiles = smem.tiles[stage];
      const uint32_t k_columns = slots + tiles.k_slot() * kSlotBytes + at.half * kBlockBytes;
      const uint32_t q_columns = slots + tiles.q_slot() * kSlotBytes + at.half * kBlockBytes;
      auto release = [&](int tile) {
        if (at.lane == 0) release_slot(smem, tiles.slot(tile), tile > kWrites, at);
      };
      Sums& sums = smem.sums[head & 1];
      const auto& scalars = smem.scalars[stage];
      Fragment z, w;

      const uint32_t grad_o = arrived(smem, tiles, kGradO);
      const uint32_t entry[2] = {arrived(smem, tiles, kEntryState), arrived(smem, tiles, kEntryState + 1)};
      ptx::wgmma_keep(w);
      ptx::wgmma_fence();
      rows_times_state(w, grad_o, at.half ? entry[1] : entry[0]);
      ptx::wgmma_commit();
      const uint32_t grad_v = arrived(smem, tiles, kGradV);
      ptx::wgmma_keep(z);
      ptx::wgmma_fence();
      rows_times_state(z, grad_v, at.half ? entry[1] : entry[0]);
      ptx::wgmma_commit();

      const Rows gamma = of_rows(scalars[kGamma], at.row);
      const Rows by_query = {__fmul_rn(p.scale, gamma.x), __fmul_rn(p.scale, gamma.y)};
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(w);
      release(kGradO);
      const Rows query = add_scaled(grad_q, w, by_query, q_columns, at, offsets);
      ptx::mbarrier_wait(&smem.sums_free[head & 1], (head >> 1 & 1) ^ 1);

      const uint32_t writes = arrived(smem, tiles, kWrites);
      const uint32_t exit[2] = {arrived(smem, tiles, kExitGrad), arrived(smem, tiles, kExitGrad + 1)};
      ptx::wgmma_keep(w);
      ptx::wgmma_fence();
      rows_times_state(w, writes, at.half ? exit[1] : exit[0]);
      ptx::wgmma_commit();

      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(z);
      release(kGradV);
      const Rows from_row = from_rows(scalars[kBeta], at.row);
      const Rows by_key = {-__fmul_rn(from_row.x, gamma.x), -__fmul_rn(from_row.y, gamma.y)};
      const Rows key = add_scaled(grad_k, z, by_key, k_columns, at, offsets);
      ptx::wgmma_keep(z);
      ptx::wgmma_fence();
      states_times_states(z, exit, entry, at.half);
      ptx::wgmma_commit();
      if (at.c == 0) {
        sums.entering[at.half][at.row] = __fadd_rn(__fmul_rn(by_query.x, query.x), __fmul_rn(by_key.x, key.x));
        sums.entering[at.half][at.row + 8] = __fadd_rn(__fmul_rn(by_query.y, query.y), __fmul_rn(by_key.y, key.y));
        sums.key_residual[at.half][at.row] = __fmul_rn(gamma.x, key.x);
        sums.key_residual[at.half][at.row + 8] = __fmul_rn(gamma.y, key.y);
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(w);
      release(kWrites);
      const Rows beta = of_rows(scalars[kBeta], at.row), decay = of_rows(scalars[kEnd], at.row);
      const Rows end = {__fmul_rn(decay.x, write_strength(beta.x)), __fmul_rn(decay.y, write_strength(beta.y))};
      const Rows leaving = add_scaled(grad_k, w, end, k_columns, at, offsets);
      if (at.c == 0) {
        sums.leaving[at.half][at.row] = __fmul_rn(end.x, leaving.x);
        sums.leaving[at.half][at.row + 8] = __fmul_rn(end.y, leaving.y);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(z);
#pragma unroll
      for (int tile = kEntryState; tile < kTiles; ++tile) release(tile);
      const float states = diagonal_sum(z, place.block, at);
      if (at.lane == 0) sums.state_dot[at.warp] = states;
      __syncwarp();
      if (at.lane == 0) {
        ptx::mbarrier_arrive(&smem.scalars_free[stage]);
        ptx::mbarrier_arrive(&smem.sums_full[head & 1]);
      }

      // Last, so that making dP and M has all of the above to hide behind.
      ptx::mbarrier_wait(&smem.matrices_full, head & 1);
      ptx::wgmma_keep(grad_q);
      ptx::wgmma_keep(grad_k);
      ptx::wgmma_fence();
      add_square_times_rows<false>(grad_q, attention_grad, k_columns);
      add_square_times_rows<false>(grad_k, interaction_grad, k_columns);
      add_square_times_rows<true>(grad_k, attention_grad, q_columns);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(grad_q);
      ptx::wgmma_keep(grad_k);
      if (at.lane == 0) ptx::mbarrier_arrive(&smem.matrices_free);
    }

    const Place at = place.again();
    const LaneOffsets offsets(at.lane);
    const ItemRows item = rows_of(smem, nth);
    char* const k_block = smem.slot[item.k_slot] + at.half * kBlockBytes;
    char* const q_block = smem.slot[item.q_slot] + at.half * kBlockBytes;
    const TokenPlace first = place_of(item.first_token, p.heads.tokens_per_row);
    const int tokens = item.tokens, key_head = item.key_head;
    if (p.q_reciprocal) {
      const int64_t first_row = (int64_t{first.row} * p.heads.tokens_per_row + first.token) * p.heads.key_heads + key_head;
      ptx::named_barrier_sync(1, 2 * kWarpgroupThreads);  // the item before has read its dots
      leave_normal_dots(smem.normal_dots[0], grad_q, q_block, at);
      leave_normal_dots(smem.normal_dots[1], grad_k, k_block, at);
      ptx::named_barrier_sync(1, 2 * kWarpgroupThreads);
      through_normalisation(grad_q, q_block, smem.normal_dots[0], p.q_reciprocal, first_row, p.heads.key_heads, tokens, at);
      through_normalisation(grad_k, k_block, smem.normal_dots[1], p.k_reciprocal, first_row, p.heads.key_heads, tokens, at);
    }
    // All four warps are past this half's columns of K and Q, which carry dK and dQ out.
    ptx::named_barrier_sync(2 + at.half, kWarpgroupThreads);
    GradientRows rows_of_q, rows_of_k;
    take_rows(rows_of_q, grad_q, q_block, at, offsets);
    take_rows(rows_of_k, grad_k, k_block, at, offsets);
    ptx::fence_async_shared();  // bulk copies fill the slots next; before the stores, for which a fence would wait
    __syncwarp();
    if (at.lane == 0) {
      release_slot(smem, item.k_slot, true, at);
      release_slot(smem, item.q_slot, true, at);
    }
    store_rows(rows_of_q, p.grad_q, first, tokens, key_head, at);
    store_rows(rows_of_k, p.grad_k, first, tokens, key_head, at);
  }
}

}  // namespace cake::gdn::sm90

extern "C" __global__ void __launch_bounds__(512, 1)
    token_gradients_sm90(const __grid_constant__ cake::gdn::TokenGradientsParams p) {
  using namespace cake::gdn;
  using namespace cake::gdn::sm90;
  begin_stage();
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  static_assert(sizeof(Smem) == kTokenGradientsSm90SmemBytes && kThreads == kTokenGradientsSm90Threads);
  const int warp = warp_index(), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    smem.items = used_chunks(p) * p.part.key_heads;
    init_barriers(smem);
  }
  __syncthreads();
  if (warp < kProductWarps) {
    ptx::take_registers<168>();
    accumulate(smem, p, Place::place_in(warp, lane));
  } else if (warp < kTileWarp) {
    ptx::take_registers<136>();
    prepare(smem, p, Place::place_in(warp - kProductWarps, lane));
  } else {
    ptx::give_registers<40>();
    if (warp == kTileWarp) {
      if (lane == 0) feed_tiles(smem, p);
    } else if (warp < kFinishWarp) {
      feed_rows(smem, p, warp == kValueRowWarp, lane);
    } else {
      fill_uncovered_by_stage<32>(p.uncovered, p.tables, p.heads, lane);  // it waits for the first head longest
      finish_heads(smem, p, lane);
    }
  }
}
