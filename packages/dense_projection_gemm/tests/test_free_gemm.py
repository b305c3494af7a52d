"""The keyword `deterministic`: what it hands over, and parity of the free form with its twin and with float64."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.errors import UnsupportedArchError
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, assert_near

BF16, FP32 = torch.bfloat16, torch.float32
OPS = torch.ops.dense_projection_gemm


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W, G = normal(2, 70, 136), normal(72, 136, seed=1), normal(2, 70, 72, seed=2)
XF, WF, GF = X.float(), W.float(), G.float()

# name -> arguments, oracle's value, relative limit
FUNCTIONS = {
    "projection_forward": ((X, W), oracle.forward(X, W), 4e-3),
    "projection_dgrad": ((G, W), oracle.dgrad(G, W), 4e-3),
    "projection_wgrad": ((G, X, None, FP32), oracle.wgrad(G, X), 1e-6),
    "router_forward": ((XF, WF), oracle.forward(X, W), 2e-7),
    "router_dgrad": ((GF, WF), oracle.dgrad(G, W), 2e-7),
    "router_wgrad": ((GF, XF), oracle.wgrad(G, X), 2e-7),
}
PREPARED = {
    "prepare_forward": "projection_forward",
    "prepare_dgrad": "projection_dgrad",
    "prepare_wgrad": "projection_wgrad",
    "prepare_router_forward": "router_forward",
    "prepare_router_dgrad": "router_dgrad",
    "prepare_router_wgrad": "router_wgrad",
}


def test_same_names_and_one_more_keyword():
    """Every public function is that of the deterministic package with `deterministic=True` added."""
    assert [n.replace("_gemm", "_det_gemm") if n == "dense_projection_gemm" else n for n in free.__all__] == det.__all__
    for name in free.__all__:
        twin = getattr(det, name.replace("projection_gemm", "projection_det_gemm"))
        if not callable(twin) or isinstance(twin, type):
            continue
        parameters = dict(inspect.signature(getattr(free, name)).parameters)
        assert parameters.pop("deterministic").default is True
        assert parameters == dict(inspect.signature(twin).parameters)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parity(name, deterministic):
    """Both forms against float64, and against each other: on the CPU they are the same program, so the same bits."""
    arguments, exact, limit = FUNCTIONS[name]
    result = getattr(free, name)(*arguments, deterministic=deterministic)
    assert_near(result, exact, limit)
    assert_bitwise_equal(result, getattr(det, name)(*arguments))
    assert_bitwise_equal(result, getattr(free, name)(*arguments))


@pytest.mark.parametrize("name", PREPARED)
def test_plans_name_their_program(name):
    arguments, _, _ = FUNCTIONS[PREPARED[name]]
    if name == "prepare_wgrad":
        arguments = arguments[:2]
    tiles = "cpu_split_tiles" if "router" in name else "cpu_tiles"
    default = getattr(free, name)(*arguments)
    chosen = getattr(free, name)(*arguments, deterministic=False)
    assert default.plan.program == tiles
    assert chosen.plan.program == f"dense_projection_det_gemm.{tiles}"
    assert_bitwise_equal(default.launch(), chosen.launch())


@pytest.mark.parametrize("deterministic", [True, False])
def test_both_gradients_in_one_call(deterministic):
    results = free.projection_backward(G, X, W, out_dtype=FP32, deterministic=deterministic)
    prepared = free.prepare_backward(G, X, W, out_dtype=FP32, deterministic=deterministic)
    expected = free.projection_dgrad(G, W), free.projection_wgrad(G, X, out_dtype=FP32)
    for actual, again, one in zip(results, prepared.launch(), expected):
        assert_bitwise_equal(actual, one)
        assert_bitwise_equal(again, one)
    program = "cpu_tiles" if deterministic else "dense_projection_det_gemm.cpu_tiles"
    assert {prepared.plan.dgrad.program, prepared.plan.wgrad.program} == {program}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("transposed_out", [False, True])
def test_plain_gemm(deterministic, transposed_out):
    a, b = normal(3, 40, 24), normal(3, 24, 16, seed=1)
    out = torch.full((3, 16, 40) if transposed_out else (3, 40, 16), float("nan"))
    assert free.dense_projection_gemm(a, b, out, transposed_out, deterministic=deterministic) is out
    assert_near(out.transpose(1, 2) if transposed_out else out, oracle.product(a, b), 1e-6)
    before = out.clone()
    free.dense_projection_gemm(a, b, out, transposed_out, accumulate=True, deterministic=deterministic)
    assert_bitwise_equal(out, before + before)
    plan = free.prepare_gemm(a, b, out, transposed_out, deterministic=deterministic)
    assert_bitwise_equal(plan.launch(), before)


def test_default_hands_over_to_the_deterministic_operators():
    """Under compile, too, the default runs the twin's operator."""
    names = []

    def record(graph, inputs):
        names.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x, w: free.projection_forward(x, w), fullgraph=True, backend=record)(X, W)
    torch.compile(lambda x, w: free.projection_forward(x, w, deterministic=False), fullgraph=True, backend=record)(X, W)
    assert names == ["dense_projection_det_gemm.projection_forward", "dense_projection_gemm.projection_forward"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("name", "x", "w", "g"), [("projection_forward", X, W, G), ("router_forward", XF, WF, GF)])
