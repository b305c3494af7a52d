"""Which bits may not move: batch size and position, strides, copies, threads, global flags, runs, streams of calls."""

import threading

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.testing import assert_bitwise_equal, bits_of

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = {1: (1, 2, 17, 33, 128, 257, 1024), 2: (2, 257)}  # by number of threads


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def anchored(anchor, rows, position, seed):
    x = normal(rows, anchor.numel(), seed=seed, dtype=anchor.dtype)
    x[position] = anchor
    return x


def positions(rows):
    return sorted({0, rows // 2, rows - 1})


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "k"), [(256, 2048), (2048, 256), (48, 4096)])
def test_u51_anchor_row_of_the_forward(n, k, out_dtype, threads):
    """U51: a row's bits do not depend on how many rows there are, where it stands, or on the other rows."""
    w, anchor = normal(n, k, seed=1), normal(k, seed=2)
    expected = None
    for rows in ROWS[threads]:
        for position in positions(rows):
            x = anchored(anchor, rows, position, seed=rows)
            row = det.prepare_forward(x, w, torch.empty(rows, n, dtype=out_dtype)).launch()[position]
            expected = row.clone() if expected is None else expected
            assert_bitwise_equal(row, expected, f"row {position} of {rows}")


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "k"), [(256, 2048), (4096, 48)])
def test_u51_anchor_row_of_the_input_gradient(n, k, out_dtype, threads):
    """U51, the input gradient."""
    w, anchor = normal(n, k, seed=1), normal(n, seed=2)
    expected = None
    for rows in ROWS[threads]:
        for position in positions(rows):
            g = anchored(anchor, rows, position, seed=rows)
            row = det.prepare_dgrad(g, w, torch.empty(rows, k, dtype=out_dtype)).launch()[position]
            expected = row.clone() if expected is None else expected
            assert_bitwise_equal(row, expected, f"row {position} of {rows}")


@pytest.mark.slow
def test_u51_full_size():
    """U51 at N = K = 2048 and with 16231 rows of 4096 -> 48."""
    w, anchor = normal(2048, 2048, seed=1), normal(2048, seed=2)
    expected = det.projection_forward(anchor[None], w)[0]
    for rows in (33, 1024):
        row = det.projection_forward(anchored(anchor, rows, rows - 1, seed=rows), w)[rows - 1]
        assert_bitwise_equal(row, expected)
    w, anchor = normal(48, 4096, seed=1), normal(4096, seed=2)
    row = det.projection_forward(anchored(anchor, 16231, 16230, seed=3), w)[16230]
    assert_bitwise_equal(row, det.projection_forward(anchor[None], w)[0])


def test_rows_do_not_see_bad_neighbours():
    """A row of NaN or inf changes no other row's bits."""
    x, w = normal(130, 64), normal(24, 64, seed=1)
    clean = det.projection_forward(x, w)
    x[3], x[70] = float("nan"), float("inf")
    dirty = det.projection_forward(x, w)
    keep = [i for i in range(130) if i not in (3, 70)]
    assert_bitwise_equal(dirty[keep], clean[keep])


def test_columns_do_not_depend_on_the_width():
    """An output element depends on its own column of b, not on how many others there are."""
    x, w = normal(70, 300), normal(1040, 300, seed=1)
    whole = det.projection_forward(x, w)
    for start, stop in ((0, 8), (8, 24), (512, 1032), (1032, 1040)):
        assert_bitwise_equal(det.projection_forward(x, w[start:stop]), whole[:, start:stop].contiguous())


def test_bits_are_the_same_with_one_and_two_threads():
    x, w, g = normal(300, 600), normal(136, 600, seed=1), normal(300, 136, seed=2)
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append((det.projection_forward(x, w), det.projection_dgrad(g, w), det.projection_wgrad(g, x)))
    torch.set_num_threads(before)
    for one, two in zip(*results):
        assert_bitwise_equal(one, two)


def test_u25_slices_of_one_fused_projection():
    """U25: column slices of one wide buffer give the bits of their contiguous copies, forward and gradients."""
    fused = normal(70, 3 * 48 + 16)
    w = normal(24, 48, seed=1)
    for start in (0, 48, 96):
        x = fused[:, start : start + 48]
        assert not x.is_contiguous()
        assert_bitwise_equal(det.projection_forward(x, w), det.projection_forward(x.contiguous(), w))
        g = fused[:, start : start + 24]
        assert_bitwise_equal(det.projection_dgrad(g, w), det.projection_dgrad(g.contiguous(), w))
        assert_bitwise_equal(det.projection_wgrad(g, x), det.projection_wgrad(g.contiguous(), x.contiguous()))


def test_u25_views_are_read_in_place():
    """U25: `launch()` of a plan on views sees what the viewed buffer holds then."""
    fused, w = normal(40, 96), normal(8, 48, seed=1)
    prepared = det.prepare_forward(fused[:, 48:], w)
    first = prepared.launch().clone()
    fused.mul_(2)
    assert_bitwise_equal(prepared.launch(), first * 2)


def misaligned(x):
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype)
    return buffer[1:].view(x.shape).copy_(x)


