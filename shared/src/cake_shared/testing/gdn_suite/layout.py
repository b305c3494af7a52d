"""Strides, alignment, expanded gradients: views of larger buffers give what contiguous tensors give."""

import pytest
import torch

from cake_shared.testing import GuardBand, assert_bitwise_equal
from cake_shared.testing.bits import bits_of
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run

heads = pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 4), (2, 6)])
TENSORS = ("q", "k", "v", "g", "beta", "do")


def from_fused_projections(case):
    """The case as views of one buffer for q, k and v, and of one with gates and betas interleaved."""
    _, tokens, h, dim = case.q.shape
    hv = case.v.shape[2]
    wide = torch.cat([case.q.flatten(2), case.k.flatten(2), case.v.flatten(2)], -1)
    narrow = torch.stack([case.g, case.beta], -1).flatten(2)
    q, k, v = wide.split([h * dim, h * dim, hv * dim], -1)
    views = {
        "q": q.view(1, tokens, h, dim),
        "k": k.view(1, tokens, h, dim),
        "v": v.view(1, tokens, hv, dim),
        "g": narrow[..., 0::2],
        "beta": narrow[..., 1::2],
    }
    for name, view in views.items():
        assert torch.equal(view, getattr(case, name))
        assert tokens == 1 or not view.is_contiguous()
    return case.with_(**views)


@heads
@pytest.mark.parametrize("lengths", [None, (30, 100)])
def test_U25_slices_of_fused_projections(gdn, key_heads, value_heads, lengths):
    """q, k, v as slices of one buffer, g and beta interleaved in another: bits of the contiguous call, both ways."""
    case = base(130, key_heads, value_heads)
    case = case if lengths is None else packed(case, lengths)
    views = from_fused_projections(case)
    expected, results = run(gdn.rule, case), run(gdn.rule, views)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def expanded_output_gradient(case):
    """One scalar seen as the whole gradient, all strides 0."""
    return torch.tensor(0.5, dtype=case.do.dtype).expand(case.do.shape)


def sliced_output_gradient(case):
    """The first columns of a wider buffer, NaN in the others."""
    _, tokens, hv, dim = case.do.shape
    buffer = torch.full((1, tokens, hv * dim + 96), float("nan"), dtype=case.do.dtype)
    buffer[..., : hv * dim] = case.do.flatten(2)
    return buffer[..., : hv * dim].view(1, tokens, hv, dim)


def transposed_output_gradient(case):
    """The same values with the dims in another order in memory."""
    return case.do.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)


@pytest.mark.parametrize(
    "make", [expanded_output_gradient, sliced_output_gradient, transposed_output_gradient], ids=lambda f: f.__name__
)
def test_U26_output_gradient_of_any_layout(gdn, make):
    """The gradient of o may be an expanded scalar, a slice or a transpose: same bits as contiguous."""
    case = base(100, 2, 4)
    strided = case.with_(do=make(case))
    assert not strided.do.is_contiguous()
    results, expected = run(gdn.rule, strided), run(gdn.rule, case.with_(do=strided.do.contiguous()))
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_U26_loss_is_a_plain_sum(gdn):
    """`o.sum().backward()`, whose gradient has stride 0, equals a contiguous gradient of ones."""
    case = base(100, 2, 4)
    q = case.q.clone().requires_grad_()
    gdn.rule(q, case.k, case.v, case.g, case.beta)[0].sum().backward()
    ones = run(gdn.rule, case.with_(do=torch.ones_like(case.do)), wrt=("q",))
    assert_bitwise_equal(q.grad, ones["dq"], "dq")


def test_U27_misaligned_base_and_odd_row_stride(gdn):
    """q one element into its storage, v with an odd row stride: the bits of aligned tensors."""
    case = base(100, 2, 4)
    _, tokens, hv, dim = case.v.shape
    shifted = torch.cat([torch.full((1,), float("nan"), dtype=case.q.dtype), case.q.flatten()])
    q = shifted[1:].view(case.q.shape)
    odd = torch.full((tokens, hv * dim + 1), float("nan"), dtype=case.v.dtype)
    odd[:, : hv * dim] = case.v[0].flatten(1)
    v = odd.as_strided(case.v.shape, (0, hv * dim + 1, dim, 1))
    assert q.data_ptr() % 16 != 0
    results, expected = run(gdn.rule, case.with_(q=q, v=v)), run(gdn.rule, case)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_heads_before_tokens_and_reversed_dims(gdn):
    """Every tensor in another memory order than its shape says: same bits."""
    case = base(100, 2, 4)
    h0, ds = states(case, 1)
    case = case.with_(initial_state=h0, d_state=ds)
    moved = {name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2) for name in TENSORS}
    moved.update({name: getattr(case, name).mT.contiguous().mT for name in ("initial_state", "d_state")})
    results, expected = run(gdn.rule, case.with_(**moved)), run(gdn.rule, case)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_inputs_and_their_surroundings_are_never_written(gdn):
    """Every input, and the memory around it, is as it was after forward and backward."""
    case = packed(base(140, 2, 4), (60, 70))
    h0, ds = states(case, 2)
    case = case.with_(initial_state=h0, d_state=ds)
    names = (*TENSORS, "initial_state", "d_state")
    bands = {name: GuardBand.around(getattr(case, name), row_margin=8) for name in names}
    before = {name: bits_of(getattr(case, name)).clone() for name in names}
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    run(gdn.rule, case.with_(**{name: band.tensor for name, band in bands.items()}), **options)
    for name, band in bands.items():
        band.check(name)
        assert torch.equal(bits_of(band.tensor), before[name]), name
    assert case.cu_seqlens.tolist() == [0, 60, 130]


def test_outputs_are_contiguous_and_of_the_promised_dtypes(gdn):
    """o has the dtype of v, the state is FP32, gradients have the dtype and shape of their inputs."""
    case = base(70, 2, 4).with_(initial_state=states(base(1, 2, 4), 1)[0])
    results = run(gdn.rule, from_fused_projections(case))
    assert results["o"].is_contiguous()
    assert results["o"].dtype == case.v.dtype
    assert results["final_state"].dtype == torch.float32
    assert results["final_state"].is_contiguous()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        gradient = results["d" + name if name != "initial_state" else "d_initial_state"]
        assert (gradient.dtype, gradient.shape) == (getattr(case, name).dtype, getattr(case, name).shape), name
