"""Repeated eager calls: what is remembered of a signature, and everything that must not be."""

import itertools

import pytest
import torch

from cake_shared.gemm import launch, oracle, recipes
from cake_shared.gemm.family import GemmFamily
from cake_shared.testing import assert_bitwise_equal, assert_near

BF16, FP32 = torch.bfloat16, torch.float32
_names = itertools.count()


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Device:
    """Stands in for a package's cuda.py: computes in host memory and counts the long ways and the launches."""

    def __init__(self):
        self.prepared = self.launched = 0

    def _run(self, problem, a, b, out):
        def run():
            self.launched += 1
            product = torch.matmul(a.float(), b.float())
            out.copy_(out + product if getattr(problem, "accumulate", False) else product)

        return run

    def prepare(self, stage, problem, a, b, out):
        self.prepared += 1
        return stage, self._run(problem, a, b, out)

    def launcher(self, stage, problem, out):
        return lambda a, b, out: self._run(problem, a, b, out)()

    def prepare_backward(self, dgrad, wgrad):
        self.prepared += 1
        runs = self._run(*dgrad), self._run(*wgrad)
        return "backward", lambda: [run() for run in runs]

    def backward_launcher(self, dgrad, wgrad, out):
        return lambda *tensors: (self._run(dgrad, *tensors[:3])(), self._run(wgrad, *tensors[3:])())


@pytest.fixture
def gpu(monkeypatch):
    """A package on a GPU that host memory stands in for: (functions, device)."""

    def on(problem):
        return lambda **fields: problem(**{**fields, "target": "cuda"})

    monkeypatch.setattr(recipes, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(launch, "GemmProblem", on(launch.GemmProblem))
    monkeypatch.setattr(launch, "RouterProblem", on(launch.RouterProblem))
    device = Device()
    return GemmFamily(f"recipes_test_{next(_names)}", None, None, device), device


X, W, G = normal(2, 35, 136), normal(72, 136, seed=1), normal(2, 35, 72, seed=2)
XF, WF, GF = X.float(), W.float(), G.float()
CALLS = {
    "forward": (lambda f, x, w, g: f.forward(x, w, None, None), lambda x, w, g: oracle.forward(x, w), (X, W, G)),
    "dgrad": (lambda f, x, w, g: f.dgrad(g, w, None), lambda x, w, g: oracle.dgrad(g, w), (X, W, G)),
    "wgrad": (lambda f, x, w, g: f.wgrad(g, x, None, FP32, False, None), lambda x, w, g: oracle.wgrad(g, x), (X, W, G)),
    "router_forward": (
        lambda f, x, w, g: f.router_forward(x, w, None),
        lambda x, w, g: oracle.forward(x, w),
        (XF, WF, GF),
    ),
    "router_dgrad": (lambda f, x, w, g: f.router_dgrad(g, w, None), lambda x, w, g: oracle.dgrad(g, w), (XF, WF, GF)),
    "router_wgrad": (lambda f, x, w, g: f.router_wgrad(g, x, None), lambda x, w, g: oracle.wgrad(g, x), (XF, WF, GF)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_of_a_signature_takes_the_short_way(name, gpu):
    family, device = gpu
    call, exact, tensors = CALLS[name]
    first = call(family, *tensors)
    others = [t.clone() * 2 for t in tensors]
    second = call(family, *others)
    assert (device.prepared, device.launched) == (1, 2)
    assert second.data_ptr() != first.data_ptr()
    assert (second.dtype, second.stride()) == (first.dtype, first.stride())
    assert_near(first, exact(*tensors), 3e-3)
    assert_near(second, exact(*others), 3e-3)


@pytest.mark.parametrize("name", CALLS)
def test_another_signature_is_another_call(name, gpu):
    """Other extents, strides, alignment and errors: nothing known serves them."""
    family, device = gpu
    call, exact, tensors = CALLS[name]
    call(family, *tensors)
    shorter = [t[:1] if t.dim() == 3 else t for t in tensors]
    strided = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in tensors]
    shifted = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t) for t in tensors]
    for count, changed in enumerate((shorter, strided, shifted), start=2):
        for _ in range(2):
            assert_near(call(family, *changed), exact(*changed), 3e-3)
        # Shifted operands are copied each time, and never remembered.
        assert device.prepared == (count if changed is not shifted else count + 1)
    with pytest.raises(TypeError, match="got dtype float64"):
        call(family, *(t.double() for t in tensors))
    with pytest.raises(TypeError, match="takes a torch"):
        call(family, "x", "w", "g")


@pytest.mark.parametrize("kind", ["forward", "router_forward"])
def test_gradients_repeat(kind, gpu):
    family, device = gpu
    x, w, g = (X, W, G) if kind == "forward" else (XF, WF, GF)
    results = []
    for _ in range(3):
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = (
            family.forward(x_leaf, w_leaf, None, None)
            if kind == "forward"
            else family.router_forward(x_leaf, w_leaf, None)
        )
        y.backward(g)
        results.append((y.detach(), x_leaf.grad, w_leaf.grad))
        assert device.prepared == (2 if kind == "forward" else 3)  # the forward, and both gradients as one or apart
    for y, dx, dw in results:
        assert_near(y, oracle.forward(x, w), 3e-3)
        assert_near(dx, oracle.dgrad(g, w), 3e-3)
        assert_near(dw, oracle.wgrad(g, x), 3e-3)
    wanted = G.clone().requires_grad_()
    for _ in range(2):
        dx = family.dgrad(wanted, W, None)
        with pytest.raises(RuntimeError, match="has no derivative"):
            dx.sum().backward()


