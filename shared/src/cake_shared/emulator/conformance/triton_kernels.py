"""Kernels that Triton compiles: matrix products, a reduction, a softmax. Importing this module imports triton.

Annotations of constants are evaluated by Triton, so this module has no ``from __future__ import annotations``.
"""

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, c, m, n, k, sam, sak, sbk, sbn, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[m, n] = a[m, k] @ b[k, n] in any layout, masked at every edge."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        depth = start + inner
        mask_a = (rows[:, None] < m) & (depth[None, :] < k)
        mask_b = (depth[:, None] < k) & (columns[None, :] < n)
        x = tl.load(a + rows[:, None] * sam + depth[None, :] * sak, mask=mask_a, other=0.0)
        y = tl.load(b + depth[:, None] * sbk + columns[None, :] * sbn, mask=mask_b, other=0.0)
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * scm + columns[None, :], total, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def chained(a, b, c, d, N: tl.constexpr):
    """d = bf16(a @ b) @ c for [N, N] matrices: the middle product stays in registers or tensor memory."""
    rows = tl.arange(0, N)
    at = rows[:, None] * N + rows[None, :]
    middle = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(d + at, tl.dot(middle.to(tl.bfloat16), tl.load(c + at)))


@triton.jit
def tensor_matmul(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = bf16(a @ b) through tensor maps for all three."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        total = tl.dot(a.load([row, start]), b.load([start, column]), total)
    c.store([row, column], total.to(tl.bfloat16))


@triton.jit
def row_sum(x, y, n, stride, B: tl.constexpr):
    """y[row] = sum(x[row, :n])."""
    row = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        at = start + tl.arange(0, B)
        total += tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + row, tl.sum(total, 0))


@triton.jit
def softmax(x, y, n, stride, B: tl.constexpr):
    """y[row, :n] = softmax(x[row, :n]), n <= B."""
    row = tl.program_id(0)
    at = tl.arange(0, B)
    value = tl.load(x + row * stride + at, mask=at < n, other=-float("inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * stride + at, (power / tl.sum(power, 0)).to(y.dtype.element_ty), mask=at < n)
