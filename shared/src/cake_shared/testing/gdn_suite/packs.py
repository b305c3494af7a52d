"""Packed sequences: empty ones, tails, longer buffers, many sequences, neighbours, malformed offsets."""

import pytest
import torch

from cake_shared.testing import assert_bitwise_equal, assert_near, leave_nan_blocks, relative_l2
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_reference import check_against_reference, check_near, reference
from cake_shared.testing.gdn_run import run

TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")


def rows(results, start, stop, names=TOKEN_RESULTS):
    """Tokens [start, stop) of every result that has a token axis."""
    return {name: results[name][:, start:stop] for name in names}


@pytest.mark.parametrize("tokens", [1, 63, 65, 127, 1500])
def test_U12_tail_of_a_plain_call(gdn, tokens):
    """A ragged length ignores what lies behind it in memory and equals the same tokens inside a longer run."""
    longer = base(tokens + 70, 1, 2, K=64, V=64, dtype=torch.float32)
    silent = longer.with_(do=torch.where(torch.arange(tokens + 70)[None, :, None, None] < tokens, longer.do, 0.0))
    inside = run(gdn.rule, silent)
    cut = longer.tokens(0, tokens)
    poisoned = {}
    for name in ("q", "k", "v", "g", "beta", "do"):
        buffer = torch.full_like(getattr(longer, name), float("nan"))
        buffer[:, :tokens] = getattr(cut, name)
        poisoned[name] = buffer[:, :tokens]
    results = run(gdn.rule, cut.with_(**poisoned))
    for name in TOKEN_RESULTS:
        assert_near(results[name], inside[name][:, :tokens], 4e-6, name)


def test_U12_gate_dtype_is_part_of_every_cache(gdn):
    """FP32 gates, then BF16 gates, then FP32 again in one process: the third call has the bits of the first."""
    case = base(70, 2, 4, K=64, V=64)
    half = case.with_(g=case.g.bfloat16(), beta=case.beta.bfloat16())
    first = run(gdn.rule, case)
    between = run(gdn.rule, half)
    third = run(gdn.rule, case)
    assert between["dg"].dtype == between["dbeta"].dtype == torch.bfloat16
    for name, value in first.items():
        assert_bitwise_equal(third[name], value, name)
    check_near(between, reference(half), names=("o", "dq", "dk", "dv", "dbeta"))


def test_U16_empty_sequences_change_nothing(gdn):
    """Empty sequences in the pack: the others keep their bits; an empty one hands states through."""
    case = base(70, 2, 4, K=64, V=64)
    with_empty = packed(case, (0, 5, 0, 65, 0))
    h0, ds = states(case, 5)
    with_empty = with_empty.with_(initial_state=h0, d_state=ds)
    results = run(gdn.rule, with_empty)
    full = [1, 3]
    without = run(gdn.rule, packed(case, (5, 65)).with_(initial_state=h0[full], d_state=ds[full]))
    gdn.all_same(results, without, TOKEN_RESULTS)
    for name in ("final_state", "d_initial_state"):
        gdn.same(results[name][full], without[name], name)
    for n in (0, 2, 4):
        assert_bitwise_equal(results["final_state"][n], h0[n], "final state of an empty sequence")
        assert_bitwise_equal(results["d_initial_state"][n], ds[n], "initial state's gradient of an empty sequence")
    bare = run(gdn.rule, with_empty.with_(initial_state=None))
    assert float(bare["final_state"][[0, 2, 4]].abs().max()) == 0.0


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0]], ids=("two empty sequences", "no sequence"))
def test_U16_a_pack_without_tokens(gdn, offsets):
    """No token at all: outputs are empty, states pass through, gradients exist."""
    case = base(1, 2, 4, K=64, V=64).tokens(0, 0).with_(cu_seqlens=torch.tensor(offsets))
    h0, ds = states(case, len(offsets) - 1)
    results = run(gdn.rule, case.with_(initial_state=h0, d_state=ds))
    assert results["o"].shape == case.v.shape
    assert_bitwise_equal(results["final_state"], h0, "final_state")
    assert_bitwise_equal(results["d_initial_state"], ds, "d_initial_state")
    for name, like in (("dq", case.q), ("dk", case.k), ("dv", case.v), ("dg", case.g), ("dbeta", case.beta)):
        assert results[name].shape == like.shape, name


