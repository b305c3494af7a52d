// token_gradients_sm90: dq, dk, the gradients of the gates and of beta; persistent CTAs, an item is a chunk and key head.
//
//   dP   = scale (dO V'^T) Gamma                       M = -strict_lower(dV V'^T) Gamma
//   dQ  += scale gamma (dO S0^T) + dP K                dK += -gamma (dV S0^T) + e (V' dS1^T) + (M + M^T) K + dP^T Q
//   dbeta_i = (dV_i . V_i - gamma_i k_i . (dV S0^T)_i + sum_j M_ij (K K^T)_ij) / beta_i
//   E = M (K K^T) + dP (Q K^T), below the diagonal
//   dg_t = sum_{i >= t > j} E_ij + sum_{i >= t} in_i + sum_{j < t} end_j + gamma_C <dS1, S0>
//
// dV is beta dR. Where beta is too small to divide by, the row of dV holds dR: there M = beta N, N = -strict_lower(dR V'^T) Gamma, the sums
// for dbeta are of dR and N and not divided, and the warp that finishes the head puts dv into the row.
//
// Two warpgroups own a half of the key columns each, over all value heads of the group in order, dQ and dK in registers; half 0 makes
// dP, half 1 makes M. A third warpgroup: warp 8 fetches tiles by bulk copy, warp 9 copies rows of K, Q, dO and dv, both into one ring of
// 16 KB slots whose order follows the order of release; warps 10 and 11 take turns at the sums over tokens. Every sum has one order,
// whatever the grid.
// barriers  slot_full[12], scalars_full[4] (which slots a head has, too), rows_full[4] (K and Q): arrived; *_free: their readers are done
//           named 1: dP and M written by both halves; matrices_free: their readers are done; named 2, 3: a half is past its rows
//           sums_full[2] -> finishing warp of that turn -> sums_free[2]
#pragma once

#include "cake/gdn/sm90/token_gradients_feed.cuh"
#include "cake/gdn/sm90/token_gradients_math.cuh"

