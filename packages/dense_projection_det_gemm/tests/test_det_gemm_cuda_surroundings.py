"""The CUDA programs among what surrounds them: graphs, streams, devices, compile, checkpointing, modules, errors."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, assert_near, poison_
from cake_shared.testing.gemm_cuda import normal

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


def prepared(tokens=1304, d_in=600, d_out=72):
    """Named plans of every kind, each with the function that it repeats."""
    x, w, g = normal(tokens, d_in), normal(d_out, d_in, seed=1), normal(tokens, d_out, seed=2)
    xf, wf, gf = (t.float() * 1.001 for t in (x, w, g))
    xf[1, 0], xf[3, 2], xf[3, 1] = float("inf"), 1e38, 1e-38
    heads, weights = normal(tokens, 3, 64, seed=3).transpose(0, 1), normal(3, 64, 72, seed=4)

    def heads_out():
        return torch.empty(3, tokens, 72, dtype=BF16, device="cuda")

    turned = torch.empty(d_out, tokens + 8, device="cuda")[:, :tokens]
    return {
        "forward": (det.prepare_forward(x, w), lambda: det.projection_forward(x, w)),
        "dgrad": (det.prepare_dgrad(g, w), lambda: det.projection_dgrad(g, w)),
        "wgrad": (det.prepare_wgrad(g, x), lambda: det.projection_wgrad(g, x)),
        "wgrad FP32": (
            det.prepare_wgrad(g, x, out_dtype=FP32),
            lambda: det.projection_wgrad(g, x, out_dtype=FP32),
        ),
        "backward": (det.prepare_backward(g, x, w), lambda: det.projection_backward(g, x, w)),
        "heads": (
            det.prepare_gemm(heads, weights, heads_out()),
            lambda: det.dense_projection_det_gemm(heads, weights, heads_out()),
        ),
        "transposed": (
            det.prepare_gemm(x, w.t(), turned, True),
            lambda: det.dense_projection_det_gemm(x, w.t(), torch.empty(d_out, tokens, device="cuda"), True),
        ),
        "router forward": (det.prepare_router_forward(xf, wf), lambda: det.router_forward(xf, wf)),
        "router forward, BF16 x": (det.prepare_router_forward(x, wf), lambda: det.router_forward(x, wf)),
        "router dgrad": (det.prepare_router_dgrad(gf, wf), lambda: det.router_dgrad(gf, wf)),
        "router wgrad": (det.prepare_router_wgrad(gf, xf), lambda: det.router_wgrad(gf, xf)),
    }


@contextlib.contextmanager
def no_synchronisation():
    """An operation that makes the host wait for the device is an error inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_debug_mode_sees_a_synchronisation():
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        x.sum().item()


def test_nothing_waits_for_the_device():
    plans = prepared()
    x, w, g = normal(777, 600), normal(72, 600, seed=1), normal(777, 72, seed=2)
    for plan, function in plans.values():
        plan.launch()
        function()
    with no_synchronisation():
        for plan, function in plans.values():
            plan.launch()
            function()
        # A fresh plan, also of a problem not seen before.
        det.prepare_forward(x, w).launch()
        det.prepare_wgrad(g, x, out_dtype=FP32).launch()
        det.prepare_router_dgrad(g.float(), w.float()).launch()


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def test_launch_allocates_nothing_and_repeats_the_function():
    for name, (plan, function) in prepared().items():
        expected = function()
        for out in parts(plan.out):
            poison_(out)
        before = allocations()
        result = plan.launch()
        assert allocations() == before, name
        assert result is plan.out
        for actual, one in zip(parts(result), parts(expected)):
            assert_bitwise_equal(actual, one, name)


def test_launch_reads_what_operands_hold_then():
    x, w = normal(500, 64), normal(72, 64, seed=1)
    plan = det.prepare_forward(x, w)
    plan.launch()
    x.copy_(normal(500, 64, seed=7))
    assert_bitwise_equal(plan.launch(), det.projection_forward(x, w))


def test_an_accumulating_plan_adds_at_every_launch():
    g, x = normal(5000, 24), normal(5000, 160, seed=1)
    once = det.projection_wgrad(g, x, out_dtype=FP32)
    plan = det.prepare_wgrad(g, x, torch.zeros(24, 160, device="cuda"), accumulate=True)
    plan.launch()
    assert_bitwise_equal(plan.launch(), once + once)


