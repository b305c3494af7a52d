"""Gradients, what is saved for them, checkpointing, torch.compile, autocast, and the operators' own contracts."""

import contextlib
import itertools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, assert_near

BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.dense_projection_det_gemm


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


KINDS = {
    "projection": (det.projection_forward, BF16, BF16),
    "router": (det.router_forward, FP32, FP32),
    "router_bf16": (det.router_forward, BF16, FP32),
}


def case(kind, rows=(2, 20)):
    function, x_dtype, w_dtype = KINDS[kind]
    x, w = normal(*rows, 40, dtype=x_dtype), normal(24, 40, seed=1, dtype=w_dtype)
    g = normal(*rows, 24, seed=2, dtype=w_dtype)
    return function, x, w, g


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_float64(kind):
    function, x, w, g = case(kind)
    x, w = leaves(x, w)
    y = function(x, w)
    y.backward(g)
    limit = 1e-6 if kind == "router" else 4e-3
    assert_near(y, oracle.forward(x, w), limit, "y")
    assert_near(x.grad, oracle.dgrad(g, w), limit, "dx")
    assert_near(w.grad, oracle.wgrad(g, x), limit, "dw")
    assert x.grad.dtype == x.dtype
    assert w.grad.dtype == w.dtype
    if kind == "router_bf16":
        assert_near(w.grad, oracle.wgrad(g, x), 1e-6, "dw")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_wanted", "w_wanted"), list(itertools.product([False, True], repeat=2)))