def odd_pitch(x):
    return torch.empty(x.shape[0], x.shape[1] + 1, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


@pytest.mark.parametrize("disturb", [misaligned, odd_pitch])
def test_u27_functions_copy_what_breaks_the_rule(disturb):
    """U27: a misaligned start or an odd row stride gives the bits of the clean call in `projection_*`, `router_*`."""
    x, w, g = normal(33, 48), normal(24, 48, seed=1), normal(33, 24, seed=2)
    assert_bitwise_equal(det.projection_forward(disturb(x), disturb(w)), det.projection_forward(x, w))
    assert_bitwise_equal(det.projection_dgrad(disturb(g), disturb(w)), det.projection_dgrad(g, w))
    assert_bitwise_equal(det.projection_wgrad(disturb(g), disturb(x)), det.projection_wgrad(g, x))
    x, w, g = x.float(), w.float(), g.float()
    assert_bitwise_equal(det.router_forward(disturb(x), disturb(w)), det.router_forward(x, w))
    assert_bitwise_equal(det.router_dgrad(disturb(g), disturb(w)), det.router_dgrad(g, w))
    assert_bitwise_equal(det.router_wgrad(disturb(g), disturb(x)), det.router_wgrad(g, x))


def test_u27_the_strict_functions_name_alignment_and_stride():
    """U27: the plain GEMM and `prepare_*` refuse instead of copying."""
    a, b, out = normal(33, 48), normal(48, 24, seed=1), torch.empty(33, 24, dtype=BF16)
    with pytest.raises(ValueError, match=r"a: .*aligned to 16 bytes"):
        det.dense_projection_det_gemm(misaligned(a), b, out)
    with pytest.raises(ValueError, match=r"b: .*multiples of 8 elements"):
        det.dense_projection_det_gemm(a, odd_pitch(b), out)
    with pytest.raises(ValueError, match=r"out: .*aligned to 16 bytes"):
        det.dense_projection_det_gemm(a, b, misaligned(out))
    with pytest.raises(ValueError, match=r"x: .*multiples of 8 elements"):
        det.prepare_forward(odd_pitch(a), b.t().contiguous())


def test_batch_entries_have_the_bits_of_single_products():
    a, b = normal(5, 70, 40), normal(5, 40, 24, seed=1)
    whole = det.dense_projection_det_gemm(a, b, torch.empty(5, 70, 24))
    for index in range(5):
        single = det.dense_projection_det_gemm(a[index], b[index], torch.empty(70, 24))
        assert_bitwise_equal(whole[index], single)


def test_u52_workspace_contents_do_not_matter():
    """U52: launches of one plan, with whatever the workspace holds in between, repeat their bits."""
    g, x = normal(700, 72), normal(700, 40, seed=1)
    prepared = det.prepare_wgrad(g, x, out_dtype=FP32)
    first = prepared.launch().clone()
    det.prepare_wgrad(torch.full_like(g, float("nan")), x, out_dtype=FP32).launch()
    for _ in range(20):
        assert_bitwise_equal(prepared.launch(), first)


def test_u52_two_threads_at_once_against_serial():
    """U52: calls running side by side share no workspace."""
    pairs = [(normal(300, 72, seed=i), normal(300, 40, seed=10 + i)) for i in range(2)]
    serial = [bits_of(det.projection_wgrad(g, x, out_dtype=FP32)).clone() for g, x in pairs]
    wrong = []

    def work(index):
        for _ in range(100):
            if not torch.equal(bits_of(det.projection_wgrad(*pairs[index], out_dtype=FP32)), serial[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_u53_repeats_with_few_rows_and_a_long_contraction():
    """U53: M of 1, 16 and 48 with K of 8192, the same bits every time."""
    w = normal(16, 8192, seed=1)
    for rows in (1, 16, 48):
        x = normal(rows, 8192, seed=rows)
        first = det.projection_forward(x, w)
        for _ in range(10):
            assert_bitwise_equal(det.projection_forward(x, w), first)


@pytest.fixture
def restored_precision():
    before = torch.get_float32_matmul_precision()
    allow = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.filterwarnings("ignore:.*TF32.*")
def test_u58_bits_do_not_depend_on_precision_flags():
    """U58: neither allow_tf32 nor float32_matmul_precision, which lets oneDNN round FP32 to BF16, moves a bit."""
    x, w, g = normal(700, 1032), normal(264, 1032, seed=1), normal(700, 264, seed=2)
    xf, wf, gf = (t.float() + 2.0**-12 * t.float().square() for t in (x, w, g))

    def everything():
        return [
            det.prepare_forward(x, w, torch.empty(700, 264)).launch(),
            det.projection_dgrad(g, w),
            det.projection_wgrad(g, x, out_dtype=FP32),
            det.router_forward(xf, wf),
            det.router_dgrad(gf, wf),
            det.router_wgrad(gf, xf),
        ]

    torch.set_float32_matmul_precision("highest")
    expected = everything()
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        for actual, value in zip(everything(), expected):
            assert_bitwise_equal(actual, value, precision)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.mkldnn.enabled
    torch.set_float32_matmul_precision("highest")
    for allow in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allow
        for actual, value in zip(everything(), expected):
            assert_bitwise_equal(actual, value, f"allow_tf32={allow}")


@pytest.mark.parametrize("rows", [1, 2, 512, 2050])
def test_u58_router_rows_do_not_depend_on_the_batch(rows, threads):
    """U58: the router's forward and input gradient, by bits."""
    w = normal(64, 264, seed=1, dtype=FP32)
    anchor, g_anchor = normal(264, seed=2, dtype=FP32), normal(64, seed=3, dtype=FP32)
    expected = det.router_forward(anchor[None], w)[0], det.router_dgrad(g_anchor[None], w)[0]
    for position in positions(rows):
        x, g = anchored(anchor, rows, position, seed=4), anchored(g_anchor, rows, position, seed=5)
        assert_bitwise_equal(det.router_forward(x, w)[position], expected[0])
        assert_bitwise_equal(det.router_dgrad(g, w)[position], expected[1])


def test_deterministic_algorithms_mode_gives_the_same_bits():
    x, w = normal(40, 64), normal(16, 64, seed=1)
    expected = det.projection_forward(x, w)
    torch.use_deterministic_algorithms(True)
    try:
        assert_bitwise_equal(det.projection_forward(x, w), expected)
    finally:
        torch.use_deterministic_algorithms(False)
