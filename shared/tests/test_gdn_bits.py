"""On the CPU the bits of a sequence and value head depend on nothing but the sequence and its heads."""

import itertools
from dataclasses import replace

import pytest
import torch

from cake_shared.gdn.intra import GATE_FLOOR
from cake_shared.gdn.options import Options
from cake_shared.gdn.products import add_product, product
from cake_shared.gdn.prologue import _sigmoid, _softplus
from cake_shared.plan import WorkBudget
from cake_shared.testing.gdn_core import call, make_inputs

ALL = Options(0.2, qk_l2norm=True, gate=True, beta_sigmoid=True)
ROWS = ("o", "q", "k", "v", "g", "beta")
STATES = ("final", "initial_state")


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Run with this many threads: boundaries between threads move with the size of the pack."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sequence(case, place):
    """The call of one sequence alone, cut out of a pack."""
    inputs, options, d_out, d_final = case
    first, last = inputs.cu_seqlens[place : place + 2].tolist()
    cut = {name: getattr(inputs, name)[:, first:last] for name in ("q", "k", "v", "g", "beta")}
    one = slice(place, place + 1)
    alone = replace(inputs, cu_seqlens=None, initial_state=inputs.initial_state[one], **cut)
    return alone, options, d_out[:, first:last], d_final[one]


def heads_of(case, first, count, ratio):
    """The call with only some key heads and their value heads."""
    inputs, options, d_out, d_final = case
    keys, values = slice(first, first + count), slice(first * ratio, (first + count) * ratio)
    cut = {name: getattr(inputs, name)[:, :, keys] for name in ("q", "k")}
    cut |= {name: getattr(inputs, name)[:, :, values] for name in ("v", "g", "beta")}
    cut |= {n: getattr(inputs, n)[values] for n in ("A_log", "dt_bias") if getattr(inputs, n) is not None}
    return (
        replace(inputs, initial_state=inputs.initial_state[:, values], **cut),
        options,
        d_out[:, :, values],
        d_final[:, values],
    )


def assert_same(part, whole, names, index=...):
    for name in names:
        assert torch.equal(part[name], whole[name][index]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [None, ALL], ids=["plain", "options"])
def test_a_sequence_has_the_same_bits_alone_and_anywhere(threads, dtype, options):
    """Each sequence of a pack against itself alone: no neighbour, place, padding or batch size moves a bit."""
    lengths = [130, 1, 64, 0, 16, 63, 200, 17]
    case = make_inputs(lengths, 2, 2, 24, 16, dtype=dtype, options=options, rest=11)
    case[0].initial_state = case[0].initial_state.float() if dtype is torch.bfloat16 else case[0].initial_state
    whole = call(*case)
    for place, (first, last) in enumerate(itertools.pairwise(case[0].cu_seqlens.tolist())):
        if first == last:
            continue
        part = call(*sequence(case, place))
        assert_same(part, whole, ROWS, (slice(None), slice(first, last)))
        assert_same(part, whole, STATES, slice(place, place + 1))
    for name in ROWS:
        assert not bool(whole[name][:, sum(lengths) :].any()), name


