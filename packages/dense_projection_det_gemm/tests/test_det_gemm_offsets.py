"""U56: element offsets beyond 2**31, on address space that is mostly never touched."""

import mmap
import sys

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reserves address space as Linux does")

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = 70
NORESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python names from 3.13 on
PITCH = 2**25 + 8  # the last row starts at element 2**31 * 1.08


def sparse(rows, cols, dtype):
    """A `[rows, cols]` view with rows `PITCH` elements apart in anonymous memory: only touched pages are real."""
    count = (rows - 1) * PITCH + cols
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided((rows, cols), (PITCH, 1))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def test_u56_rows_of_every_operand_beyond_two_to_the_31():
    """Forward, input and weight gradient with each operand and the output far apart in memory."""
    assert (ROWS - 1) * PITCH > 2**31
    x, w, g = normal(ROWS, 24), normal(ROWS + 2, 24, seed=1), normal(ROWS, ROWS + 2, seed=2)
    far_x, far_w, far_g = (sparse(*t.shape, BF16).copy_(t) for t in (x, w, g))
    for dtype in (BF16, FP32):
        out = sparse(ROWS, ROWS + 2, dtype)
        near = det.prepare_forward(x, w, torch.empty(ROWS, ROWS + 2, dtype=dtype)).launch()
        assert_bitwise_equal(det.prepare_forward(far_x, far_w, out).launch(), near)
    assert_bitwise_equal(det.projection_dgrad(far_g, far_w), det.projection_dgrad(g, w))
    out = sparse(ROWS + 2, 24, FP32)
    assert_bitwise_equal(det.projection_wgrad(far_g, far_x, out), det.projection_wgrad(g, x, out_dtype=FP32))
    logits = det.router_forward(far_x, w.float())
    assert_bitwise_equal(logits, det.router_forward(x, w.float()))
    assert float((logits.double() - oracle.forward(x, w)).abs().max()) < 1e-5


def test_u56_batches_beyond_two_to_the_31():
    """A batch axis whose stride carries the offset past 2**31."""
    a, b = normal(ROWS, 3, 16), normal(16, 8, seed=1).expand(ROWS, 16, 8)
    far = sparse(ROWS, 48, BF16).as_strided((ROWS, 3, 16), (PITCH, 16, 1)).copy_(a)
    near = det.dense_projection_det_gemm(a, b, torch.empty(ROWS, 3, 8))
    assert_bitwise_equal(det.dense_projection_det_gemm(far, b, torch.empty(ROWS, 3, 8)), near)
