"""DenseProjection and RouterGate beside torch.nn.Linear, and the FP32 main_grad."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dense_projection_det_gemm as det
from cake_shared.gemm import oracle
from cake_shared.testing import assert_bitwise_equal, assert_near

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(bias=True):
    """A Linear and a DenseProjection with its weights."""
    torch.manual_seed(0)
    linear = nn.Linear(40, 24, bias=bias, dtype=BF16)
    dense = det.DenseProjection(40, 24, bias=bias)
    dense.load_state_dict(linear.state_dict())
    return linear, dense


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_goes_both_ways(bias):
    linear, dense = pair(bias)
    assert list(dense.state_dict()) == list(linear.state_dict())
    back = nn.Linear(40, 24, bias=bias, dtype=BF16)
    back.load_state_dict(dense.state_dict())
    for name, value in linear.state_dict().items():
        assert_bitwise_equal(back.state_dict()[name], value)
    fp32 = nn.Linear(40, 24, bias=bias)
    dense.load_state_dict(fp32.state_dict())
    assert_bitwise_equal(dense.weight.detach(), fp32.weight.detach().to(BF16))


def test_same_initialisation_as_linear():
    torch.manual_seed(3)
    linear = nn.Linear(40, 24, dtype=BF16)
    torch.manual_seed(3)
    dense = det.DenseProjection(40, 24)
    for name, value in linear.state_dict().items():
        assert_bitwise_equal(dense.state_dict()[name], value)


@pytest.mark.parametrize("shape", [(2, 20, 40), (7, 40), (40,)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_beside_linear(shape, bias):
    linear, dense = pair(bias)
    x, g = normal(*shape), normal(*shape[:-1], 24, seed=1)
    results = []
    for module in (linear, dense):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(g)
        results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for actual, expected in zip(results[1], results[0]):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert_near(actual, expected, 8e-3)


def test_transposed_input_as_linear_takes_it():
    linear, dense = pair()
    x = normal(20, 2, 40).transpose(0, 1)
    assert_near(dense(x), linear(x), 8e-3)


@pytest.mark.parametrize("module", [det.DenseProjection(40, 24), det.RouterGate(40, 24)], ids=["dense", "gate"])
def test_copies_give_the_same_bits(module):
    x = normal(5, 40)
    expected = module(x).detach()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for other in copies:
        assert_bitwise_equal(other(x).detach(), expected)


def test_device_and_repr():
    dense = det.DenseProjection(40, 24, bias=False, device="meta", dtype=BF16)
    assert dense.weight.device.type == "meta"
    assert dense(torch.empty(3, 40, dtype=BF16, device="meta")).shape == (3, 24)
    assert repr(dense) == "DenseProjection(in_features=40, out_features=24, bias=False)"
    assert "accumulate_main_grad=True" in repr(det.DenseProjection(8, 8, accumulate_main_grad=True))
    assert repr(det.RouterGate(40, 24)) == "RouterGate(in_features=40, num_experts=24)"


def fused(**keywords):
    _, plain = pair()
    dense = det.DenseProjection(40, 24, accumulate_main_grad=True, **keywords)
    dense.load_state_dict(plain.state_dict())
    return plain, dense


def test_main_grad_takes_the_weight_gradient_in_fp32():
    plain, dense = fused()
    x, g = normal(30, 40), normal(30, 24, seed=1)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(first).backward(g)
    dense(second).backward(g)
    assert dense.weight.grad is None
    assert dense.weight.main_grad.dtype == FP32
    assert_bitwise_equal(dense.weight.main_grad, det.projection_wgrad(g, x, out_dtype=FP32))
    assert_near(dense.weight.main_grad, oracle.wgrad(g, x), 1e-6)
    assert_bitwise_equal(second.grad, first.grad)
    assert_bitwise_equal(dense.bias.grad, plain.bias.grad)


def test_u54_main_grad_over_micro_batches():
    """U54: 256 and then 1 add to 257, 257.5 on top of 0.5; BF16 `.grad` stays at 256."""
    plain = det.DenseProjection(8, 8, bias=False)
    dense = det.DenseProjection(8, 8, bias=False, accumulate_main_grad=True)
    x = torch.ones(1, 8, dtype=BF16)
    for prefill in (0.0, 0.5):
        dense.weight.main_grad = torch.full((8, 8), prefill)
        buffer = dense.weight.main_grad
        plain.weight.grad = None
        for value in (256.0, 1.0):
            for module in (plain, dense):
                module(x).backward(torch.full((1, 8), value, dtype=BF16))
        assert dense.weight.main_grad is buffer
        assert bool((buffer == 257.0 + prefill).all())
        assert bool((plain.weight.grad == 256.0).all())
    dense.zero_main_grad()
    assert bool((buffer == 0).all())


def test_main_grad_over_several_uses_and_backwards():
    _, dense = fused()
    x, y, g = normal(30, 40), normal(10, 40, seed=3), normal(30, 24, seed=1)
    both = dense(x).float().sum() + dense(y).float().sum()
    both.backward(retain_graph=True)
    ones = torch.ones((), dtype=BF16)
    parts = [det.projection_wgrad(ones.expand(t.shape[0], 24), t, out_dtype=FP32) for t in (x, y)]
    assert_near(dense.weight.main_grad, (parts[0] + parts[1]).double(), 1e-6)
    both.backward()
    assert_near(dense.weight.main_grad, 2 * (parts[0] + parts[1]).double(), 1e-6)
    dense.zero_main_grad()
    dense(x).backward(g)
    assert_bitwise_equal(dense.weight.main_grad, det.projection_wgrad(g, x, out_dtype=FP32))


@pytest.mark.parametrize("reentrant", [False, True])
def test_main_grad_under_checkpointing_is_added_once(reentrant):
    _, dense = fused()
    x, g = normal(30, 40).requires_grad_(), normal(30, 24, seed=1)
    dense(x).backward(g)
    expected = dense.weight.main_grad.clone()
    dense.zero_main_grad()
    checkpoint(dense, x, use_reentrant=reentrant).backward(g)
    assert_bitwise_equal(dense.weight.main_grad, expected)


def test_main_grad_is_left_alone_without_a_wanted_gradient():
    _, dense = fused()
    with torch.no_grad():
        dense(normal(3, 40))
    assert not hasattr(dense.weight, "main_grad")
    dense.weight.requires_grad_(False)
    x = normal(3, 40).requires_grad_()
    dense(x).sum().backward()
    assert x.grad is not None
    assert not hasattr(dense.weight, "main_grad")


def test_main_grad_refuses_a_weight_that_is_computed_from_others():
    """Its gradient would end in `main_grad`, and what the weight is computed from would never get one."""
    _, dense = fused()
    flat = torch.nn.Parameter(dense.weight.detach().flatten().clone())
    with pytest.raises(RuntimeError, match=r"weight: got a tensor computed .* takes a parameter of its own"):
        torch.func.functional_call(dense, {"weight": flat.view_as(dense.weight)}, normal(3, 40))
    torch.nn.utils.parametrizations.weight_norm(dense)
    with pytest.raises(RuntimeError, match="weight: got a tensor computed from others"):
        dense(normal(3, 40))
    with torch.no_grad():
        assert dense(normal(3, 40)).shape == (3, dense.out_features)


def test_main_grad_stays_out_of_state_dict_and_copies():
    _, dense = fused()
    dense(normal(3, 40)).sum().backward()
    assert list(dense.state_dict()) == ["weight", "bias"]
    assert not hasattr(copy.deepcopy(dense).weight, "main_grad")


def test_main_grad_under_compile():
    torch._dynamo.reset()
    _, dense = fused()
    x, g = normal(30, 40), normal(30, 24, seed=1)
    with pytest.raises(Exception, match="allocate_main_grad"):
        torch.compile(dense, fullgraph=True, backend="aot_eager")(x)
    dense.allocate_main_grad()
    dense(x).backward(g)
    expected = dense.weight.main_grad.clone()
    dense.zero_main_grad()
    torch._dynamo.reset()
    torch.compile(dense, fullgraph=True, backend="aot_eager")(x).backward(g)
    assert_bitwise_equal(dense.weight.main_grad, expected)
    assert dense.weight.grad is None


@pytest.mark.parametrize("kind", ["dense", "fused", "gate"])
def test_compiled_modules_recompile_once_for_a_dynamic_length(kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    module = det.RouterGate(40, 24) if kind == "gate" else det.DenseProjection(40, 24)
    if kind == "fused":
        _, module = fused()
        module.allocate_main_grad()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for tokens in (64, 130, 9, 77):
        x = normal(2, tokens, 40, seed=tokens)
        y = compiled(x)
        y.float().sum().backward()
        assert_bitwise_equal(y.detach(), module(x).detach())
    assert counter.frame_count <= 2


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
def test_router_gate(x_dtype):
    torch.manual_seed(1)
    linear = nn.Linear(40, 24, bias=False)
    gate = det.RouterGate(40, 24)
    gate.load_state_dict(linear.state_dict())
    x = normal(2, 20, 40, dtype=x_dtype).requires_grad_()
    logits = gate(x)
    g = normal(2, 20, 24, seed=1, dtype=FP32)
    logits.backward(g)
    assert logits.dtype == FP32
    assert_near(logits, oracle.forward(x, gate.weight), 2e-7)
    assert_near(gate.weight.grad, oracle.wgrad(g, x), 2e-7)
    assert x.grad.dtype == x_dtype
    assert_near(x.grad, oracle.dgrad(g, gate.weight), 2e-7 if x_dtype == FP32 else 4e-3)


def test_a_small_network_learns():
    """A few steps of SGD on both modules lower the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(det.DenseProjection(16, 32), nn.ReLU(), det.RouterGate(32, 8))
    x, target = normal(64, 16), torch.arange(64) % 8
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
