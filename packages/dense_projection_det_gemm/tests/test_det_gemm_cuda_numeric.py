"""Values of the CUDA programs against float64: layouts, views, ragged and empty extents, accumulation, far offsets."""

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, assert_near, bits_of
from cake_shared.testing.gemm_cuda import RAGGED, GemmCase, assert_rounded_once, layout_cases, normal

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
GIB = 2**30


def gemm(a, b, out, transposed_out=False, accumulate=False):
    return det.dense_projection_det_gemm(a, b, out, transposed_out, accumulate=accumulate)


def needs_memory(size_bytes):
    free, _ = torch.cuda.mem_get_info()
    if free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < size_bytes:
        pytest.skip(f"needs {size_bytes / GIB:.0f} GiB of device memory")


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_ragged_extents(case):
    case.check(gemm)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extents", [(130, 72, 200), (48, 264, 1000), (300, 136, 64)], ids=str)
def test_every_layout(extents, batch):
    for case in layout_cases(*extents, batch=batch, pad=batch % 2):
        case.check(gemm)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_and_layouts(seed):
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    def extent(limit):
        return 1 + int(torch.randint(limit, (), generator=draw))

    out_dtype = pick(BF16, FP32)
    GemmCase(
        extent(400),
        8 * extent(80),
        extent(700),
        pick("k", "m"),
        pick("k", "n"),
        out_dtype,
        pick("n", "m"),
        out_dtype == FP32 and pick(True, False),
        pick(1, 1, 2, 5),
        pick(0, 1, 2),
        seed,
    ).check(gemm)


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 48, 16231), (48, 4096, 16231), (32, 4096, 16384), (5120, 64, 16172)])
def test_long_contractions_over_ragged_tokens(m, n, k):
    """Weight gradients of narrow projections: the contraction is cut where the shape says."""
    for accumulate in (False, True):
        GemmCase(m, n, k, "m", "n", FP32, "n", accumulate).check(gemm)
    GemmCase(m, n, k, "m", "n", BF16).check(gemm)


@pytest.mark.parametrize(("tokens", "d_in", "d_out"), [(16231, 4096, 48), (1000, 1024, 512), (333, 4096, 1024)])
def test_three_products_of_a_layer(tokens, d_in, d_out):
    x, w, g = normal(tokens, d_in), normal(d_out, d_in, seed=1), normal(tokens, d_out, seed=2)
    assert_rounded_once(det.projection_forward(x, w), x, w.t())
    assert_rounded_once(det.projection_dgrad(g, w), g, w)
    assert_rounded_once(det.projection_wgrad(g, x), g.t(), x)
    assert_rounded_once(det.projection_wgrad(g, x, out_dtype=FP32), g.t(), x)


@pytest.mark.parametrize("accumulate", [False, True])
def test_contraction_of_length_zero(accumulate):
    out = normal(40, 16, dtype=FP32)
    before = out.clone()
    gemm(normal(40, 0), normal(0, 16), out, accumulate=accumulate)
    assert_bitwise_equal(out, before if accumulate else torch.zeros_like(out))
    g, x = normal(0, 24), normal(0, 16)
    assert_bitwise_equal(det.projection_wgrad(g, x), torch.zeros(24, 16, dtype=BF16, device="cuda"))


@pytest.mark.parametrize("shape", [(0, 8, 16), (8, 0, 16), (0, 0, 0)])
def test_empty_outputs(shape):
    m, n, k = shape
    out = torch.empty(m, n, dtype=BF16, device="cuda")
    assert gemm(normal(m, k), normal(k, n), out) is out
    torch.cuda.synchronize()


