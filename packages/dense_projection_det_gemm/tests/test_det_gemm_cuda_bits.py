"""What the bits of the CUDA programs may not depend on: the batch, SM count, runs, streams, graphs, flags."""

import threading

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.testing import assert_bitwise_equal, bits_of, deterministic_fill, poison_
from cake_shared.testing.gemm_cuda import normal
from dense_projection_det_gemm import cuda

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


def positions(rows):
    return sorted({0, rows // 2, rows - 1})


def anchored(anchor, rows, position, seed):
    x = normal(rows, anchor.numel(), seed=seed, dtype=anchor.dtype)
    x[position] = anchor
    return x


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (48, 4096), (512, 4096), (4096, 64)])
def test_u51_an_anchor_row_among_1_to_16231_rows(n, k, out_dtype):
    """U51: forward and input gradient of a row are its own affair, wherever it stands and among however many."""
    w, v = normal(n, k, seed=1), normal(k, n, seed=3)
    anchor = normal(k, seed=2)
    expected = []
    for rows in (1, 2, 17, 33, 128, 257, 1024, 16231):
        for position in positions(rows):
            x = anchored(anchor, rows, position, seed=rows)
            y = det.prepare_forward(x, w, torch.empty(rows, n, dtype=out_dtype, device="cuda")).launch()[position]
            d = det.prepare_dgrad(x, v, torch.empty(rows, n, dtype=out_dtype, device="cuda")).launch()[position]
            expected = expected or [y.clone(), d.clone()]
            assert_bitwise_equal(y, expected[0], f"forward, row {position} of {rows}")
            assert_bitwise_equal(d, expected[1], f"input gradient, row {position} of {rows}")


def test_rows_do_not_see_bad_neighbours():
    x, w = normal(530, 256), normal(72, 256, seed=1)
    clean = det.projection_forward(x, w)
    x[3], x[470] = float("nan"), float("inf")
    keep = [i for i in range(530) if i not in (3, 470)]
    assert_bitwise_equal(det.projection_forward(x, w)[keep], clean[keep])


@pytest.mark.parametrize("rows", [1, 2, 512, 16384])
def test_u58_router_rows_do_not_depend_on_the_batch(rows):
    """U58: forward and input gradient of the router."""
    w = normal(256, 6144, seed=1, dtype=FP32)
    anchor, g_anchor = normal(6144, seed=2, dtype=FP32), normal(256, seed=3, dtype=FP32)
    expected = det.router_forward(anchor[None], w)[0], det.router_dgrad(g_anchor[None], w)[0]
    for position in positions(rows):
        x, g = anchored(anchor, rows, position, seed=4), anchored(g_anchor, rows, position, seed=5)
        assert_bitwise_equal(det.router_forward(x, w)[position], expected[0])
        assert_bitwise_equal(det.router_dgrad(g, w)[position], expected[1])


def test_router_rows_choose_their_path_alone():
    """A row that the split cannot serve, among ordinary ones and the other way round."""
    w, ordinary, special = (normal(*s, seed=i, dtype=FP32) for i, s in enumerate(((24, 304), (304,), (304,))))
    special[0], special[1] = 1e-38, 1e38
    alone = det.router_forward(ordinary[None], w)[0], det.router_forward(special[None], w)[0]
    x = normal(530, 304, seed=4, dtype=FP32)
    x[5], x[500], x[64], x[65] = ordinary, ordinary, special, special
    together = det.router_forward(x, w)
    for row, expected in ((5, alone[0]), (500, alone[0]), (64, alone[1]), (65, alone[1])):
        assert_bitwise_equal(together[row], expected)


def products(tokens=3000, d_in=1024, d_out=72):
    """Named calls of every kind, each returning a fresh result."""
    x, w, g = normal(tokens, d_in), normal(d_out, d_in, seed=1), normal(tokens, d_out, seed=2)
    xf, wf, gf = x.float() * 1.001, w.float() * 1.001, g.float() * 1.001
    heads_x, heads_w = normal(700, 5, 192), normal(5, 192, 264, seed=4)
    return {
        "forward": lambda: det.projection_forward(x, w),
        "dgrad": lambda: det.projection_dgrad(g, w),
        "wgrad": lambda: det.projection_wgrad(g, x),
        "wgrad FP32": lambda: det.projection_wgrad(g, x, out_dtype=FP32),
        "accumulated": lambda: det.projection_wgrad(g, x, torch.ones(d_out, d_in, device="cuda"), accumulate=True),
        "backward, dx": lambda: det.projection_backward(g, x, w)[0],
        "backward, dw": lambda: det.projection_backward(g, x, w, out_dtype=FP32)[1],
        "heads": lambda: det.dense_projection_det_gemm(
            heads_x.transpose(0, 1), heads_w, torch.empty(5, 700, 264, dtype=BF16, device="cuda")
        ),
        "router forward": lambda: det.router_forward(xf, wf),
        "router forward, BF16 x": lambda: det.router_forward(x, wf),
        "router dgrad": lambda: det.router_dgrad(gf, wf),
        "router wgrad": lambda: det.router_wgrad(gf, xf),
    }


