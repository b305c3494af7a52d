// The states at the borders of the segments of long sequences, in FP32, in place:
//
//   segment_entries_any  E_1 = N_0 (segment 0 ran from its true entry),  E_{s+1} = M_s E_s + N_s
//   segment_exits_any    D_{n-2} = Y_{n-1} (the last ran from its true exit),  D_{s-1} = M_s^T D_s + Y_s
//
// reads   M, transposed; N in the entry slot of the next segment, or Y in the segment's own
// writes  E in the segment's slot; D in the slot of the next segment
// order   a CTA takes every so many-th stretch, value head and 16 value columns, of which those with a long sequence are looked for
//         at once; a thread a key row and four columns; segments in sequence order, keys ascending, FP32 fused multiply-adds
// barriers  what there is to do found | done | what was found of earlier borders read | what the next ones take found | the state of
//           a border written, in one of two buffers, and that of the one before it read; with a transposed M also a strip of it
//           written | read
#pragma once

#include "cake/gdn/any/forgets.cuh"
#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/smem_sizes.h"

namespace cake::gdn {

struct SegmentStatesConfig {
  static constexpr int kThreads = kSegmentStatesThreads;
  static constexpr int kColumns = kSegmentStatesColumns;
  static constexpr int kStrip = 32;  // keys of M that a transposed pass stages at a time
  static constexpr int kLookAhead = 64;  // borders of which it is found at a time whether they take from the one visited before
};

struct SegmentStatesSmem {
  alignas(16) float state[2][kHeadDim][SegmentStatesConfig::kColumns];  // [key][value column]
  float strip[kHeadDim][SegmentStatesConfig::kStrip + 1];
  int32_t taken[SegmentStatesConfig::kLookAhead];
  uint32_t found[SegmentStatesConfig::kThreads / 32];  // a bit a thread
};
static_assert(sizeof(SegmentStatesSmem) == kSegmentStatesSmemBytes);

__device__ __forceinline__ void add_scaled(float (&sum)[4], float m, const float4& s) {
  sum[0] = fmaf(m, s.x, sum[0]);
  sum[1] = fmaf(m, s.y, sum[1]);
  sum[2] = fmaf(m, s.z, sum[2]);
  sum[3] = fmaf(m, s.w, sum[3]);
}

// The sequence whose first token at a multiple of kSegmentedAboveTokens in its row is that of `stretch`, if it has several
// segments: every such sequence has one, and no two have the same. Else sequence -1.
__device__ __forceinline__ SegmentPlace long_sequence_at(const PackTables& tables, const Heads& heads, uint32_t stretch) {
  using cake::work::kSegmentedAboveTokens;
  const uint32_t stretches = static_cast<uint32_t>(segment_stretches_of(heads.tokens_per_row));
  const uint32_t row = stretch / stretches;
  const int32_t token = static_cast<int32_t>(row * heads.tokens_per_row + (stretch - row * stretches) * kSegmentedAboveTokens);
  const SegmentPlace none = {-1, 0, 0, 0, 0, 0};
  if (token >= tables.token_offsets[tables.sequences]) return none;
  const int32_t sequence = cake::work::range_of(tables.token_offsets, tables.sequences, token);
  const int32_t begin = tables.token_offsets[sequence], tokens = tables.token_offsets[sequence + 1] - begin;
  if (tokens <= kSegmentedAboveTokens || token - begin >= kSegmentedAboveTokens) return none;
  return {sequence, begin, tables.chunk_offsets[sequence], cake::work::kSegmentChunks, 0, cake::work::segments_of(tokens)};
}

// Where an item lies: 16 value columns of a head of the long sequence of a stretch, if it has one.
struct SegmentStatesItem {
  SegmentPlace first;
  int head, slice;