@pytest.mark.parametrize(("d_in", "d_out"), [(192, 512), (512, 256)])
def test_u25_head_views_without_copies(d_in, d_out):
    """U25: `[T, H, D]` seen as `[H, T, D]`, D a slice of a wider row, in all three directions."""
    tokens, heads = 331, 5
    wide = torch.full((tokens, heads, d_in + 24), float("nan"), dtype=BF16, device="cuda")
    wide[:, :, 16 : 16 + d_in] = normal(tokens, heads, d_in)
    x, w = wide[:, :, 16 : 16 + d_in].transpose(0, 1), normal(heads, d_in, d_out, seed=1)
    out = torch.full((tokens, heads, d_out + 8), float("nan"), dtype=BF16, device="cuda")
    y = out[:, :, :d_out].transpose(0, 1)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    prepared = det.prepare_gemm(x, w, y)
    prepared.launch()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 1  # at most a workspace
    assert_rounded_once(y, x, w)
    assert bool(torch.isnan(out[:, :, d_out:]).all())
    assert_bitwise_equal(gemm(x.contiguous(), w, torch.empty_like(y)), y)
    g = normal(tokens, heads, d_out, seed=2).transpose(0, 1)
    dx = torch.empty(tokens, heads, d_in, dtype=BF16, device="cuda").transpose(0, 1)
    assert_rounded_once(gemm(g, w.transpose(1, 2), dx), g, w.transpose(1, 2))
    dw = torch.zeros(heads, d_in, d_out, device="cuda")
    assert_rounded_once(gemm(x.transpose(1, 2), g, dw, accumulate=True), x.transpose(1, 2), g)


def test_u25_slices_of_one_fused_projection():
    """U25: column slices of one wide buffer give the bits of their contiguous copies, forward and gradients."""
    fused, w = normal(700, 3 * 48 + 16), normal(24, 48, seed=1)
    for start in (0, 48, 96):
        x, g = fused[:, start : start + 48], fused[:, start : start + 24]
        assert_bitwise_equal(det.projection_forward(x, w), det.projection_forward(x.contiguous(), w))
        assert_bitwise_equal(det.projection_dgrad(g, w), det.projection_dgrad(g.contiguous(), w))
        assert_bitwise_equal(det.projection_wgrad(g, x), det.projection_wgrad(g.contiguous(), x.contiguous()))
        rf, wf, gf = x.float(), w.float(), g.float()
        wide = fused.float()
        assert_bitwise_equal(det.router_forward(wide[:, start : start + 48], wf), det.router_forward(rf, wf))
        assert_bitwise_equal(det.router_wgrad(wide[:, start : start + 24], rf), det.router_wgrad(gf, rf))


def misaligned(x):
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


def odd_pitch(x):
    return torch.empty(x.shape[0], x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, : x.shape[1]].copy_(x)


@pytest.mark.parametrize("disturb", [misaligned, odd_pitch])
def test_u27_functions_copy_what_breaks_the_rule(disturb):
    """U27: a misaligned start or an odd row stride gives the bits of the clean call, in place or by a copy."""
    x, w, g = normal(333, 48), normal(24, 48, seed=1), normal(333, 24, seed=2)
    assert_bitwise_equal(det.projection_forward(disturb(x), disturb(w)), det.projection_forward(x, w))
    assert_bitwise_equal(det.projection_dgrad(disturb(g), disturb(w)), det.projection_dgrad(g, w))
    assert_bitwise_equal(det.projection_wgrad(disturb(g), disturb(x)), det.projection_wgrad(g, x))
    x, w, g = x.float(), w.float(), g.float()
    assert_bitwise_equal(det.router_forward(disturb(x), disturb(w)), det.router_forward(x, w))
    assert_bitwise_equal(det.router_dgrad(disturb(g), disturb(w)), det.router_dgrad(g, w))
    assert_bitwise_equal(det.router_wgrad(disturb(g), disturb(x)), det.router_wgrad(g, x))


def test_u27_the_strict_functions_name_alignment_and_stride():
    a, b, out = normal(33, 48), normal(48, 24, seed=1), torch.empty(33, 24, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match=r"a: .*aligned to 16 bytes"):
        gemm(misaligned(a), b, out)
    with pytest.raises(ValueError, match=r"b: .*multiples of 8 elements"):
        gemm(a, odd_pitch(b), out)
    with pytest.raises(ValueError, match=r"out: .*aligned to 16 bytes"):
        gemm(a, b, misaligned(out))
    assert bool(torch.isnan(out).all())


@pytest.mark.parametrize("rows", [(0, 1, 8191), (8191, 0, 1), (1, 8191, 0), (0, 4095, 4096)], ids=str)
def test_u52_partial_sums_keep_fp32(rows):
    """U52, CF5: 256, 1 and -256 at three of 8192 tokens sum to 1 in FP32, wherever the tokens are cut."""
    g, x = torch.zeros(8192, 32, dtype=BF16, device="cuda"), torch.zeros(8192, 64, dtype=BF16, device="cuda")
    g[list(rows), :] = 1
    for row, value in zip(rows, (256.0, 1.0, -256.0)):
        x[row] = value
    result = det.projection_wgrad(g, x, out_dtype=FP32)
    assert bool((result == 1.0).all())