def test_another_number_of_multiprocessors():
    """Plans and grids that count with 1, 7 and 1000 multiprocessors: the same bits."""
    calls = products()
    expected = {name: call() for name, call in calls.items()}
    backend = cuda.gemm_backend(torch.device("cuda"))
    real = backend.multiprocessors
    try:
        for pretended in (1, 7, 1000):
            backend.multiprocessors = pretended
            for name, call in calls.items():
                assert_bitwise_equal(call(), expected[name], f"{name}, {pretended} multiprocessors")
    finally:
        backend.multiprocessors = real


@pytest.mark.parametrize(("d_in", "d_out"), [(4096, 48), (4096, 512), (1024, 1024)])
def test_300_repeats_alone_and_beside_a_memory_bound_kernel(d_in, d_out):
    calls = products(4000, d_in, d_out)
    expected = {name: call() for name, call in calls.items()}
    noise, side = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for repeat in range(300):
        if repeat >= 150:
            with torch.cuda.stream(side):
                noise.add_(1)
        for name, call in calls.items():
            same &= (bits_of(call()) == bits_of(expected[name])).all()
    assert bool(same)


@pytest.mark.parametrize("k", [8192, 16384])
@pytest.mark.parametrize("m", [1, 16, 48])
def test_u53_1000_repeats_with_few_rows_and_a_long_contraction(m, k):
    """U53: no hang and the same bits, also while another stream keeps the GPU full."""
    x, w = normal(m, k), normal(2560, k, seed=1)
    g, t = normal(k, m if m % 8 == 0 else 8, seed=2), normal(k, 256, seed=3)
    plans = [det.prepare_forward(x, w), det.prepare_wgrad(g, t, out_dtype=FP32)]
    expected = [plan.launch().clone() for plan in plans]
    busy, side = normal(4096, 4096, seed=4), torch.cuda.Stream()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for repeat in range(1000):
        if repeat % 20 == 10:
            with torch.cuda.stream(side):
                busy @ busy
        for plan, value in zip(plans, expected):
            same &= (bits_of(plan.launch()) == bits_of(value)).all()
    torch.cuda.synchronize()
    assert bool(same)


def test_u52_two_streams_at_once_against_serial():
    """U52: 100 weight gradients on each of two streams, workspaces poisoned, against the same calls in turn."""
    pairs = [(normal(8192, 48, seed=i), normal(8192, 512, seed=10 + i)) for i in range(2)]
    serial = [det.projection_wgrad(g, x, out_dtype=FP32) for g, x in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    same = [torch.ones((), dtype=torch.bool, device="cuda") for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(100):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                result = det.projection_wgrad(*pairs[index], out_dtype=FP32)
                same[index] &= (bits_of(result) == bits_of(serial[index])).all()
    torch.cuda.synchronize()
    assert all(bool(s) for s in same)


def test_u52_two_threads_at_once_against_serial():
    pairs = [(normal(3000, 72, seed=i), normal(3000, 40, seed=10 + i)) for i in range(2)]
    serial = [det.projection_wgrad(g, x, out_dtype=FP32) for g, x in pairs]
    wrong = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                result = det.projection_wgrad(*pairs[index], out_dtype=FP32)
                if not torch.equal(bits_of(result), bits_of(serial[index])):
                    wrong.append(index)

    torch.cuda.synchronize()
    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_u52_workspace_contents_do_not_matter():
    """U52: a plan's launches repeat their bits although another one's NaNs pass through the freed memory."""
    g, x = normal(7000, 72), normal(7000, 40, seed=1)
    expected = det.projection_wgrad(g, x, out_dtype=FP32)
    bad = torch.full_like(g, float("nan"))
    for _ in range(20):
        det.projection_wgrad(bad, x, out_dtype=FP32)
        assert_bitwise_equal(det.projection_wgrad(g, x, out_dtype=FP32), expected)
    plan = det.prepare_wgrad(g, x, out_dtype=FP32)
    for _ in range(20):
        poison_(plan.out)
        assert_bitwise_equal(plan.launch(), expected)


def test_u58_bits_do_not_depend_on_the_tf32_flag():
    calls = products()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        expected = {name: call() for name, call in calls.items()}
        torch.backends.cuda.matmul.allow_tf32 = True
        for name, call in calls.items():
            assert_bitwise_equal(call(), expected[name], name)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_deterministic_switch_and_side_stream():
    calls = products()
    expected = {name: call() for name, call in calls.items()}
    with deterministic_fill():
        for name, call in calls.items():
            assert_bitwise_equal(call(), expected[name], name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = {name: call() for name, call in calls.items()}
    side.synchronize()
    for name, result in results.items():
        assert_bitwise_equal(result, expected[name], name)


def test_batch_entries_have_the_bits_of_single_products():
    a, b = normal(5, 330, 200), normal(5, 200, 72, seed=1)
    whole = det.dense_projection_det_gemm(a, b, torch.empty(5, 330, 72, device="cuda"))
    for index in range(5):
        single = det.dense_projection_det_gemm(a[index], b[index], torch.empty(330, 72, device="cuda"))
        assert_bitwise_equal(whole[index], single)


def test_a_batch_of_one_weight_read_with_stride_zero():
    a, b = normal(5, 330, 200), normal(200, 72, seed=1)
    whole = det.dense_projection_det_gemm(a, b.expand(5, 200, 72), torch.empty(5, 330, 72, device="cuda"))
    flat = det.dense_projection_det_gemm(a.flatten(0, 1), b, torch.empty(5 * 330, 72, device="cuda"))
    assert_bitwise_equal(whole.flatten(0, 1), flat)
