#pragma once

#include "cake/gdn/any/offset_scan.cuh"
#include "cake/ptx/grid_dependency.cuh"

// pack_offsets_any: token_offsets = cu_seqlens if it starts at 0, never decreases and ends within the buffer, else all 0;
// chunk_offsets, segment_offsets: prefix sums of chunks_of and segments_of over the sequences. For packs of more sequences than
// every CTA of the prologue would want to read for itself.
// reads   cu_seqlens (int32 or int64), each element up to three times
// writes  the three offset arrays and status; error_word of a malformed pack
// order   one CTA, see scan_offsets. Integers: any order gives the same
// barriers  those of scan_offsets; each is a __syncthreads of all threads
extern "C" __global__ void __launch_bounds__(cake::gdn::kPackOffsetsThreads, 1)
    pack_offsets_any(const __grid_constant__ cake::gdn::PackOffsetsParams p) {
  using namespace cake::gdn;
  __shared__ OffsetScanSmem<kPackOffsetsThreads> smem;
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  const int32_t faults =
      scan_offsets(p, {p.tables.token_offsets, p.tables.chunk_offsets, p.tables.segment_offsets}, smem);
  if (threadIdx.x == 0) report_scan(p, faults, smem);
}