def test_graphs_replay_on_changed_operands():
    """Every call captured in one graph, prepared and eager; replayed twice, the second time on other operands."""
    tokens = 1300
    x, w, g = normal(tokens, 600), normal(72, 600, seed=1), normal(tokens, 72, seed=2)
    xf, wf = x.float(), w.float()
    plan, router = det.prepare_wgrad(g, x, out_dtype=FP32), det.prepare_router_forward(xf, wf)
    backward = det.prepare_backward(g, x, w, out_dtype=FP32)

    def step():
        return [
            plan.launch(),
            router.launch(),
            det.projection_forward(x, w),
            det.projection_dgrad(g, w),
            det.projection_wgrad(g, x),
            *backward.launch(),
            *det.projection_backward(g, x, w),
            det.router_forward(xf, wf),
            det.router_wgrad(xf[:, :72], xf),
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (0, 50):
        x.copy_(normal(tokens, 600, seed=seed))
        xf.copy_(normal(tokens, 600, seed=seed + 1, dtype=FP32))
        for result in results:
            poison_(result)
        graph.replay()
        found = [result.clone() for result in results]
        for result, expected in zip(found, step()):
            assert_bitwise_equal(result, expected)


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x, w, g = normal(700, 600), normal(72, 600, seed=1), normal(700, 72, seed=2)

    def everything(*tensors):
        x, w, g = tensors
        return [
            det.projection_forward(x, w),
            det.projection_dgrad(g, w),
            det.projection_wgrad(g, x, out_dtype=FP32),
            det.prepare_wgrad(g, x).launch(),
            *det.projection_backward(g, x, w),
            det.router_forward(x, w.float()),
            det.router_wgrad(g.float(), x),
        ]

    expected = everything(x, w, g)
    for actual, value in zip(everything(*(t.to("cuda:1") for t in (x, w, g))), expected):
        assert actual.device.index == 1
        assert_bitwise_equal(actual.cpu(), value.cpu())
    with torch.cuda.device(1):
        for actual, value in zip(everything(x, w, g), expected):
            assert_bitwise_equal(actual, value)
    with pytest.raises(ValueError, match=r"w: got device cuda:1, takes the device of x, cuda:0"):
        det.projection_forward(x, w.to("cuda:1"))


def test_the_first_use_of_the_gpu_in_a_thread():
    """A fresh thread, as autograd's is, has no current context; what it is given to do allocates nothing before."""
    g, x = normal(200, 72), normal(200, 136, seed=1)
    out, failures = torch.zeros(72, 136, device="cuda"), []

    def work():
        try:
            det.projection_wgrad(g, x, out=out, accumulate=True)
        except RuntimeError as error:
            failures.append(error)

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert_near(out, oracle.wgrad(g, x), 5e-6)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


KINDS = {
    "projection": (det.projection_forward, BF16, BF16),
    "router": (det.router_forward, FP32, FP32),
    "router_bf16": (det.router_forward, BF16, FP32),
}


def case(kind, rows=(2, 333)):
    function, x_dtype, w_dtype = KINDS[kind]
    x, w = normal(*rows, 136, dtype=x_dtype), normal(72, 136, seed=1, dtype=w_dtype)
    return function, x, w, normal(*rows, 72, seed=2, dtype=w_dtype)


def gradients(function, x, w, g):
    x, w = leaves(x, w)
    y = function(x, w)
    y.backward(g)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_float64(kind):
    function, x, w, g = case(kind)
    y, dx, dw = gradients(function, x, w, g)
    limit = 1e-6 if kind == "router" else 4e-3
    assert_near(y, oracle.forward(x, w), limit, "y")
    assert_near(dx, oracle.dgrad(g, w), limit, "dx")
    assert_near(dw, oracle.wgrad(g, x), limit, "dw")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["expanded", "sliced", "transposed"])
def test_gradients_of_every_layout(kind, form):
    """A gradient that is an expanded scalar, a slice of a wider buffer or transposed: the contiguous one's bits."""
    function, x, w, g = case(kind)
    if form == "expanded":
        g = torch.ones((), dtype=g.dtype, device="cuda").expand_as(g)
    elif form == "sliced":
        g = torch.cat([g, torch.full_like(g, float("nan"))], -1)[..., :72]
    else:
        g = g.transpose(0, 1).contiguous().transpose(0, 1)
    for actual, expected in zip(gradients(function, x, w, g), gradients(function, x, w, g.contiguous())):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_u46_checkpointing_gives_the_same_bits(kind, reentrant):
    function, x, w, g = case(kind)

    def checkpointed(x, w):
        return checkpoint(function, x, w, use_reentrant=reentrant)

    for actual, expected in zip(gradients(checkpointed, x, w, g), gradients(function, x, w, g)):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_forward_and_backward(kind):
    torch._dynamo.reset()
    function, *_ = case(kind)
    compiled = torch.compile(function, fullgraph=True)
    for tokens in (64, 130, 333):
        _, x, w, g = case(kind, (tokens,))
        for actual, expected in zip(gradients(compiled, x, w, g), gradients(function, x, w, g)):
            assert_bitwise_equal(actual, expected)