def test_batch_and_pack_have_the_same_bits():
    """`[B, T]` against packed `[1, B * T]`."""
    inputs, options, d_out, d_final = make_inputs([150], 2, 2, 32, 32, batch=4)
    flat = {n: getattr(inputs, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta")}
    packed = replace(inputs, cu_seqlens=torch.arange(5) * 150, **flat)
    whole = call(packed, options, d_out.flatten(0, 1)[None], d_final)
    part = call(inputs, options, d_out, d_final)
    whole = {name: x.view(4, 150, *x.shape[2:]) if name in ROWS else x for name, x in whole.items()}
    assert_same(part, whole, ROWS)
    assert_same(part, whole, STATES)


@pytest.mark.parametrize("ratio", [1, 3])
def test_heads_have_the_same_bits_without_the_others(ratio):
    """A rank of tensor parallelism that holds some key heads gets the bits of the whole model."""
    case = make_inputs([70, 300, 9], 4, ratio, 32, 32, options=ALL)
    whole = call(*case)
    for first, count in ((0, 1), (1, 2), (3, 1)):
        part = call(*heads_of(case, first, count, ratio))
        keys, values = slice(first, first + count), slice(first * ratio, (first + count) * ratio)
        assert_same(part, whole, ("q", "k"), (slice(None), slice(None), keys))
        assert_same(part, whole, ("o", "v", "g", "beta"), (slice(None), slice(None), values))
        assert_same(part, whole, STATES, (slice(None), values))
        assert_same(part, whole, ("A_log", "dt_bias"), values)


def test_value_heads_do_not_feel_the_size_of_their_group():
    """o, states, dv, dg and dbeta of a value head are those that it has with a key head of its own."""
    inputs, options, d_out, d_final = make_inputs([200], 2, 3, 32, 32)
    own = replace(inputs, **{n: getattr(inputs, n).repeat_interleave(3, 2) for n in ("q", "k")})
    grouped, single = call(inputs, options, d_out, d_final), call(own, options, d_out, d_final)
    assert_same(grouped, single, ("o", "v", "g", "beta", *STATES))


@pytest.mark.parametrize(("wave", "group"), [(1, 1), (60_000, 200_000), (1 << 30, 1 << 30)])
def test_work_batches_move_no_bit(wave, group):
    """However the work is batched, the bits stay; among the sequences some of several segments."""
    case = make_inputs([8200, 100, 1, 33, 8193, 700], 2, 2, 16, 16, options=ALL)
    whole = call(*case)
    part = call(*case, budget=WorkBudget(wave, group))
    assert_same(part, whole, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elementwise_functions_do_not_feel_position_or_size(threads, dtype):
    """The trap of vectorised bodies and scalar tails: the same number must give the same bits anywhere in a buffer."""
    x = (torch.randn(1 << 17, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4).clamp(min=GATE_FLOOR)
    functions = {
        "exp": torch.exp,
        "log1p": lambda x: torch.log1p(x.abs()),
        "rsqrt": lambda x: (x * x).add(1e-6).rsqrt(),
        "sigmoid": lambda x: _sigmoid(x.clone()),
        "softplus": _softplus,
        "reciprocal": lambda x: x.reciprocal(),
        "addcmul": lambda x: torch.addcmul(x, x, x * 3),
    }
    for name, function in functions.items():
        whole = function(x)
        for start, size in itertools.product((0, 1, 7, 40000), (1, 3, 15, 16, 17, 33, 64, 100, 4097)):
            part = function(x[start : start + size].clone())
            assert torch.equal(part, whole[start : start + size]), (name, start, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(64, 128, 128), (64, 64, 128), (64, 16, 64), (16, 16, 16), (128, 64, 128), (64, 112, 80), (64, 256, 256)]
)
def test_products_do_not_feel_the_batch(threads, dtype, shape):
    """A matrix of a batch has the same bits alone and among others, whatever operand is transposed."""
    rows, inner, columns = shape
    rng = torch.Generator().manual_seed(0)
    for left, right in itertools.product((False, True), (False, True)):
        a = (
            torch.randn(20, inner, rows, generator=rng, dtype=dtype).mT
            if left
            else torch.randn(20, rows, inner, dtype=dtype)
        )
        b = (
            torch.randn(20, columns, inner, generator=rng, dtype=dtype).mT
            if right
            else torch.randn(20, inner, columns, dtype=dtype)
        )
        c = torch.randn(20, rows, columns, generator=rng, dtype=dtype)
        whole, added = product(a, b), add_product(c.clone(), a, b, -1.0)
        for first, count in ((0, 1), (3, 1), (19, 1), (2, 2), (5, 3), (1, 7)):
            mine = slice(first, first + count)
            assert torch.equal(product(a[mine], b[mine]), whole[mine])
            assert torch.equal(add_product(c[mine].clone(), a[mine], b[mine], -1.0), added[mine])


def test_sums_do_not_feel_the_batch(threads):
    """Row sums and chunk sums of tiles have the same bits alone and among others."""
    x = torch.randn(90, 4, 64, 48, generator=torch.Generator().manual_seed(0))
    for dims in (-1, -2, (-1, -2)):
        whole = x.sum(dims)
        for first, count, heads in itertools.product((0, 5), (1, 2, 7), (1, 3, 4)):
            part = x[first : first + count, :heads].contiguous().sum(dims)
            assert torch.equal(part, whole[first : first + count, :heads]), dims