def test_autograd_checkpoint_compile(name, x, w, g, deterministic):
    torch._dynamo.reset()

    def function(x, w):
        return getattr(free, name)(x, w, deterministic=deterministic)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (
        getattr(det, name),
        function,
        compiled,
        lambda x, w: checkpoint(function, x, w, use_reentrant=False),
        lambda x, w: checkpoint(function, x, w, use_reentrant=True),
    ):
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        run(x_leaf, w_leaf).backward(g)
        results.append((x_leaf.grad, w_leaf.grad))
    for dx, dw in results[1:]:
        assert_bitwise_equal(dx, results[0][0])
        assert_bitwise_equal(dw, results[0][1])


@pytest.mark.parametrize(("x_wanted", "w_wanted"), list(itertools.product([False, True], repeat=2)))
def test_subsets_of_requires_grad(x_wanted, w_wanted):
    x, w = X.clone().requires_grad_(x_wanted), W.clone().requires_grad_(w_wanted)
    y = free.projection_forward(x, w, deterministic=False)
    assert y.requires_grad == (x_wanted or w_wanted)
    if y.requires_grad:
        y.backward(G)
    assert (x.grad is not None) == x_wanted
    assert (w.grad is not None) == w_wanted


def test_double_backward_raises():
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = free.projection_forward(x, w, deterministic=False)
    (dx,) = torch.autograd.grad(y, x, G, create_graph=True)
    # The plain term keeps the sum differentiable: a constant gradient would pass unnoticed.
    with pytest.raises(RuntimeError, match="no double backward"):
        (dx.sum() + y.sum()).backward()


def opcheck_samples():
    x, w, g = X[0], W, G[0]
    yield OPS.gemm, (x, w.t(), torch.zeros(70, 72), False, True)
    yield OPS.projection_forward, (x.clone().requires_grad_(), w.clone().requires_grad_())
    yield OPS.projection_forward_main_grad, (x.clone().requires_grad_(), w, torch.zeros(72, 136))
    yield OPS.projection_dgrad, (g, w)
    yield OPS.projection_wgrad, (g, x, FP32)
    yield OPS.projection_wgrad_out, (g, x, torch.zeros(72, 136), True)
    yield OPS.projection_backward, (g, x, w, FP32)
    yield OPS.projection_backward_out, (g, x, w, torch.zeros(72, 136), True)
    yield OPS.router_forward, (XF[0].clone().requires_grad_(), WF.clone().requires_grad_())
    yield OPS.router_dgrad, (GF[0], WF)
    yield OPS.router_wgrad, (GF[0], x)


@pytest.mark.parametrize(("op", "arguments"), list(opcheck_samples()), ids=lambda v: getattr(v, "__name__", None))
def test_opcheck(op, arguments):
    torch.library.opcheck(op, arguments)