def test_u59_weight_gradient_with_fp32_out_under_compile_and_autocast():
    torch._dynamo.reset()
    g, x = normal(1000, 72), normal(1000, 136, seed=1)
    expected = det.projection_wgrad(g, x, out_dtype=FP32)
    compiled = torch.compile(lambda g, x: det.projection_wgrad(g, x, out_dtype=FP32), fullgraph=True)
    strided = torch.cat([g, g], 1)[:, 72:]
    with torch.autocast("cuda", torch.bfloat16):
        for call in (compiled, lambda g, x: det.projection_wgrad(g, x, out_dtype=FP32)):
            for left in (g, strided):
                result = call(left, x)
                assert result.dtype == FP32
                assert_bitwise_equal(result, expected)
            # Another axis of unit stride is another layout, and may be another order of additions.
            assert_near(call(g.t().contiguous().t(), x), oracle.wgrad(g, x), 5e-6)
        with pytest.raises(TypeError, match="x: got dtype float32, takes bfloat16"):
            det.projection_wgrad(g, x.float(), out_dtype=FP32)


@pytest.mark.parametrize("accumulate_main_grad", [False, True])
def test_dense_projection_module(accumulate_main_grad):
    torch.manual_seed(0)
    layer = det.DenseProjection(136, 72, device="cuda", accumulate_main_grad=accumulate_main_grad)
    x = normal(3, 111, 136)
    dw = torch.zeros(72, 136, dtype=torch.float64, device="cuda")
    for _ in range(2):
        y = layer(x)
        g = normal(3, 111, 72, seed=5)
        y.backward(g)
        dw += oracle.wgrad(g, x)
    assert_near(y, oracle.forward(x, layer.weight) + layer.bias.double(), 4e-3)
    if accumulate_main_grad:
        assert layer.weight.grad is None
        assert layer.weight.main_grad.dtype == FP32
        assert_near(layer.weight.main_grad, dw, 1e-6)
    else:
        assert_near(layer.weight.grad, dw, 4e-3)


def test_u54_main_grad_over_micro_batches():
    w = torch.zeros(24, 16, dtype=BF16, device="cuda").requires_grad_()
    main_grad = torch.full((24, 16), 0.5, device="cuda")
    for value in (256.0, 1.0):
        x = torch.zeros(300, 16, dtype=BF16, device="cuda")
        x[7] = value
        g = torch.zeros(300, 24, dtype=BF16, device="cuda")
        g[7] = 1
        det.projection_forward(x, w, main_grad=main_grad).backward(g)
    assert bool((main_grad == 257.5).all())
    assert w.grad is None


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
def test_router_gate_module(x_dtype):
    gate = det.RouterGate(136, 24, device="cuda")
    x = normal(2, 111, 136, dtype=x_dtype).requires_grad_()
    logits = gate(x)
    g = normal(2, 111, 24, seed=3, dtype=FP32)
    logits.backward(g)
    assert_near(logits, oracle.forward(x, gate.weight), 1e-6)
    assert_near(gate.weight.grad, oracle.wgrad(g, x), 1e-6)
    assert x.grad.dtype == x_dtype
    assert_near(x.grad, oracle.dgrad(g, gate.weight), 1e-6 if x_dtype == FP32 else 4e-3)


def test_errors_come_before_any_launch():
    """Bad arguments raise by name and leave the output alone; the device is usable afterwards."""
    a, b = normal(40, 64), normal(64, 24, seed=1)
    out = torch.full((40, 24), float("nan"), device="cuda")
    bad = [
        ((a.float(), b, out), TypeError, "a: got dtype float32"),
        ((a, b.cpu(), out), ValueError, "b: got device cpu"),
        ((a, b[:32], out), ValueError, "b: got shape"),
        ((a, b[:, :20], out), ValueError, "b: got 20"),
        ((a, b, out[:, :16]), ValueError, "out: got shape"),
        ((a, b, out.double()), TypeError, "out: got dtype float64"),
        ((a, b, out.bfloat16(), False, {"accumulate": True}), TypeError, "out: got dtype bfloat16"),
        ((a, b, out, False, {"backend": "cpu"}), ValueError, "backend: got 'cpu'"),
    ]
    for arguments, error, message in bad:
        keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
        positional = arguments[:-1] if keywords else arguments
        with pytest.raises(error, match=message):
            det.dense_projection_det_gemm(*positional, **keywords)
    assert bool(torch.isnan(out).all())
    det.dense_projection_det_gemm(a, b, out)
    assert_near(out, oracle.product(a, b), 1e-5)


def test_plans_name_program_and_architecture():
    plan = det.prepare_forward(normal(64, 64), normal(64, 64)).plan
    assert plan.problem.target != "cpu"
    assert plan.stage
    assert repr(plan)


def test_what_compute_sanitizer_is_given_runs_to_its_end():
    script = Path(__file__).parents[1] / "benchmarks" / "check_gemm.py"
    finished = subprocess.run([sys.executable, str(script), "--launch"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
