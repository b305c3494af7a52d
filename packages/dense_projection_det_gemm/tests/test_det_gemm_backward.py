"""Both gradients of a projection in one call: the bits of two calls, what is written where, and what autograd runs."""

import itertools

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle, recipes
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing import assert_bitwise_equal, assert_near
from dense_projection_det_gemm.cuda_backward_plan import plan_backward_cuda
from dense_projection_det_gemm.cuda_plan import plan_gemm_cuda

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(*rows, d_in=40, d_out=24):
    return normal(*rows, d_out), normal(*rows, d_in, seed=1), normal(d_out, d_in, seed=2)


@pytest.mark.parametrize("out_dtype", [None, BF16, FP32])
@pytest.mark.parametrize("rows", [(20,), (2, 33), (1,), (0,), (3, 0, 2)])
def test_the_bits_of_two_calls(rows, out_dtype):
    g, x, w = operands(*rows)
    dx, dw = det.projection_backward(g, x, w, out_dtype=out_dtype)
    assert_bitwise_equal(dx, det.projection_dgrad(g, w))
    assert_bitwise_equal(dw, det.projection_wgrad(g, x, out_dtype=out_dtype))
    assert dx.is_contiguous()
    prepared = det.prepare_backward(g, x, w, out_dtype=out_dtype)
    result = prepared.launch()
    assert result is prepared.out
    for actual, expected in zip(result, (dx, dw)):
        assert_bitwise_equal(actual, expected)


def test_a_contraction_of_no_columns_gives_zeros():
    g, x, w = operands(20, d_out=0)
    dx, dw = det.projection_backward(g, x, w)
    assert_bitwise_equal(dx, torch.zeros(20, 40, dtype=BF16))
    assert dw.shape == (0, 40)


@pytest.mark.parametrize("accumulate", [False, True])
def test_given_results_are_written(accumulate):
    g, x, w = operands(50)
    once = det.projection_wgrad(g, x, out_dtype=FP32)
    dw = torch.ones(24, 40)
    dx, returned = det.projection_backward(g, x, w, dw, accumulate=accumulate)
    assert returned is dw
    assert_bitwise_equal(dw, once + 1 if accumulate else once)
    dx, dw = torch.full((50, 40), float("nan")), torch.ones(24, 40)
    prepared = det.prepare_backward(g, x, w, dx, dw, accumulate=accumulate)
    prepared.launch()
    prepared.launch()
    assert prepared.out[0] is dx
    assert prepared.out[1] is dw
    assert_bitwise_equal(dx.to(BF16), det.projection_dgrad(g, w))
    assert_bitwise_equal(dw, (torch.ones(24, 40) + once) + once if accumulate else once)


def test_operands_of_any_layout():
    """What the two functions copy, this one copies; an expanded gradient too."""
    _, x, w = operands(20)
    wide = normal(20, 40, seed=5)
    for g in (torch.ones((), dtype=BF16).expand(20, 24), wide[:, 8:32], wide[:, 1:25], normal(24, 20, seed=6).t()):
        dx, dw = det.projection_backward(g, x, w)
        assert_bitwise_equal(dx, det.projection_dgrad(g, w))
        assert_bitwise_equal(dw, det.projection_wgrad(g, x))


@pytest.mark.parametrize(("x_wanted", "w_wanted", "into"), list(itertools.product([False, True], repeat=3)))
def test_autograd_runs_both_gradients_as_one(monkeypatch, x_wanted, w_wanted, into):
    g, x, w = operands(20)
    x.requires_grad_(x_wanted)
    w.requires_grad_(w_wanted)
    calls, launcher = [], det.api.FAMILY.launcher

    def watch(name):
        run = getattr(launcher, name)
        monkeypatch.setattr(launcher, name, lambda *args, **kw: calls.append(name) or run(*args, **kw))

    watch("run_backward")
    main_grad = torch.zeros(24, 40) if into else None
    y = det.projection_forward(x, w, main_grad=main_grad)
    if y.requires_grad:
        y.backward(g)
    assert calls == (["run_backward"] if x_wanted and w_wanted else [])
    if x_wanted:
        assert_bitwise_equal(x.grad, det.projection_dgrad(g, w.detach()))
    if w_wanted and into:
        assert w.grad is None
        assert_bitwise_equal(main_grad, det.projection_wgrad(g, x.detach(), out_dtype=FP32))
    elif w_wanted:
        assert_bitwise_equal(w.grad, det.projection_wgrad(g, x.detach()))