@pytest.mark.parametrize("lengths", [(100, 90), (64, 64), (0,), (3, 0, 61)])
@pytest.mark.parametrize("rest", [1.0, float("nan")], ids=("numbers", "nan"))
def test_U18_rows_beyond_the_pack_are_zero(gdn, lengths, rest):
    """Rows beyond the last offset of a longer buffer are written, with zeros, in the output and in every gradient."""
    case = packed(base(256, 2, 4, K=64, V=64), lengths)
    end = sum(lengths)
    spoiled = {name: getattr(case, name).clone() for name in ("q", "k", "v", "g", "beta", "do")}
    for x in spoiled.values():
        x[:, end:] *= rest
    shapes = [getattr(case, name).shape for name in spoiled]
    leave_nan_blocks([*shapes, (len(lengths), 4, 64, 64)])
    results = run(gdn.rule, case.with_(**spoiled))
    alone = run(gdn.rule, packed(case.tokens(0, end), lengths))
    for name in TOKEN_RESULTS:
        assert float(results[name][:, end:].abs().max()) == 0.0, name
        gdn.same(results[name][:, :end], alone[name], name)
    weight_gradient = torch.einsum("td,te->de", torch.randn(256, 8), results["dq"][0].flatten(1).float())
    assert bool(torch.isfinite(weight_gradient).all())


def test_U19_thousands_of_short_sequences(gdn):
    """2731 sequences of 1 to 3 tokens on 24 value heads, forward and backward."""
    count = 2731
    lengths = torch.arange(count) % 3 + 1
    case = packed(base(int(lengths.sum()), 8, 24, K=16, V=16, dtype=torch.float32), lengths.tolist())
    results = run(gdn.rule, case)
    starts = case.cu_seqlens[:-1]
    for length in (1, 2, 3):
        chosen = (lengths == length).nonzero()[:, 0]
        chosen = torch.cat([chosen[:50], chosen[-50:]])
        index = starts[chosen][:, None] + torch.arange(length)
        batch = {name: getattr(case, name)[0, index] for name in ("q", "k", "v", "g", "beta", "do")}
        expected = reference(case.with_(cu_seqlens=None, **batch))
        check_near({name: results[name][0, index] for name in TOKEN_RESULTS}, expected, (*TOKEN_RESULTS[:4], "dbeta"))
        assert_near(results["final_state"][chosen], expected["final_state"], 2e-6, "final_state")


def test_U19_seventy_thousand_single_tokens(gdn):
    """70000 sequences of one token on one head equal the closed form, and so do their gradients."""
    count = 70000
    case = base(count, 1, 1, K=16, V=16, dtype=torch.float32).with_(cu_seqlens=torch.arange(count + 1))
    results = run(gdn.rule, case, output_final_state=False)
    q, k, v, beta = (x[0].double().requires_grad_() for x in (case.q, case.k, case.v, case.beta))
    o = case.scale * (q * k).sum(-1, keepdim=True) * beta[..., None] * v
    o.backward(case.do[0].double())
    for name, expected in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad), ("dbeta", beta.grad)):
        assert_near(results[name][0], expected, 2e-6, name)
    assert float(results["dg"].abs().max()) == 0.0