@pytest.mark.parametrize(("prefill", "expected"), [(0.0, 257.0), (0.5, 257.5)])
def test_u54_two_micro_batches_into_one_fp32_buffer(prefill, expected):
    buffer = torch.full((32, 64), prefill, device="cuda")
    for value in (256.0, 1.0):
        g = torch.zeros(1000, 32, dtype=BF16, device="cuda")
        x = torch.zeros(1000, 64, dtype=BF16, device="cuda")
        g[517], x[517] = 1, value
        det.projection_wgrad(g, x, out=buffer, accumulate=True)
    assert bool((buffer == expected).all())


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_u54_without_accumulate_stale_contents_are_overwritten(dtype):
    g, x = normal(1000, 32), normal(1000, 64, seed=1)
    out = torch.full((32, 64), float("nan"), dtype=dtype, device="cuda")
    det.projection_wgrad(g, x, out=out)
    assert_bitwise_equal(out, det.projection_wgrad(g, x, out_dtype=dtype))


def test_u56_outputs_beyond_two_to_the_31():
    """U56: 65537 x 32769 (as 32776) outputs; the last rows and the last columns are right."""
    m, n, k = 65537, 32776, 64
    needs_memory(6 * GIB)
    a, b = normal(m, k), normal(n, k, seed=1)
    out = det.projection_forward(a, b)
    assert out.numel() > 2**31
    assert_rounded_once(out[-70:], a[-70:], b.t())
    assert_rounded_once(out[:, -16:], a, b[-16:].t())


def test_u56_weight_gradient_over_more_than_two_to_the_31_elements():
    """U56: 524352 tokens of 4096; only the last tokens are not zero."""
    tokens, d_in, d_out = 524352, 4096, 32
    needs_memory(6 * GIB)
    x = torch.zeros(tokens, d_in, dtype=BF16, device="cuda")
    g = torch.zeros(tokens, d_out, dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    x[-100:], g[-100:] = normal(100, d_in), normal(100, d_out, seed=1)
    assert_near(det.projection_wgrad(g, x, out_dtype=FP32), oracle.wgrad(g[-100:], x[-100:]), 1e-6)
    w = normal(d_out, d_in, seed=2)
    y = det.projection_forward(x, w)
    assert_rounded_once(y[-100:], x[-100:], w.t())
    assert bool((y[:-100] == 0).all())


def test_u56_far_strides():
    """U56: rows and batch entries whose offsets pass 2**31 elements."""
    needs_memory(16 * GIB)
    pitch = 2**25 + 8
    memory = torch.empty(70 * pitch, dtype=BF16, device="cuda")
    far = memory.as_strided((70, 24), (pitch, 1))
    x, w = normal(70, 24), normal(72, 24, seed=1)
    far.copy_(x)
    assert_bitwise_equal(det.prepare_forward(far, w).launch(), det.projection_forward(x, w))
    heads = memory.as_strided((70, 3, 16), (pitch, 16, 1))
    a, b = normal(70, 3, 16, seed=3), normal(70, 16, 8, seed=4)
    heads.copy_(a)
    near = gemm(a, b, torch.empty(70, 3, 8, device="cuda"))
    assert_bitwise_equal(gemm(heads, b, torch.empty(70, 3, 8, device="cuda")), near)
    out = memory.as_strided((70, 72), (pitch, 1))
    assert_bitwise_equal(det.prepare_forward(x, w, out).launch(), det.projection_forward(x, w))


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "k", "n"), [(8192, 6144, 256), (300, 200, 40), (64, 64, 64)])
@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["centred", "one-signed"])
def test_u57_router_error_is_no_larger_than_that_of_sgemm(tokens, k, n, shift, x_dtype):
    x, w, g = (normal(*s, seed=i, dtype=FP32) + shift for i, s in enumerate(((tokens, k), (n, k), (tokens, n))))
    x = x.to(x_dtype)
    allow = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        plain = x.float() @ w.t(), g @ w, g.t() @ x.float()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allow
    ours = det.router_forward(x, w), det.router_dgrad(g, w), det.router_wgrad(g, x)
    exact = oracle.forward(x, w), oracle.dgrad(g, w), oracle.wgrad(g, x)
    for name, mine, theirs, right in zip(("forward", "dgrad", "wgrad"), ours, plain, exact):
        norm = right.norm()
        error, limit = ((y.double() - right).norm() / norm for y in (mine, theirs))
        # A unit of FP32, for sums so short that SGEMM rounds little more than the result.
        assert float(error) <= max(float(limit), 2.0**-23), f"{name}: {float(error):.2e}, SGEMM {float(limit):.2e}"