def test_neither_result_can_be_differentiated():
    for place in range(2):
        g, x, w = (t.requires_grad_() for t in operands(20))
        with pytest.raises(RuntimeError, match="projection_backward has no derivative"):
            det.projection_backward(g, x, w)[place].sum().backward()
    g, x, w = operands(20)
    with pytest.raises(RuntimeError, match=r"dw: an argument requires grad"):
        det.projection_backward(g, x.requires_grad_(), w, torch.zeros(24, 40))


def test_compiled_without_a_break():
    torch._dynamo.reset()
    g, x, w = operands(2, 33)

    def step(g, x, w, dw):
        dx, returned = det.projection_backward(g, x, w, dw, accumulate=True)
        return dx, returned * 2, det.projection_backward(g, x, w, out_dtype=FP32)

    eager, graph = torch.ones(24, 40), torch.ones(24, 40)
    dx, doubled, both = step(g, x, w, eager)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(g, x, w, graph)
    for actual, expected in zip((*compiled[:2], *compiled[2], graph), (dx, doubled, *both, eager)):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("into", [False, True])
def test_a_graph_of_the_backward_holds_one_operator(into):
    """Both gradients of a compiled projection are one operator, also where one is added into a main gradient."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def keep(graph, example_inputs):
        # What writes is the argument of a node of torch's.
        called = [(n.target, n.args[:1]) for n in graph.graph.nodes if n.op == "call_function"]
        graphs.append([str(call) for call in called if "dense_projection" in str(call)])
        return make_boxed_func(graph.forward)

    g, x, w = operands(20)
    main_grad, expected = torch.ones(24, 40), torch.ones(24, 40)
    options = {"main_grad": main_grad} if into else {}
    x.requires_grad_()
    w.requires_grad_()
    body = torch.compile(
        lambda x, w: det.projection_forward(x, w, **options), fullgraph=True, backend=aot_autograd(fw_compiler=keep)
    )
    body(x, w).backward(g)
    assert len(graphs[-1]) == 1
    assert "projection_backward" in graphs[-1][0]
    dx, dw = det.projection_backward(g, x.detach(), w.detach())
    assert_bitwise_equal(x.grad, dx)
    if into:
        det.projection_wgrad(g, x.detach(), expected, accumulate=True)
        assert_bitwise_equal(main_grad, expected)
    else:
        assert_bitwise_equal(w.grad, dw)


def problems(tokens, d_in, d_out, dtype="float32"):
    return (
        GemmProblem(1, tokens, d_in, d_out, "k", "n", "bfloat16", target="cuda"),
        GemmProblem(1, d_out, d_in, tokens, "m", "n", dtype, target="cuda"),
    )


@pytest.mark.parametrize("d_out", [8, 32, 64, 72, 512, 4096])
def test_each_product_keeps_the_plan_that_it_has_alone(d_out):
    """So its bits are those of a call of its own."""
    for native in (False, True):
        dgrad, wgrad = problems(16384, 4096, d_out)
        plan = plan_backward_cuda(dgrad, wgrad, native)
        assert plan.dgrad == plan_gemm_cuda(dgrad, native)
        assert plan.wgrad == plan_gemm_cuda(wgrad, native)
        assert plan.beside <= native


def test_which_comes_first():
    for d_out, dgrad_first in ((8, False), (32, False), (64, False), (72, True), (512, True), (4096, True)):
        assert plan_backward_cuda(*problems(16384, 4096, d_out)).dgrad_first == dgrad_first


def test_a_repeated_call_launches_what_the_first_found_out(monkeypatch):
    """What a GPU's later calls do, here with products of torch's: fresh results, views of them, overlap looked at."""
    monkeypatch.setattr(recipes, "on_gpu", lambda tensor: True)

    def launch(*tensors):
        for a, b, out in (tensors[:3], tensors[3:]):
            out.copy_(a.double() @ b.double())

    known = recipes.Recipes()
    g, x, w = operands(2, 32)
    flat_g, flat_x = g.flatten(0, 1), x.flatten(0, 1)
    dx, dw = torch.empty(2, 32, 40, dtype=BF16), torch.empty(24, 40)
    views = (flat_g[None], w[None], dx.flatten(0, 1)[None]), (flat_g.t()[None], flat_x[None], dw[None])
    for given, accumulate in ((None, False), (dw, True)):
        key = recipes.backward_signature(g, x, w, given, FP32, accumulate)
        known.learn_backward(key, (g, x, w), (dx, dw), views, launch)
    g, x, w = (t * 2 for t in (g, x, w))
    first = known.find_backward(g, x, w, None, FP32)(g, x, w)
    second = known.find_backward(g, x, w, None, FP32)(g, x, w)
    for found in (first, second):
        assert_near(found[0], oracle.dgrad(g, w), 4e-3)
        assert_near(found[1], oracle.wgrad(g, x), 1e-6)
    assert first[0].data_ptr() != second[0].data_ptr()
    buffer = torch.zeros(3, 24, 40)
    assert known.find_backward(g, x, w, buffer[1], FP32, True)(g, x, w, buffer[1])[1].data_ptr() == buffer[1].data_ptr()
    inside = buffer[0].view(BF16).flatten()[: w.numel()].view(24, 40)
    assert (
        known.find_backward(g, x, inside, buffer[0], FP32, True) is None
    )  # a weight that shares memory with the result
    for others in ((g[:, :16], x[:, :16], w), (g, x, w.t().contiguous().t()), (g, x.flatten(0, 1), w)):
        assert known.find_backward(*others, None, FP32) is None
    assert known.find_backward(g, x, w, None, BF16) is None


def test_tangents_of_the_incoming_gradient_and_of_results_are_refused():
    g, x, w = operands(20)
    with torch.autograd.forward_ad.dual_level():
        x_leaf = x.clone().requires_grad_()
        y = det.projection_forward(x_leaf, w)
        dual = torch.autograd.forward_ad.make_dual(g, torch.ones_like(g))
        with pytest.raises(RuntimeError, match=r"^gradient: got a tensor with a forward-mode tangent"):
            torch.autograd.grad(y, x_leaf, dual)
        logits = det.router_forward(x_leaf, w.float())
        dual = torch.autograd.forward_ad.make_dual(g.float(), torch.ones(g.shape))
        with pytest.raises(RuntimeError, match=r"^gradient: got a tensor with a forward-mode tangent"):
            torch.autograd.grad(logits, x_leaf, dual)
        dw = torch.autograd.forward_ad.make_dual(torch.zeros(24, 40), torch.ones(24, 40))
        with pytest.raises(RuntimeError, match=r"^dw: got a tensor with a forward-mode tangent"):
            det.projection_backward(g, x, w, dw)
        with pytest.raises(RuntimeError, match=r"^out: got a tensor with a forward-mode tangent"):
            det.projection_wgrad(g, x, dw)


class Wrapped(torch.Tensor):
    """A subclass, as a sharded tensor is one."""


def test_plans_refuse_results_of_subclasses():
    g, x, w = operands(20)
    dw = torch.zeros(24, 40).as_subclass(Wrapped)
    with pytest.raises(ValueError, match=r"^dw: got a Wrapped on cpu, takes a plain tensor in memory"):
        det.prepare_backward(g, x, w, dw=dw)
    with pytest.raises(ValueError, match=r"^out: got a Wrapped on cpu, takes a plain tensor in memory"):
        det.prepare_wgrad(g, x, dw)