def test_subsets_of_requires_grad(kind, x_wanted, w_wanted):
    """Unwanted gradients are None, wanted ones keep their bits, and only what they need is saved."""
    function, x, w, g = case(kind)
    full = leaves(x, w)
    function(*full).backward(g)
    x, w = x.clone().requires_grad_(x_wanted), w.clone().requires_grad_(w_wanted)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        y = function(x, w)
    assert saved == [tuple(t.shape) for t, wanted in ((x, w_wanted), (w, x_wanted)) if wanted]
    assert y.requires_grad == (x_wanted or w_wanted)
    if y.requires_grad:
        y.backward(g)
    for tensor, wanted, reference in ((x, x_wanted, full[0]), (w, w_wanted, full[1])):
        assert_bitwise_equal(tensor.grad, reference.grad if wanted else None)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_layout(kind):
    """U26 for these GEMMs: a stride-0, a sliced and a transposed gradient give the contiguous one's bits."""
    function, x, w, _ = case(kind, rows=(20,))
    dtype = KINDS[kind][2]
    wide = normal(20, 40, seed=5, dtype=dtype)
    for g in (torch.ones((), dtype=dtype).expand(20, 24), wide[:, 8:32], normal(24, 20, seed=6, dtype=dtype).t()):
        results = []
        for given in (g, g.contiguous()):
            pair = leaves(x, w)
            function(*pair).backward(given)
            results.append(pair)
        for actual, expected in zip(*results):
            assert_near(actual.grad, expected.grad.double(), 1e-6 if dtype == FP32 else 4e-3)
            if g.stride() != (1, 20):
                assert_bitwise_equal(actual.grad, expected.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward_raises(kind):
    function, x, w, g = case(kind)
    x, w = leaves(x, w)
    y = function(x, w)
    (dx,) = torch.autograd.grad(y, x, g.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dx.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watched", [False, True], ids=("eager", "under a dispatch mode"))
def test_a_gradient_penalty_raises(kind, watched):
    """The incoming gradient wants none itself, yet dx depends on w and dw on x: they are not constants."""
    function, x, w, _ = case(kind)
    x, w = leaves(x, w)
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        y = function(x, w)
        for leaf in (x, w):
            (grad,) = torch.autograd.grad(y.float().sum(), leaf, create_graph=True)
            # The plain term keeps the sum differentiable: a constant gradient would pass unnoticed.
            with pytest.raises(RuntimeError, match="no double backward"):
                (y.float().sum() + grad.float().square().sum()).backward(retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_constants_are_no_error(kind):
    """With one operand wanted the GEMM is linear in it: its gradient is a constant under create_graph, same bits."""
    function, x, w, g = case(kind)
    full = leaves(x, w)
    function(*full).backward(g)
    for place, reference in enumerate(full):
        pair = [x.clone(), w.clone()]
        pair[place].requires_grad_()
        (grad,) = torch.autograd.grad(function(*pair), pair[place], g, create_graph=True)
        assert not grad.requires_grad
        assert_bitwise_equal(grad, reference.grad)


def test_main_gradients_under_create_graph():
    """The sum in main_grad is made as ever; the input's gradient refuses to be differentiated."""
    _, x, w, g = case("projection")
    x, w = leaves(x, w)
    plain, recorded = torch.zeros(24, 40), torch.zeros(24, 40)
    torch.autograd.grad(det.projection_forward(x, w, main_grad=plain), x, g)
    (dx,) = torch.autograd.grad(det.projection_forward(x, w, main_grad=recorded), x, g, create_graph=True)
    assert_bitwise_equal(recorded, plain)
    with pytest.raises(RuntimeError, match="no double backward"):
        dx.float().sum().backward()


def test_gradient_gemms_refuse_to_be_differentiated():
    x, w, g = leaves(normal(20, 40), normal(24, 40), normal(20, 24))
    for name, result in (
        ("projection_dgrad", det.projection_dgrad(g, w)),
        ("projection_wgrad", det.projection_wgrad(g, x)),
        ("router_dgrad", det.router_dgrad(g.float(), w.float())),
        ("router_wgrad", det.router_wgrad(g.float(), x.float())),
        ("projection_dgrad", OPS.projection_dgrad(g, w)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} has no derivative"):
            result.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_u46_checkpointing_gives_the_same_bits(kind, reentrant):
    """U46: activation checkpointing, both kinds."""
    function, x, w, g = case(kind)
    plain, recomputed = leaves(x, w), leaves(x, w)
    y = function(*plain)
    y.backward(g)
    z = checkpoint(function, *recomputed, use_reentrant=reentrant)
    z.backward(g)
    assert_bitwise_equal(z.detach(), y.detach())
    for actual, expected in zip(recomputed, plain):
        assert_bitwise_equal(actual.grad, expected.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_selective_checkpointing_sees_one_operation(kind):
    """Under a dispatch mode the call is one operator, which a policy can save or recompute; the bits stay."""
    function, x, w, g = case(kind)
    plain, recomputed = leaves(x, w), leaves(x, w)
    function(*plain).backward(g)
    seen = set()

    def policy(context, op, *args, **kwargs):
        seen.add(str(op))
        return CheckpointPolicy.MUST_SAVE if "forward" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    checkpoint(function, *recomputed, use_reentrant=False, context_fn=contexts).backward(g)
    assert {name for name in seen if "dense_projection" in name} == {
        f"dense_projection_det_gemm.{'router' if 'router' in kind else 'projection'}_forward.default"
    }
    assert not any("mm" in name.split(".")[1] for name in seen)
    for actual, expected in zip(recomputed, plain):
        assert_bitwise_equal(actual.grad, expected.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_compile_with_dynamic_length(kind):
    """U45, U59: no graph break, one recompilation from static to dynamic rows, eager's bits, strided operands."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    function, _, w, _ = case(kind)
    x_dtype, w_dtype = KINDS[kind][1:]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for rows in (64, 130, 77, 200, 9):
        wide = normal(rows, 56, seed=rows, dtype=x_dtype)
        g = torch.ones((), dtype=w_dtype).expand(rows, 24)
        results = []
        for run in (function, compiled):
            pair = [wide.clone()[:, 8:48].detach().requires_grad_(), w.clone().requires_grad_()]
            y = run(*pair)
            y.backward(g)
            results.append([y.detach(), pair[0].grad, pair[1].grad])
        for eager, graph in zip(*results):
            assert_bitwise_equal(graph, eager)
            assert graph.stride() == eager.stride()
    assert counter.frame_count <= 2


def test_u59_weight_gradient_with_fp32_out_under_compile_and_autocast():
    """U59: the dtype of the result is exact under compile and autocast; mixed operands are refused by name."""
    torch._dynamo.reset()
    g, x = normal(40, 24), normal(40, 56)[:, 8:48]
    expected = det.projection_wgrad(g, x, out_dtype=FP32)

    def step(g, x, out):
        return det.projection_wgrad(g, x, out, accumulate=True), det.projection_wgrad(g, x, out_dtype=torch.float32)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for run in (step, compiled):
        for autocast in (False, True):
            out = torch.ones(24, 40)
            with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                first, second = run(g, x, out)
            assert_bitwise_equal(second, expected)
            assert_bitwise_equal(first, expected + 1)
            assert_bitwise_equal(out, expected + 1)
    with torch.autocast("cpu", dtype=BF16), pytest.raises(TypeError, match="x: got dtype float32, takes bfloat16"):
        det.projection_wgrad(g, x.float())
    gt = normal(24, 40).t()
    assert_near(det.projection_wgrad(gt, x, out_dtype=FP32), oracle.wgrad(gt, x), 1e-6)


def test_autocast_changes_no_bit():
    for kind in KINDS:
        function, x, w, _ = case(kind)
        expected = function(x, w)
        with torch.autocast("cpu", dtype=BF16):
            assert_bitwise_equal(function(x, w), expected)


def test_compiled_gemm_writes_out():
    torch._dynamo.reset()
    a, b = normal(2, 20, 40), normal(2, 40, 24)

    def step(a, b, out):
        return det.dense_projection_det_gemm(a, b, out, accumulate=True) * 2

    eager, graph = torch.ones(2, 20, 24), torch.ones(2, 20, 24)
    expected = step(a, b, eager)
    assert_bitwise_equal(torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, graph), expected)
    assert_bitwise_equal(graph, eager)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_gives_the_same_bits(kind):
    torch._dynamo.reset()
    function, x, w, g = case(kind)

    def after_another(x, w):
        return function(x * 3, w)

    def twice(x, w):  # dx is a sum of two rounded gradients
        return function(x, w) + function(x, w * 2)

    for body in (function, after_another, twice):
        eager, graph = leaves(x, w), leaves(x, w)
        body(*eager).backward(g)
        # The cache on disk does not know which backward belongs to an operator: it may hold one of another version.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            torch.compile(body, fullgraph=True)(*graph).backward(g)
        for actual, expected in zip(graph, eager):
            assert_bitwise_equal(actual.grad, expected.grad)


def test_a_graph_of_the_router_rounds_nothing_outside_of_its_operators():
    """The backward graph holds no conversion, which a compiler might fuse with what follows and drop."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def keep(graph, example_inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return make_boxed_func(graph.forward)

    function, x, w, g = case("router_bf16")
    x, w = leaves(x, w)
    torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(x, w).backward(g)
    operators = {f"dense_projection_det_gemm.router_{name}.default" for name in ("forward", "dgrad", "wgrad")}
    assert operators == {name for targets in graphs for name in targets if "getitem" not in name}


def opcheck_samples():
    x, w, g = normal(20, 40), normal(24, 40), normal(20, 24)
    yield OPS.gemm, (normal(20, 40), normal(40, 24), torch.zeros(20, 24), False, True)
    yield OPS.gemm, (normal(2, 24, 40), normal(2, 40, 24), torch.zeros(2, 24, 24, dtype=BF16), True, False)
    yield OPS.projection_forward, tuple(leaves(x, w))
    yield OPS.projection_forward, (normal(2, 3, 40), w.clone().requires_grad_())
    yield OPS.projection_forward_main_grad, (x.clone().requires_grad_(), w, torch.zeros(24, 40))
    yield OPS.projection_dgrad, (g, w)
    yield OPS.projection_wgrad, (g, x, FP32)
    yield OPS.projection_wgrad_out, (g, x, torch.zeros(24, 40), True)
    yield OPS.projection_backward, (g, x, w, FP32)
    yield OPS.projection_backward_out, (g, x, w, torch.zeros(24, 40), True)
    yield OPS.router_forward, tuple(leaves(x.float(), w.float()))
    yield OPS.router_forward, tuple(leaves(x, w.float()))
    yield OPS.router_dgrad, (g.float(), w.float())
    yield OPS.router_dgrad, (g.float(), w.float(), BF16)
    yield OPS.router_wgrad, (g.float(), x)


@pytest.mark.parametrize(("op", "arguments"), list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", None))
def test_opcheck(op, arguments):
    torch.library.opcheck(op, arguments)


def test_opcheck_covers_every_operator():
    from cake_shared.gemm.ops import SCHEMAS

    assert {str(op).rsplit(".", 1)[-1] for op, _ in opcheck_samples()} == set(SCHEMAS)


def test_operators_check_for_themselves():
    with pytest.raises(ValueError, match="x: got shape"):
        OPS.projection_forward(normal(20, 32), normal(24, 40))
    with pytest.raises(TypeError, match="g: got dtype float32"):
        OPS.projection_dgrad(normal(20, 24, dtype=FP32), normal(24, 40))
    with pytest.raises(TypeError, match="out_dtype: got float16, takes None"):
        OPS.router_dgrad(normal(20, 24, dtype=FP32), normal(24, 40, dtype=FP32), torch.float16)


def test_meta_and_fake_tensors_take_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    y = det.projection_forward(
        torch.empty(2, 3, 40, dtype=BF16, device="meta"), torch.empty(24, 40, dtype=BF16, device="meta")
    )
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 24), BF16)
    with FakeTensorMode():
        logits = det.router_forward(torch.empty(5, 40), torch.empty(24, 40))
    assert (logits.shape, logits.dtype) == ((5, 24), FP32)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_is_refused(kind):
    """A tangent is not dropped in silence: the error names the argument that carries it."""
    function, x, w, _ = case(kind)
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="x: got a tensor with a forward-mode tangent, takes one without"):
            function(tangent, w)
        function(x, w)


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_is_a_loop(kind):
    """Without gradients `torch.vmap` over a call equals calls one by one."""
    function, x, w, _ = case(kind)
    x, w = x.detach(), w.detach()
    many = torch.stack([x, x.flip(0)])
    for y, one in zip(torch.vmap(lambda x: function(x, w))(many), many):
        assert_bitwise_equal(y, function(one, w))