namespace cake::gdn::sm90 {

// One warpgroup's share of all items.
__device__ __forceinline__ void consume(Smem& smem, const TokenGradientsParams& p, const Place& at) {
  const LaneOffsets offsets(at.lane);
  const uint32_t attention_grad = ptx::shared_address(smem.attention_grad);
  const uint32_t interaction_grad = ptx::shared_address(smem.interaction_grad);
  const uint32_t slots = ptx::shared_address(smem.slot[0]);

  const uint32_t items = used_chunks(p) * p.part.key_heads;
  uint32_t head = 0;
#pragma unroll 1
  for (uint32_t nth = 0; blockIdx.x + nth * gridDim.x < items; ++nth) {
    const int4& place = smem.rows[nth % kRowStages];
    ptx::mbarrier_wait(&smem.rows_full[nth % kRowStages], nth / kRowStages & 1);
    const int k_slot = place.w & 15, q_slot = place.w >> 4 & 15;
    ptx::mbarrier_wait(&smem.slot_full[k_slot], place.w >> 8 & 1);  // at once
    ptx::mbarrier_wait(&smem.slot_full[q_slot], place.w >> 9 & 1);
    const uint32_t k_tile = slots + k_slot * kSlotBytes, q_tile = slots + q_slot * kSlotBytes;
    char* const k_block = smem.slot[k_slot] + at.half * kBlockBytes;
    char* const q_block = smem.slot[q_slot] + at.half * kBlockBytes;
    const uint32_t k_columns = k_tile + at.half * kBlockBytes, q_columns = q_tile + at.half * kBlockBytes;

    Fragment grad_q, grad_k;
    ptx::wgmma_keep(grad_q);
    ptx::wgmma_fence();
    rows_times_rows(grad_q, at.half ? k_tile : q_tile, k_tile);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(grad_q);
    Products products;  // Q K^T in half 0, K K^T in half 1
#pragma unroll
    for (int i = 0; i < 16; ++i) products[i] = ptx::pack_bf16(grad_q[2 * i], grad_q[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 32; ++i) grad_q[i] = grad_k[i] = 0.f;

#pragma unroll 1
    for (int member = 0; member < p.heads.group; ++member, ++head) {
      const int stage = head % kScalarStages;
      ptx::mbarrier_wait(&smem.scalars_full[stage], head / kScalarStages & 1);
      const Tiles tiles = smem.tiles[stage];
      auto arrived = [&](int tile) {
        ptx::mbarrier_wait(&smem.slot_full[tiles.slot(tile)], tiles.parity(tile));
        return slots + tiles.slot(tile) * kSlotBytes;
      };
      auto release = [&](int tile) {
        if (at.lane == 0) ptx::mbarrier_arrive(&smem.slot_free[tiles.slot(tile)]);
      };
      Sums& sums = smem.sums[head & 1];
      const auto& scalars = smem.scalars[stage];
      Fragment z, w;

      const uint32_t grad_o = arrived(kGradO), grad_v = arrived(kGradV), writes = arrived(kWrites);
      ptx::wgmma_keep(z);
      ptx::wgmma_fence();
      rows_times_rows(z, at.half ? grad_v : grad_o, writes);
      ptx::wgmma_commit();
      const uint32_t entry[2] = {arrived(kEntryState), arrived(kEntryState + 1)};
      ptx::wgmma_keep(w);
      ptx::wgmma_fence();
      rows_times_state(w, grad_o, at.half ? entry[1] : entry[0]);
      ptx::wgmma_commit();

      ptx::mbarrier_wait(&smem.sums_free[head & 1], (head >> 1 & 1) ^ 1);
      ptx::mbarrier_wait(&smem.matrices_free, (head & 1) ^ 1);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(z);
      uint32_t terms[8][2];
      const Rows matrix = make_matrices(z, products, at.half ? interaction_grad : attention_grad, terms, scalars[kLog2Decay], p.scale,
                                        at.half ? from_rows(scalars[kBeta], at.row) : Rows{1.f, 1.f}, at, offsets);
      if (at.half && at.c == 0) {
        sums.beta_matrix[at.row] = matrix.x;
        sums.beta_matrix[at.row + 8] = matrix.y;
      }
      ptx::fence_async_shared();
      ptx::named_barrier_sync(1, 2 * kWarpgroupThreads);

      ptx::wgmma_keep(z);
      ptx::wgmma_fence();
      rows_times_state(z, grad_v, at.half ? entry[1] : entry[0]);
      ptx::wgmma_commit();
      sum_crossing(sums.crossing[at.warp], terms, at);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(w);
      release(kGradO);
      const Rows gamma = of_rows(scalars[kGamma], at.row);
      const Rows by_query = {__fmul_rn(p.scale, gamma.x), __fmul_rn(p.scale, gamma.y)};
      const Rows query = add_scaled(grad_q, w, by_query, q_block, at);

      const uint32_t exit[2] = {arrived(kExitGrad), arrived(kExitGrad + 1)};
      ptx::wgmma_keep(w);
      ptx::wgmma_fence();
      rows_times_state(w, writes, at.half ? exit[1] : exit[0]);
      ptx::wgmma_commit();
      ptx::wgmma_keep(grad_q);
      ptx::wgmma_fence();
      add_square_times_rows<false>(grad_q, attention_grad, k_columns);
      ptx::wgmma_commit();

      Values values;
      load_values(values, p.v, place_of(place.x, p.heads.tokens_per_row), place.y, place.z * p.heads.group + member, at);
      const float states = state_dot(exit, entry, at, offsets);
      if (at.lane == 0) sums.state_dot[at.warp] = states;
      dot_values(sums.beta_value[at.half], smem.slot[tiles.slot(kGradV)] + at.half * kBlockBytes, values, at);

      ptx::wgmma_wait<2>();
      ptx::wgmma_keep(z);
      __syncwarp();
      release(kGradV);
      release(kEntryState);
      release(kEntryState + 1);
      const Rows from_row = from_rows(scalars[kBeta], at.row);
      const Rows by_key = {-__fmul_rn(from_row.x, gamma.x), -__fmul_rn(from_row.y, gamma.y)};
      const Rows key = add_scaled(grad_k, z, by_key, k_block, at);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(w);
      release(kWrites);
      release(kExitGrad);
      release(kExitGrad + 1);
      const Rows end = of_rows(scalars[kEnd], at.row);
      const Rows leaving = add_scaled(grad_k, w, end, k_block, at);
      ptx::wgmma_keep(grad_k);
      ptx::wgmma_fence();
      add_square_times_rows<false>(grad_k, interaction_grad, k_columns);
      add_square_times_rows<true>(grad_k, interaction_grad, k_columns);
      add_square_times_rows<true>(grad_k, attention_grad, q_columns);
      ptx::wgmma_commit();

      if (at.c == 0) {
        const int half = at.half, row = at.row;
        sums.entering[half][row] = __fadd_rn(__fmul_rn(by_query.x, query.x), __fmul_rn(by_key.x, key.x));
        sums.entering[half][row + 8] = __fadd_rn(__fmul_rn(by_query.y, query.y), __fmul_rn(by_key.y, key.y));
        sums.leaving[half][row] = __fmul_rn(end.x, leaving.x);
        sums.leaving[half][row + 8] = __fmul_rn(end.y, leaving.y);
        sums.key_residual[half][row] = __fmul_rn(gamma.x, key.x);
        sums.key_residual[half][row + 8] = __fmul_rn(gamma.y, key.y);
      }
      __syncwarp();
      if (at.lane == 0) {
        ptx::mbarrier_arrive(&smem.scalars_free[stage]);
        ptx::mbarrier_arrive(&smem.sums_full[head & 1]);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(grad_q);
      ptx::wgmma_keep(grad_k);
      if (at.lane == 0) ptx::mbarrier_arrive(&smem.matrices_free);
    }

    const TokenPlace first = place_of(place.x, p.heads.tokens_per_row);
    const int tokens = place.y, key_head = place.z;
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
    store_gradient(grad_q, q_block, p.grad_q, first, tokens, key_head, at, offsets);
    store_gradient(grad_k, k_block, p.grad_k, first, tokens, key_head, at, offsets);
    __syncwarp();
    if (at.lane == 0) {
      ptx::mbarrier_arrive(&smem.slot_free[k_slot]);
      ptx::mbarrier_arrive(&smem.slot_free[q_slot]);
    }
  }
}

}  // namespace cake::gdn::sm90

extern "C" __global__ void __launch_bounds__(384, 1)
    token_gradients_sm90(const __grid_constant__ cake::gdn::TokenGradientsParams p) {
  using namespace cake::gdn;
  using namespace cake::gdn::sm90;
  begin_stage();
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  static_assert(sizeof(Smem) == kTokenGradientsSm90SmemBytes && kThreads == kTokenGradientsSm90Threads);
  const int warp = warp_index(), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if (warp < kConsumerWarps) {
    ptx::take_registers<232>();
    consume(smem, p, {warp, lane, warp >> 2, warp & 3, 16 * (warp & 3) + (lane >> 2), lane & 3});
  } else {
    ptx::give_registers<40>();
    if (warp == kConsumerWarps) {
      if (lane == 0) feed_tiles(smem, p);
    } else if (warp == kConsumerWarps + 1) {
      feed_rows(smem, p, lane);
    } else {
      finish_heads(smem, p, warp - kConsumerWarps - 2, lane);
    }
  }
}
