// A step of a CTA's 128 rows of P in shared memory: copied there, and read as the fragments of wgmma's left operand.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/cta.cuh"

namespace dense_projection_det_gemm {

// kWhole: whether whole tiles have code of their own, for which the narrow program has no registers.
template <class Element, bool kRowsAdjacent, bool kWhole>
struct RouterTile {
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(Element));  // elements of 16 bytes
  static constexpr int kPBytes = kRouterRows * kRouterStep * static_cast<int>(sizeof(Element));

  // 16-byte units of a tile of P: rows along the depth [128][16], or along the rows [16][128], units of a row permuted so that
  // the fragments' lanes meet all banks.
  __device__ static __forceinline__ uint32_t unit_offset(int row, int unit) {
    if constexpr (kRowsAdjacent) {
      return row * (kPBytes / kRouterStep) + 16 * (unit ^ (row >> 1 & 3) << 1);
    } else {
      return row * (kPBytes / kRouterRows) + 16 * unit;
    }
  }

  __device__ static __forceinline__ void copy(const RouterOutParams& p, uint32_t stage, int row0, int k0, int thread) {
    constexpr int kUnitsARow = (kRowsAdjacent ? kRouterRows : kRouterStep) / kUnit;
    constexpr int kCopies = kPBytes / 16 / 128;
    const int major0 = kRowsAdjacent ? row0 : k0, minor0 = kRowsAdjacent ? k0 : row0;
    const int major_extent = kRowsAdjacent ? p.work.rows : p.work.depth;
    const int minor_extent = kRowsAdjacent ? p.work.depth : p.work.rows;
    const int64_t pitch = kRowsAdjacent ? p.p.depth_stride : p.p.stride;
    // Whole tiles, in half of the instructions.
    constexpr int kRows = 128 / kUnitsARow;
    if (kWhole && major0 + kUnit * kUnitsARow <= major_extent && minor0 + kRows * kCopies <= minor_extent) {
      const int unit = thread % kUnitsARow, row = thread / kUnitsARow;
      const Element* source = static_cast<const Element*>(p.p.data) + (minor0 + row) * pitch + major0 + kUnit * unit;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(stage + unit_offset(row + kRows * i, unit)),
                     "l"(source)
                     : "memory");
        source += kRows * pitch;
      }
      return;
    }
    const int again = ptx::opaque(thread);  // registers hold nothing of this for all steps
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int index = again + 128 * i, unit = index % kUnitsARow, row = index / kUnitsARow;
      const int major = major0 + kUnit * unit;
      const int left = minor0 + row < minor_extent ? max(0, min(kUnit, major_extent - major)) : 0;
      const Element* source = static_cast<const Element*>(p.p.data) + (left > 0 ? (minor0 + row) * pitch + major : 0);
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(stage + unit_offset(row, unit)), "l"(source),
                   "r"(left * static_cast<int>(sizeof(Element)))
                   : "memory");
    }
  }

  __device__ static __forceinline__ void load(RouterRaw& raw, uint32_t tile, int warp_row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if constexpr (kRowsAdjacent) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int k = 2 * c + (r & 1) + 8 * (r >> 1), row = warp_row + 2 * g;
        float x, y;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(x), "=f"(y)
                     : "r"(tile + unit_offset(k, row / kUnit) + 4 * (row % kUnit))
                     : "memory");
        raw[r & 2][r & 1] = x;
        raw[(r & 2) + 1][r & 1] = y;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x, y, z, w;
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                     : "r"(tile + unit_offset(warp_row + g + 8 * half, c))
                     : "memory");
        raw[half][0] = x, raw[half][1] = y, raw[2 + half][0] = z, raw[2 + half][1] = w;
      }
    }
  }

  __device__ static __forceinline__ void load(uint32_t (&pairs)[4], uint32_t tile, int warp_row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if constexpr (kRowsAdjacent) {
      uint32_t rows[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int k = 2 * c + (r & 1) + 8 * (r >> 1), row = warp_row + 2 * g;
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(rows[r])
                     : "r"(tile + unit_offset(k, row / kUnit) + 2 * (row % kUnit))
                     : "memory");
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pairs[2 * half] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x5410);
        pairs[2 * half + 1] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x7632);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                     : "=r"(pairs[half]), "=r"(pairs[2 + half])
                     : "r"(tile + unit_offset(warp_row + g + 8 * half, c >> 1) + 8 * (c & 1))
                     : "memory");
      }
    }
  }

  __device__ static __forceinline__ void load_first(RouterRaw& raw, const RouterOutParams& p, int64_t row0, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = row0 + (kRowsAdjacent ? 2 * g + (r & 1) : g + 8 * (r & 1));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = 4 * c + 2 * (r >> 1) + i;  // any place: the hint takes the largest
        raw[r][i] = row < p.work.rows && k < p.work.depth
                        ? static_cast<const float*>(p.p.data)[row * p.p.stride + k * p.p.depth_stride]
                        : 0.f;
      }
    }
  }
};

}  // namespace dense_projection_det_gemm
