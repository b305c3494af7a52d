"""Both gradients of a projection side by side on a GPU: the bits of two calls, whatever runs before and after."""

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.testing import assert_bitwise_equal, poison_
from cake_shared.testing.bits import bits_of
from cake_shared.testing.gemm_cuda import normal
from cake_shared.workloads import PROJECTIONS

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(16384, 4096, 32), (16231, 4096, 64), (16172, 5120, 48), (4000, 5120, 512), (2000, 1024, 1024), (77, 64, 8)]


def operands(tokens, d_in, d_out, seed=0):
    return (
        normal(tokens, d_out, seed=seed),
        normal(tokens, d_in, seed=seed + 1),
        normal(d_out, d_in, seed=seed + 2),
    )


def separate(g, x, w, out_dtype=FP32):
    return det.projection_dgrad(g, w), det.projection_wgrad(g, x, out_dtype=out_dtype)


def assert_same(results, expected):
    for actual, one in zip(results, expected):
        assert_bitwise_equal(actual, one)


@pytest.mark.parametrize("workload", PROJECTIONS, ids=lambda workload: workload.name)
def test_the_bits_of_two_calls_on_published_shapes(workload):
    tensors = operands(workload.tokens, workload.d_in, workload.d_out)
    expected = separate(*tensors)
    prepared = det.prepare_backward(*tensors, out_dtype=FP32)
    for out in prepared.out:
        poison_(out)
    assert_same(prepared.launch(), expected)
    for _ in range(3):
        assert_same(det.projection_backward(*tensors, out_dtype=FP32), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_dtypes_and_sums(shape):
    g, x, w = operands(*shape)
    dx, dw = separate(g, x, w, BF16)
    assert_same(det.projection_backward(g, x, w), (dx, dw))
    once = det.projection_wgrad(g, x, out_dtype=FP32)
    total = torch.ones(shape[2], shape[1], device="cuda")
    expected = det.projection_wgrad(g, x, total.clone(), accumulate=True)
    assert_same(det.projection_backward(g, x, w, total, accumulate=True), (dx, expected))
    assert not torch.equal(total, once)


@pytest.mark.parametrize("shape", [(4000, 5120, 512), (2000, 1024, 1024), (77, 64, 72)], ids=str)
def test_launch_after_launch_adds_to_what_is_there(shape):
    """The weight gradient starts before the launch before has told it so, and must not read older sums."""
    tensors = operands(*shape)
    total, expected = (torch.ones(shape[2], shape[1], device="cuda") for _ in range(2))
    prepared = det.prepare_backward(*tensors, dw=total, accumulate=True)
    alone = det.prepare_wgrad(*tensors[:2], expected, accumulate=True)
    for _ in range(100):
        prepared.launch()
    for _ in range(100):
        alone.launch()
    assert_bitwise_equal(total, expected)


@pytest.mark.parametrize("shape", [(0, 64, 32), (40, 64, 0), (40, 0, 32)], ids=str)
def test_empty_extents(shape):
    tensors = operands(*shape)
    assert_same(det.projection_backward(*tensors, out_dtype=FP32), separate(*tensors))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_what_comes_before_is_waited_for_and_what_comes_after_waits(shape):
    """A chain of products, each reading what the one before has just written, without a pause between."""
    g, x, w = operands(*shape)
    start = torch.ones_like(g)

    def chain(backward):
        current, found = start.clone(), []
        for _ in range(5):
            current = (current * 0.5 + g).to(BF16)
            dx, dw = backward(current, x, w)
            y = det.projection_forward(dx, w)  # reads dx at once
            again = det.projection_forward(x, dw.to(BF16))
            current = ((y + again) * 0.01).to(BF16)
            found += [dx, dw, y, again]
        return found

    assert_same(chain(lambda *t: det.projection_backward(*t, out_dtype=FP32)), chain(separate))


def test_two_streams_at_once():
    pairs = [operands(8192, 4096, 48, seed=10 * i) for i in range(2)]
    expected = [separate(*tensors) for tensors in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    same = [torch.ones((), dtype=torch.bool, device="cuda") for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for actual, one in zip(det.projection_backward(*pairs[index], out_dtype=FP32), expected[index]):
                    same[index] &= (bits_of(actual) == bits_of(one)).all()
    torch.cuda.synchronize()
    assert all(bool(s) for s in same)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_graph_of_several(shape):
    tensors = operands(*shape)
    plans = [det.prepare_backward(*tensors, out_dtype=FP32) for _ in range(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for plan in plans:
            plan.launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [plan.launch() for plan in plans]
    expected = separate(*tensors)
    for _ in range(3):
        for out in (*results[0], *results[1]):
            poison_(out)
        graph.replay()
        for result in results:
            assert_same(result, expected)


def test_autograd_of_a_projection():
    g, x, w = operands(4000, 4096, 48)
    expected = separate(g, x, w, BF16)
    for _ in range(2):  # the second call goes the short way
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        det.projection_forward(*leaves).backward(g)
        assert_same([leaf.grad for leaf in leaves], expected)
        leaf, main_grad = x.clone().requires_grad_(), torch.zeros(48, 4096, device="cuda")
        det.projection_forward(leaf, w.clone().requires_grad_(), main_grad=main_grad).backward(g)
        assert_same((leaf.grad, main_grad), separate(g, x, w))
