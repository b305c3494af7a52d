"""The wgmma wrappers against NumPy: shapes, operand majors and descriptors, A from shared memory and from registers."""

import numpy as np
import pytest
import torch

from cake_shared.emulator import Module, Options
from cake_shared.errors import BuildError

DEPTH = 64

SOURCE = """
#include "cake/ptx/wgmma.cuh"
#include "cake/tile/swizzle128.cuh"
using namespace cake;
extern __shared__ __align__(1024) char smem[];

// Rows of 64 columns of a matrix [rows][columns], block by block, into a swizzled tile.
__device__ void fill(char* tile, const uint16_t* matrix, int rows, int columns) {
  for (int i = threadIdx.x; i < rows * columns / 8; i += 128) {
    const int row = i / (columns / 8), unit = i % (columns / 8);
    const uint32_t at = (unit >> 3) * (rows * 128) + tile::unit_offset<64>(row, unit & 7);
    *reinterpret_cast<uint4*>(tile + at) = *reinterpret_cast<const uint4*>(matrix + row * columns + 8 * unit);
  }
}

// a [64][64] or, MN-major, [depth][64]; b [N][64] or [64][N]; out [64][N] = start + a b twice over.
extern "C" __global__ void __launch_bounds__(128)
    product(const uint16_t* a, const uint16_t* b, const float* start, float* out) {
  constexpr ptx::Major kA = ptx::Major(A_MAJOR), kB = ptx::Major(B_MAJOR);
  char *a_tile = smem, *b_tile = smem + 8192;
  fill(a_tile, a, 64, 64);
  kB == ptx::Major::kK ? fill(b_tile, b, N, 64) : fill(b_tile, b, 64, N);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, row = 16 * (threadIdx.x / 32) + g;
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = start[(row + 8 * (i >> 1 & 1)) * N + 8 * (i / 4) + 2 * c + (i & 1)];
  uint32_t left[16];
  for (int s = 0; s < 4; ++s) {
    tile::load_a<64>(*reinterpret_cast<uint32_t(*)[4]>(&left[4 * s]), ptx::shared_address(a_tile),
                     tile::LaneOffsets(lane), 16 * (threadIdx.x / 32), 2 * s);
  }
  const uint64_t a_at = ptx::wgmma_descriptor(ptx::shared_address(a_tile), 8192);
  const uint64_t b_at = ptx::wgmma_descriptor(ptx::shared_address(b_tile), 8192);
  constexpr uint32_t kStepA = kA == ptx::Major::kK ? 32 : 2048, kStepB = kB == ptx::Major::kK ? 32 : 2048;
  ptx::wgmma_keep(d);
  ptx::wgmma_keep(left);
  ptx::wgmma_fence();
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<kA, kB>(d, a_at + ptx::wgmma_advance(kStepA * s), b_at + ptx::wgmma_advance(kStepB * s), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(d);
  if (kA == ptx::Major::kK) {
    ptx::wgmma_fence();
    for (int s = 0; s < 4; ++s) {
      ptx::wgmma_bf16<kB>(d, left[4 * s], left[4 * s + 1], left[4 * s + 2], left[4 * s + 3],
                          b_at + ptx::wgmma_advance(kStepB * s), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(d);
  }
  for (int i = 0; i < N / 2; ++i) out[(row + 8 * (i >> 1 & 1)) * N + 8 * (i / 4) + 2 * c + (i & 1)] = d[i];
}
"""


@pytest.mark.parametrize("order", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("n", "a_major", "b_major"), [(8, 0, 0), (64, 0, 1), (64, 1, 0), (128, 0, 1), (192, 1, 1), (256, 0, 0)]
)
def test_products_equal_numpy(n, a_major, b_major, order):
    source = f"#define N {n}\n#define A_MAJOR {a_major}\n#define B_MAJOR {b_major}\n{SOURCE}"
    try:
        module = Module.from_cuda(source, target="sm_90a")
    except BuildError as error:
        pytest.skip(f"a compiler is what this needs: {error}")
    generator = torch.Generator().manual_seed(n)
    a = torch.randint(-8, 9, (64, DEPTH), generator=generator).bfloat16()
    b = torch.randint(-8, 9, (DEPTH, n), generator=generator).bfloat16()
    start = torch.randint(-8, 9, (64, n), generator=generator).float()
    out = np.zeros((64, n), np.float32)
    stored = [(a.T if a_major else a), (b if b_major else b.T)]
    inputs = [module.const(x.contiguous().view(torch.int16).numpy().view(np.uint16)) for x in stored]
    module.launch(
        "product",
        grid=1,
        block=128,
        params=[*inputs, module.const(start.numpy()), out],
        smem_bytes=8192 + 128 * n,
        options=Options(order=order),
    )
    times = 1 if a_major else 2
    assert np.array_equal(out, (start + times * (a.float() @ b.float())).numpy())