@pytest.mark.parametrize("gate", ["Gmild", "Gqwen"])
def test_U20_packed_equals_alone(gdn, gate):
    """Three sequences packed once, and each alone: outputs, states and every gradient of a sample are the same."""
    lengths = (33, 64, 95)
    case = base(sum(lengths), 2, 4, gate=gate)
    h0, ds = states(case, 3)
    together = run(gdn.rule, packed(case, lengths).with_(initial_state=h0, d_state=ds))
    start = 0
    for n, length in enumerate(lengths):
        one = case.tokens(start, start + length).with_(initial_state=h0[n : n + 1], d_state=ds[n : n + 1])
        alone = run(gdn.rule, one)
        gdn.all_same(rows(together, start, start + length), alone, TOKEN_RESULTS)
        for name in ("final_state", "d_initial_state"):
            gdn.same(together[name][n : n + 1], alone[name], name)
        start += length


def test_U22_offsets_of_both_integer_types(gdn):
    """int32 and int64 offsets give identical bits, and are not written."""
    case = base(130, 2, 4, K=64, V=64)
    wide = packed(case, (60, 0, 70), torch.int64)
    narrow = packed(case, (60, 0, 70), torch.int32)
    expected, results = run(gdn.rule, wide), run(gdn.rule, narrow)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)
    assert narrow.cu_seqlens.tolist() == wide.cu_seqlens.tolist() == [0, 60, 60, 130]


@pytest.mark.parametrize(
    ("offsets", "got"),
    [
        ([0, 70, 60, 128], "60"),
        ([0, 64, 129], "129"),
        ([1, 64, 128], "1"),
        ([0, -5, 128], "-5"),
    ],
    ids=("decreasing", "beyond T", "not from zero", "negative"),
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_U22_malformed_offsets_raise(gdn, offsets, got, dtype):
    """Offsets on the CPU are checked before anything runs; the message names them and what was found."""
    case = base(128, 1, 2, K=16, V=16).with_(cu_seqlens=torch.tensor(offsets, dtype=dtype))
    with pytest.raises(ValueError, match=rf"cu_seqlens.*{got}"):
        run(gdn.rule, case)


def test_sequences_keep_their_numbers(gdn):
    """A ragged pack with states agrees with float64, every result on its own."""
    case = packed(base(300, 2, 6, K=32, V=48, dtype=torch.float32), (1, 64, 0, 63, 65, 100))
    h0, ds = states(case, 6)
    check_against_reference(gdn.rule, case.with_(initial_state=h0, d_state=ds))


def test_batch_rows_are_sequences(gdn):
    """A batch [B, T] agrees with float64, states included."""
    case = base(70, 2, 4, K=32, V=32, B=3, dtype=torch.float32)
    h0, ds = states(case, 3)
    check_against_reference(gdn.rule, case.with_(initial_state=h0, d_state=ds))


@pytest.mark.parametrize("cut", [4096, 5000])
def test_a_long_sequence_is_its_parts_joined_by_their_states(gdn, cut):
    """A sequence that is cut into segments equals two shorter calls, joined by a differentiable state."""
    tokens = 12300
    case = base(tokens, 1, 2, K=16, V=16, dtype=torch.float32)
    h0, ds = states(case, 1)
    # Gates so mild that the state of one segment still matters in the next but one.
    case = case.with_(g=case.g * 0.01, initial_state=h0, d_state=ds)

    def joined(q, k, v, g, beta, scale, *, initial_state, **keywords):
        outputs, state = [], initial_state
        for part in (slice(0, cut), slice(cut, cut + 4000), slice(cut + 4000, tokens)):
            pieces = (x[:, part] for x in (q, k, v, g, beta))
            o, state = gdn.rule(*pieces, scale, initial_state=state, output_final_state=True)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    results, expected = run(gdn.rule, case), run(joined, case)
    for name, value in expected.items():
        if value is not None:
            assert_near(results[name], value, 1e-5 if name == "dg" else 4e-6, name)
    silent = run(gdn.rule, case.with_(initial_state=None))
    assert relative_l2(silent["o"][:, 9000:], results["o"][:, 9000:]) < 1.0
    assert not torch.equal(silent["o"][:, 5000:], results["o"][:, 5000:]), (
        "the first state must reach the later segments"
    )