def test_main_grad_accumulates(gpu):
    family, device = gpu
    main_grad = torch.zeros(72, 136)
    for _ in range(3):
        family.forward(X, W.clone().requires_grad_(), main_grad, None).backward(G)
    assert_near(main_grad, 3 * oracle.wgrad(G, X), 1e-6)
    assert device.prepared == 2


def test_outputs_that_overlap_are_refused_every_time(gpu):
    """Addresses are no part of a signature."""
    family, device = gpu
    x = normal(70, 136, dtype=BF16)
    memory = torch.zeros(200 * 136, dtype=BF16)
    apart = memory[100 * 136 : 172 * 136].view(72, 136)
    g = normal(70, 72, seed=1)
    for _ in range(2):
        assert family.wgrad(g, x, apart, None, False, None) is apart
    assert device.prepared == 1
    inside = memory[: 70 * 136].view(70, 136)
    inside.copy_(x)
    overlapping = memory[60 * 136 : 132 * 136].view(72, 136)
    with pytest.raises(ValueError, match="out: shares memory with x"):
        family.wgrad(g, inside, overlapping, None, False, None)


def test_an_output_between_the_rows_of_an_operand_takes_the_long_way(gpu):
    family, device = gpu
    wide = normal(72, 304)
    x, out = wide[:70, :136], wide[:, 152:288]
    g = normal(70, 72, seed=1)
    for count in (1, 2):
        assert_near(family.wgrad(g, x, out, None, False, None), oracle.wgrad(g, x), 3e-3)
        assert device.prepared == count


@pytest.mark.parametrize("transposed", [False, True])
def test_the_plain_gemm(transposed, gpu):
    family, device = gpu
    a, b = normal(3, 40, 24), normal(3, 24, 16, seed=1)
    for accumulate in (False, True):
        for _ in range(2):
            out = torch.ones((3, 16, 40) if transposed else (3, 40, 16))
            assert family.gemm(a, b, out, transposed, accumulate, None) is out
            view = out.transpose(1, 2) if transposed else out
            assert_near(view, oracle.product(a, b) + (1 if accumulate else 0), 1e-6)
    assert device.prepared == 2
    with pytest.raises(TypeError, match="accumulate: got 1"):
        family.gemm(a, b, out, transposed, 1, None)
    with pytest.raises(RuntimeError, match="an argument requires grad"):
        family.gemm(a.clone().requires_grad_(), b, out, transposed, True, None)


def test_wrong_flags_are_not_taken_for_right_ones(gpu):
    """1 equals True as a key, and is refused all the same."""
    family, _ = gpu
    out = torch.zeros(72, 136)
    family.wgrad(G, X, out, None, True, None)
    family.wgrad(G, X, out, None, True, None)
    with pytest.raises(TypeError, match="accumulate: got 1"):
        family.wgrad(G, X, out, None, 1, None)
    with pytest.raises(TypeError, match="out_dtype: got 'bfloat16'"):
        family.wgrad(G, X, None, "bfloat16", False, None)
    with pytest.raises(ValueError, match="backend: got 'hip'"):
        family.wgrad(G, X, None, None, False, "hip")


def test_forgetting(gpu):
    family, device = gpu
    for expected in (1, 1, 2):
        if expected == 2:
            family.launcher.recipes.forget()
        assert_bitwise_equal(family.forward(X, W, None, None), family.forward(X, W, None, None))
        assert device.prepared == expected


def test_both_gradients_take_the_short_way(gpu):
    family, device = gpu
    for scale in (1, 2, 3):
        g, x, w = G * scale, X * scale, W * scale
        dx, dw = family.backward(g, x, w, None, FP32, False, None)
        assert_near(dx, oracle.dgrad(g, w), 3e-3)
        assert_near(dw, oracle.wgrad(g, x), 3e-3)
    assert (device.prepared, device.launched) == (1, 6)
    total = torch.zeros(72, 136)
    for _ in range(3):
        assert family.backward(G, X, W, total, None, True, None)[1] is total
    assert_near(total, 3 * oracle.wgrad(G, X), 3e-3)
    assert device.prepared == 2
    family.backward(G, X, W, None, BF16, False, None)
    assert device.prepared == 3


def test_what_is_not_dense_is_refused_by_name(gpu):
    family, _ = gpu
    for _ in range(2):
        family.backward(G, X, W, None, FP32, False, None)
        family.dgrad(G, W, None)
        with pytest.raises(TypeError, match=r"^w: got layout"):
            family.backward(G, X, W.to_sparse(), None, FP32, False, None)
        with pytest.raises(TypeError, match=r"^w: got layout"):
            family.dgrad(G, W.to_sparse(), None)