BAD = [
    ({"deterministic": 1}, TypeError, "deterministic: got 1, takes True or False"),
    ({"deterministic": None}, TypeError, "deterministic: got None"),
    ({"backend": "cuda"}, ValueError, "backend: got 'cuda' with tensors on cpu"),
    ({"deterministic": False, "backend": "cuda"}, ValueError, "backend: got 'cuda' with tensors on cpu"),
    ({"deterministic": False, "backend": "hip"}, ValueError, "backend: got 'hip'"),
]
GOOD = {
    **{name: arguments for name, (arguments, _, _) in FUNCTIONS.items()},
    **{name: FUNCTIONS[function][0][:2] for name, function in PREPARED.items()},
    "dense_projection_gemm": (X[0], W.t(), torch.zeros(70, 72)),
    "projection_backward": (G, X, W),
    "prepare_backward": (G, X, W),
    "prepare_gemm": (X[0], W.t(), torch.zeros(70, 72)),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD)
@pytest.mark.parametrize("name", GOOD)
def test_bad_keyword(name, change, error, message):
    with pytest.raises(error, match=message):
        getattr(free, name)(*GOOD[name], **change)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", GOOD)
def test_bad_operand(name, deterministic, position):
    """Another dtype, no tensor, and a shape that does not fit, in each operand of each function, in both forms."""
    argument = list(inspect.signature(getattr(free, name)).parameters)[position]
    for bad, error in (
        (GOOD[name][position].double(), TypeError),
        ("text", TypeError),
        (GOOD[name][position][..., :-8, :-8], ValueError),
    ):
        arguments = list(GOOD[name])
        arguments[position] = bad
        with pytest.raises(error, match=r"^(a|b|g|x|w|out): got") as caught:
            getattr(free, name)(*arguments, deterministic=deterministic)
        if error is TypeError:
            assert str(caught.value).startswith(f"{argument}: ")


def test_the_table_covers_every_public_function():
    functions = {n for n in free.__all__ if callable(getattr(free, n)) and not isinstance(getattr(free, n), type)}
    assert functions == set(GOOD)


@pytest.mark.parametrize("deterministic", [True, False])
def test_modules(deterministic):
    torch.manual_seed(0)
    layer = free.DenseProjection(136, 72, accumulate_main_grad=True, deterministic=deterministic)
    gate = free.RouterGate(72, 8, deterministic=deterministic)
    twin, twin_gate = det.DenseProjection(136, 72, accumulate_main_grad=True), det.RouterGate(72, 8)
    twin.load_state_dict(layer.state_dict())
    twin_gate.load_state_dict(gate.state_dict())
    for dense, router in ((layer, gate), (twin, twin_gate)):
        router(dense(X)).square().sum().backward()
    assert_bitwise_equal(layer.weight.main_grad, twin.weight.main_grad)
    assert_bitwise_equal(layer.bias.grad, twin.bias.grad)
    assert_bitwise_equal(gate.weight.grad, twin_gate.weight.grad)
    for module in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert module.deterministic is deterministic
        assert_bitwise_equal(module(X), layer(X))


@pytest.mark.parametrize(
    ("module", "arguments", "error", "message"),
    [
        (free.DenseProjection, {"in_features": 12, "out_features": 8}, ValueError, "in_features: got 12"),
        (
            free.DenseProjection,
            {"in_features": 8, "out_features": 8, "deterministic": 1},
            TypeError,
            "deterministic: got",
        ),
        (free.DenseProjection, {"in_features": 8, "out_features": 8, "dtype": FP32}, TypeError, "dtype: got float32"),
        (
            free.DenseProjection,
            {"in_features": 8, "out_features": 8, "accumulate_main_grad": 0},
            TypeError,
            "accumulate_main_grad: got 0",
        ),
        (free.RouterGate, {"in_features": 8, "num_experts": 9}, ValueError, "num_experts: got 9"),
        (free.RouterGate, {"in_features": 8, "num_experts": 8, "deterministic": "x"}, TypeError, "deterministic: got"),
        (free.RouterGate, {"in_features": 8, "num_experts": 8, "dtype": BF16}, TypeError, "dtype: got bfloat16"),
    ],
)
def test_bad_module_argument(module, arguments, error, message):
    with pytest.raises(error, match=message):
        module(**arguments)


class OnCuda:
    device = torch.device("cuda", 0)


def test_cuda_names_an_architecture_that_it_does_not_know(monkeypatch):
    from dense_projection_gemm import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an older device")
    for stage in ("gemm_out", "router_out"):
        with pytest.raises(UnsupportedArchError, match=r"an older device has compute capability 8\.0.*sm_90a"):
            cuda.prepare(stage, None, None, None, OnCuda())