@pytest.mark.parametrize("tokens", [1, 17])
def test_u57_router_error_of_few_rows(tokens):
    """SGEMM splits so short a product many times, and rounds less: FP32's own bound instead."""
    x, w = normal(tokens, 6144, dtype=FP32) + 1, normal(256, 6144, seed=1, dtype=FP32) + 1
    assert_near(det.router_forward(x, w), oracle.forward(x, w), 2.0**-22)


def test_u57_expert_sets_and_ties():
    x, w = normal(8192, 6144, dtype=FP32), normal(256, 6144, seed=1, dtype=FP32) * 6144**-0.5
    w[[5, 17, 140, 255]] = w[0].clone()
    logits, exact = det.router_forward(x, w), oracle.forward(x, w)
    for column in (5, 17, 140, 255):
        assert torch.equal(bits_of(logits[:, column]), bits_of(logits[:, 0]))
    ordered = exact.sort(1, descending=True).values
    gap = ordered[:, 7] - ordered[:, 8]
    bound = 2.0**-22 * oracle.magnitude(x, w.t()).amax(1)

    def top_8(y):
        return torch.zeros_like(exact, dtype=torch.bool).scatter(1, y.topk(8).indices, True)

    differs = (top_8(logits) != top_8(exact)).any(1)
    assert not bool((differs & (gap > bound)).any())
    assert int((gap > bound).sum()) > 7000


def test_u57_rows_of_extreme_weights():
    """U57: rows at 1e-38, 3.40e38, 0, inf, NaN and of mixed range, beside ordinary ones that keep their bits."""
    x, w = normal(520, 64, dtype=FP32) * 2.0**-8, normal(32, 64, seed=1, dtype=FP32)
    clean = det.router_forward(x, w[16:])
    w[1] *= 1e-38
    w[2] = 3.40e38 * torch.sign(w[2])
    w[3] = 0.0
    w[4, 7], w[5, 9], w[8, 3] = float("inf"), float("nan"), float("-inf")
    w[6] *= 2.0**-129
    w[9, ::2] *= 1e-38
    w[9, 1::2] *= 1e37
    logits, exact, plain = det.router_forward(x, w), oracle.forward(x, w), x.cpu() @ w.cpu().t()
    assert_bitwise_equal(logits[:, 16:].contiguous(), clean)
    finite = [i for i in range(32) if i not in (4, 5, 8)]
    bound = 2.0**-23 * oracle.magnitude(x, w.t())[:, finite] + 2.0**-149
    overflow = exact[:, finite].abs() > torch.finfo(FP32).max
    assert bool(((logits.double() - exact)[:, finite].abs() <= bound)[~overflow].all())
    assert not bool(torch.isnan(logits[:, finite]).any())
    for row in (4, 5, 8):
        mine, theirs = logits[:, row].cpu(), plain[:, row]
        assert torch.equal(torch.isnan(mine), torch.isnan(theirs))
        assert torch.equal(mine[~torch.isnan(mine)], theirs[~torch.isnan(mine)])


def test_u57_gradients_with_extreme_rows():
    g, w, x = (normal(*s, seed=i, dtype=FP32) for i, s in enumerate(((270, 24), (24, 64), (270, 64))))
    g[3] *= 2.0**122
    g[9] *= 2.0**-140
    exact, dx = oracle.dgrad(g, w), det.router_dgrad(g, w)
    bound = 2.0**-23 * oracle.magnitude(g, w) + 2.0**-149
    assert bool(((dx.double() - exact).abs() <= bound).all())
    g = normal(270, 24, dtype=FP32)
    g[:, 2] *= 2.0**-130
    g[:, 4] *= 2.0**110
    bound = 2.0**-23 * oracle.magnitude(g.t(), x) + 2.0**-149
    assert bool(((det.router_wgrad(g, x).double() - oracle.wgrad(g, x)).abs() <= bound).all())