  __device__ __forceinline__ SegmentStatesItem(const SegmentStatesParams& p, uint32_t item) {
    constexpr uint32_t kSlices = kHeadDim / SegmentStatesConfig::kColumns;
    const uint32_t work = item / kSlices, stretch = work / static_cast<uint32_t>(p.heads.value_heads);
    slice = static_cast<int>(item % kSlices);
    head = static_cast<int>(work - stretch * p.heads.value_heads);
    first = long_sequence_at(p.tables, p.heads, stretch);
  }
};

template <bool kReverse>
__device__ __forceinline__ void compose_item(const SegmentStatesParams& p, SegmentStatesSmem& smem, const SegmentStatesItem& item) {
  using Config = SegmentStatesConfig;
  static_assert(Config::kThreads == kHeadDim * Config::kColumns / 4);
  const SegmentPlace& first = item.first;
  const int head = item.head, slice = item.slice;

  const int key = threadIdx.x % kHeadDim, column = threadIdx.x / kHeadDim * 4;
  const int borders = first.segments - 1;
  const int64_t step = int64_t{p.heads.value_heads} * kStateElements;
  const int64_t slot = slot_offset(first, p.heads, p.slots_per_row, head, 1);  // border b lies at slot + b * step
  const int64_t own = slot + static_cast<int64_t>(slice * Config::kColumns + column) * kHeadDim + key;
  // M of the segment between border i and the one visited before: slot s holds that of segment s + 1.
  const auto factor_slot_of = [&](int i) { return kReverse ? borders - 1 - i : i - 1; };
  // Finds of border i and those behind it whether they take from the one visited before; what that depends on is loaded of all of a
  // warp's together.
  const auto find_taken = [&](int i) {
    constexpr int kWarps = Config::kThreads / 32, kEach = Config::kLookAhead / kWarps;
    const int warp = threadIdx.x / 32;
    float parts[kEach] = {};
    bool taken[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int border = i + warp + kWarps * j;
      taken[j] = border > 0 && border < borders;
      const int32_t factor_chunk = first.first_chunk + (factor_slot_of(border) + 1) * cake::work::kSegmentChunks;
      if (taken[j] && p.scalars) parts[j] = decay_part(p.scalars, factor_chunk, p.heads.value_heads, head);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool forgotten = p.scalars && forgets(parts[j]);
      if (threadIdx.x % 32 == 0) smem.taken[warp + kWarps * j] = taken[j] && !forgotten;
    }
  };
#pragma unroll 1
  for (int i = 0; i < borders; ++i) {
    const int ahead = i % (Config::kLookAhead - 1);
    if (ahead == 0) {  // of these borders and the one behind them
      __syncthreads();
      find_taken(i);
      __syncthreads();
    }
    const bool taken = smem.taken[ahead] != 0, given = smem.taken[ahead + 1] != 0;
    if (!taken && !given) continue;  // what is there stays, and nobody asks for it
    const int border = kReverse ? borders - 1 - i : i;
    float* at = p.states + own + border * step;
    float next[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) next[v] = at[v * kHeadDim];
    if (taken) {
      const int factor_slot = factor_slot_of(i);
      const float* factor = p.factors + slot + factor_slot * step;
      const auto& from = smem.state[i & 1];
      if constexpr (kReverse) {
#pragma unroll 1
        for (int k0 = 0; k0 < kHeadDim; k0 += Config::kStrip) {
          for (int j = threadIdx.x; j < kHeadDim * Config::kStrip; j += Config::kThreads) {
            smem.strip[j / Config::kStrip][j % Config::kStrip] = factor[j / Config::kStrip * kHeadDim + k0 + j % Config::kStrip];
          }
          __syncthreads();
#pragma unroll 8
          for (int k = 0; k < Config::kStrip; ++k) {
            add_scaled(next, smem.strip[key][k], *reinterpret_cast<const float4*>(&from[k0 + k][column]));
          }
          __syncthreads();
        }
      } else {
#pragma unroll 16
        for (int k = 0; k < kHeadDim; ++k) {
          add_scaled(next, factor[k * kHeadDim + key], *reinterpret_cast<const float4*>(&from[k][column]));
        }
      }
#pragma unroll
      for (int v = 0; v < 4; ++v) at[v * kHeadDim] = next[v];
    }
    if (given) {
      *reinterpret_cast<float4*>(&smem.state[(i + 1) & 1][key][column]) = make_float4(next[0], next[1], next[2], next[3]);
    }
    __syncthreads();
  }
}

template <bool kReverse>
__device__ __forceinline__ void compose_segments(const SegmentStatesParams& p) {
  constexpr int kThreads = SegmentStatesConfig::kThreads;
  if (p.tables.status[kHasSegments] == 0) return;
  auto& smem = *reinterpret_cast<SegmentStatesSmem*>(smem_bytes);
  const uint32_t items = static_cast<uint32_t>(p.items);
#pragma unroll 1
  for (uint32_t begin = blockIdx.x; begin < items; begin += kThreads * gridDim.x) {
    const uint32_t mine = begin + threadIdx.x * gridDim.x;
    const uint32_t found = __ballot_sync(~0u, mine < items && SegmentStatesItem(p, mine).first.sequence >= 0);
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem.found[threadIdx.x / 32] = found;
    __syncthreads();
#pragma unroll 1
    for (uint32_t warp = 0; warp < kThreads / 32; ++warp) {
#pragma unroll 1
      for (uint32_t left = smem.found[warp]; left != 0; left &= left - 1) {
        compose_item<kReverse>(p, smem, SegmentStatesItem(p, begin + (32 * warp + __ffs(static_cast<int>(left)) - 1) * gridDim.x));
      }
    }
  }
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kSegmentStatesThreads, 1)
    segment_entries_any(const __grid_constant__ cake::gdn::SegmentStatesParams p) {
  cake::gdn::begin_stage();
  cake::gdn::compose_segments<false>(p);
}

extern "C" __global__ void __launch_bounds__(cake::gdn::kSegmentStatesThreads, 1)
    segment_exits_any(const __grid_constant__ cake::gdn::SegmentStatesParams p) {
  cake::gdn::begin_stage();
  cake::gdn::compose_segments<true>(p);
}
