"""The rule in the emulator, for every architecture: float64's results, every byte written, and no detector fires."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.errors import BuildError
from cake_shared.gdn.cuda.devices import ErrorWord
from cake_shared.gdn.cuda.rule import PreparedCall, RuleBackend, uses_native
from cake_shared.program import programs_of
from cake_shared.target import TARGETS
from cake_shared.testing import assert_bitwise_equal, assert_near, poisoned_allocations
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.gdn_cuda import assert_accurate, assert_fading_is_accurate, rule_through
from cake_shared.testing.gdn_inputs import base, fading, packed, states
from cake_shared.testing.gdn_reference import widened
from cake_shared.testing.gdn_run import run
from cake_shared.testing.gdn_waves import force_waves

ORDERS = (Options(order="eager"), Options(order="lazy"), Options(order="random", seed=1))

# The order of sums inside a product of the tensor cores is the emulator's own, so bits are compared within it alone.
LIMIT = 6e-3


@pytest.fixture(scope="module")
def emulated(gdn):
    """`emulated(architecture)`: the package in the emulator and its backend, made once an architecture."""
    made = {}

    def get(architecture):
        if architecture not in made:
            try:
                package = EmulatedPackage(gdn.name, architecture)
            except BuildError as error:
                pytest.skip(f"compilers are what this needs: {error}")
            word = ErrorWord(torch.zeros(1, dtype=torch.int32))
            made[architecture] = (
                package,
                RuleBackend(package.module, word, 132, lambda: 0, uses_native(gdn.name, architecture)),
            )
        return made[architecture]

    return get


def _with_states(case, sequences):
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


def _short_pack():
    return _with_states(packed(base(140, 1, 2), (70, 0, 66)), 3)


def _all_options():
    generator = torch.Generator().manual_seed(3)
    case = _with_states(base(70, 1, 2), 1).with_(d_state=None)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.3, -0.2]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    g, beta = (torch.randn(1, 70, 2, generator=generator) for _ in range(2))
    return case.with_(q=case.q * 3, k=case.k * 2, g=g, beta=beta, options=options)


CASES = {
    "pack": _short_pack,
    "options": _all_options,
    "strong decay": lambda: base(70, 1, 1, gate="Gqwen"),
    "three heads": lambda: base(70, 1, 3),
}


def _run_in(emulated, architecture, case, options, multiprocessors=132, wrt=None):
    package, backend = emulated(architecture)
    package.options, backend.multiprocessors = options, multiprocessors
    with package, poisoned_allocations():
        return run(rule_through("cake_gdn", backend), case, wrt=wrt)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", TARGETS)
def test_short_calls_under_every_order_of_completion(emulated, architecture, name):
    """Results are float64's and their bits the same, however asynchronous operations complete."""
    case = CASES[name]()
    first = None
    for options in ORDERS:
        results = _run_in(emulated, architecture, case, options)
        first = first or results
        for key, value in results.items():
            assert_bitwise_equal(value, first[key], key)
    assert_accurate(first, case, LIMIT)


@pytest.mark.parametrize("architecture", TARGETS)
def test_both_widths_of_the_chains_are_the_same_bits(emulated, architecture):
    """How many CTAs share a head's columns moves no bit."""
    case = _short_pack()
    narrow = _run_in(emulated, architecture, case, ORDERS[1], multiprocessors=1000)
    wide = _run_in(emulated, architecture, case, ORDERS[1], multiprocessors=1)
    for key, value in narrow.items():
        assert_bitwise_equal(wide[key], value, key)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", TARGETS)
def test_what_the_forward_keeps_moves_no_bit(emulated, architecture, name, monkeypatch):
    """The backward makes the groundwork again, with the bits of the forward's."""
    case = CASES[name]()
    kept = _run_in(emulated, architecture, case, ORDERS[1])
    forward = PreparedCall.forward
    monkeypatch.setattr(PreparedCall, "forward", lambda *arguments: (*forward(*arguments)[:3], None))
    for key, value in _run_in(emulated, architecture, case, ORDERS[1]).items():
        assert_bitwise_equal(value, kept[key], key)


# Sequences that are cut, that lie in one half and that are empty.
_WAVES_PACK = (900, 0, 300, 1, 64, 130, 1300)


@pytest.mark.parametrize("architecture", TARGETS)
def test_waves_move_no_bit(gdn, emulated, architecture, monkeypatch):
    """A native backward pass has one wave, or, were a small call worth it, waves of heads, of halves or of both."""
    native = uses_native(gdn.name, architecture)
    calls = [(base(70, 3, 3), ((2, 1, 2), (1, 1, 3)))]  # key heads, halves; how many waves
    if native:
        pack = _with_states(packed(base(sum(_WAVES_PACK), 1, 1, gate="G0"), _WAVES_PACK), len(_WAVES_PACK))
        calls += [(base(1100, 2, 2), ((1, 2, 4),)), (pack, ((1, 2, 2),))]
    package, _ = emulated(architecture)
    for case, ways in calls:
        one = _run_in(emulated, architecture, case, ORDERS[1])
        for key_heads, halves, waves in ways:
            with monkeypatch.context() as patch:
                force_waves(patch, key_heads, halves)
                results = _run_in(emulated, architecture, case, ORDERS[2])
            for key, value in results.items():
                assert_bitwise_equal(value, one[key], key)
            ran = [report.kernel for report in package.reports if report.kernel.startswith("token_gradients")]
            assert len(ran) == (waves if native else 1)


@pytest.mark.parametrize("used", [(5,), (0,), (0, 130, 0, 1)])
@pytest.mark.parametrize("architecture", TARGETS)
def test_waves_leave_nothing_unwritten(gdn, emulated, architecture, monkeypatch, used):
    """Rows past the last sequence and states of empty ones are written however the backward is cut, short packs' too.

    The later half of every segment of a short pack has no chunk at all.
    """
    case = _with_states(packed(base(sum(used) + 3, 2, 2), used), len(used))
    one = _run_in(emulated, architecture, case, ORDERS[1])
    for key_heads, halves in ((2, 2), (1, 2)) if uses_native(gdn.name, architecture) else ((1, 1),):
        with monkeypatch.context() as patch:
            force_waves(patch, key_heads, halves)
            for key, value in _run_in(emulated, architecture, case, ORDERS[2]).items():
                assert_bitwise_equal(value, one[key], key)
                assert value is None or bool(torch.isfinite(value).all()), key


@pytest.mark.parametrize("architecture", TARGETS)
def test_calls_without_a_token(emulated, architecture):
    """States are handed on, forward and backward, and no program begins before those that it needs are done."""
    for case, count in ((base(0, 1, 1, B=2), 2), (packed(base(0, 1, 1), (0, 0)), 2), (packed(base(0, 1, 1), (0,)), 1)):
        case = _with_states(case, count)
        for options in ORDERS:
            results = _run_in(emulated, architecture, case, options)
            assert_bitwise_equal(results["final_state"], case.initial_state, "final_state")
            assert_bitwise_equal(results["d_initial_state"], case.d_state, "d_initial_state")


@pytest.mark.parametrize(("gate", "limit_dv"), [("Gqwen", 2e-3), ("Gmild", 2.6e-3)])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_gradients_keep_what_bf16_operands_lose(gdn, emulated, architecture, gate, limit_dv):
    """Initial states' keep FP32's digits of their largest part; dv is rounded where it is stored, and little before."""
    case = _with_states(base(130, 1, 2, gate=gate), 1)
    results = _run_in(emulated, architecture, case, ORDERS[1])
    expected = run(gdn.rule, widened(case))
    for name, limit in (("d_initial_state", 8e-4), ("dv", limit_dv)):
        error = float((results[name].double() - expected[name]).norm() / expected[name].norm())
        assert error <= limit, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("gate", "limits"),
    [("Gqwen", {"dq": 2.5e-3, "dk": 2.6e-3, "dbeta": 1.8e-3}), ("Gmild", {"dk": 3.05e-3, "dbeta": 3e-3})],
)
def test_native_gradients_keep_the_digits_of_values(gdn, emulated, gate, limits):
    """What a token writes, divided by its beta, is its value where little is taken from it: one rounding less."""
    case = _with_states(base(130, 1, 2, gate=gate), 1)
    results = _run_in(emulated, "sm_90a", case, ORDERS[1])
    expected = run(gdn.rule, widened(case))
    for name, limit in limits.items():
        error = float((results[name].double() - expected[name]).norm() / expected[name].norm())
        assert error <= limit, f"{name}: {error:.2e}"


@pytest.mark.parametrize("architecture", TARGETS)
def test_betas_that_nothing_can_be_divided_by(gdn, emulated, architecture):
    """Of 0 and next to it: gradients are float64's, those of beta among them, which are not small."""
    case = base(100, 1, 2)
    beta = case.beta.clone()
    beta[:, ::3], beta[:, 1::9], beta[:, 80:, 1] = 0.0, 1e-30, 2.0**-39
    case = case.with_(beta=beta)
    results = _run_in(emulated, architecture, case, ORDERS[1])
    assert_accurate(results, case, LIMIT)
    expected = run(gdn.rule, widened(case))["dbeta"]
    for tokens in (slice(None, None, 3), slice(1, None, 9), slice(80, None)):
        error = (results["dbeta"][:, tokens] - expected[:, tokens]).norm() / expected[:, tokens].norm()
        assert float(error) <= 2 * LIMIT, f"{tokens}: {float(error):.2e}"


@pytest.mark.parametrize("architecture", TARGETS)
def test_gradients_of_small_betas(gdn, emulated, architecture):
    """Tokens that hardly write, between others, have gradients of beta as accurate as those of the others."""
    case = base(130, 1, 2)
    beta = case.beta.clone()
    for place, exponent in enumerate((-8, -10, -11, -16, -30)):
        beta[:, 2 + place :: 11] = 2.0**exponent
    case = case.with_(beta=beta)
    results = _run_in(emulated, architecture, case, ORDERS[1])["dbeta"]
    expected = run(gdn.rule, widened(case))["dbeta"]
    for place in range(11):
        error = (results[:, place::11] - expected[:, place::11]).norm() / expected[:, place::11].norm()
        assert float(error) <= LIMIT, f"{place}: {float(error):.2e}"


@pytest.mark.parametrize("architecture", TARGETS)
def test_betas_below_zero(gdn, emulated, architecture):
    """They write what they should, next to zero too, and so do the tokens between them."""
    case = base(100, 1, 2)
    beta = case.beta.clone()
    beta[:, ::5] *= -1.0
    beta[:, 7] = -1e-30
    case = case.with_(beta=beta)
    results = _run_in(emulated, architecture, case, ORDERS[1])
    assert_accurate(results, case, LIMIT)
    expected = run(gdn.rule, widened(case))["dbeta"][:, ::5]
    assert float((results["dbeta"][:, ::5] - expected).norm() / expected.norm()) <= 2 * LIMIT


@pytest.mark.parametrize("architecture", TARGETS)
def test_a_beta_that_nothing_can_be_divided_by_moves_no_other_row(emulated, architecture):
    """A token that reads, writes and gives nothing changes no bit of the others, whatever its beta."""
    case = base(100, 1, 2)
    rows = {name: getattr(case, name).clone() for name in ("q", "k", "v", "do", "beta")}
    for name in ("q", "k", "v", "do"):
        rows[name][:, 20] = 0.0
    case = case.with_(**rows)
    plain = _run_in(emulated, architecture, case, ORDERS[1])
    rows["beta"][:, 20] = 0.0
    deferred = _run_in(emulated, architecture, case.with_(beta=rows["beta"].clone()), ORDERS[1])
    for key, value in plain.items():
        assert_bitwise_equal(deferred[key], value, key)


def _closing(tokens, closed):
    """A head each, forgetting nothing but before its token of `closed`, where it forgets everything."""
    case = base(tokens, 1, len(closed), gate="G0")
    g = case.g.clone()
    for head, token in enumerate(closed):
        g[:, token, head] = -100.0
    return case.with_(g=g)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_nothing_comes_through_a_closed_gate(gdn, emulated, architecture):
    """What follows a gate of e^-100 is judged alone: it has float64's results however large the state before is.

    No gradient of what follows reaches a token before.
    """
    closed = (31, 32, 33)  # within a block of T and in its first two rows
    case = _closing(66, closed)
    h0, _ = states(case, 1)
    for size in (1e2, 1e4, 1e6, 1e12):
        large = case.with_(initial_state=h0 * size)
        results = _run_in(emulated, architecture, large, ORDERS[1], wrt=())
        right = run(gdn.rule, widened(large), wrt=())
        for head, token in enumerate(closed):
            after = {"o": (slice(None), slice(token, None), head), "final_state": (slice(None), head)}
            for key, part in after.items():
                assert_near(results[key][part], right[key][part], LIMIT, f"{key} of head {head}, size {size}")
    do = case.do.clone()
    for head, token in enumerate(closed):
        do[:, :token, head] = 0
    results = _run_in(emulated, architecture, case.with_(do=do, initial_state=h0), ORDERS[1])
    leaked = [results["dk"][:, : min(closed)], results["d_initial_state"]]
    for key, (head, token) in product(("dv", "dg", "dbeta"), enumerate(closed)):
        leaked.append(results[key][:, :token, head])
    assert max(float(x.abs().max()) for x in leaked) < 1e-40


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_a_token_of_beta_0_writes_nothing(emulated, architecture):
    """Its key's row of the state stays zero, and the state has the bits that it has where the sequence ends before."""
    case = base(70, 1, 2, gate="G0")
    beta, k = case.beta.clone(), case.k.clone()
    beta[:, 2::3] = 0.0
    k[:, 1::3] = k[:, 0::3][:, : k[:, 1::3].shape[1]]  # so that T loses something there
    k[..., 5] = 0.0
    k[:, 2::3] = torch.eye(128, dtype=k.dtype)[5]
    state = _run_in(emulated, architecture, case.with_(beta=beta, k=k), ORDERS[1], wrt=())["final_state"]
    assert not state[:, :, 5].any()
    assert state[:, :, :5].abs().amax(-1).min() > 0
    for tokens in (2, 17, 33):
        beta, k = case.beta.clone(), case.k.clone()
        beta[:, tokens:] = 0.0
        k[:, tokens - 1] = k[:, tokens - 2]
        longer = case.with_(beta=beta, k=k)
        results = [_run_in(emulated, architecture, x, ORDERS[1], wrt=()) for x in (longer, longer.tokens(0, tokens))]
        assert_bitwise_equal(results[0]["final_state"], results[1]["final_state"], f"the state after {tokens} tokens")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", TARGETS)
def test_a_forward_that_keeps_nothing_has_the_same_bits(emulated, architecture, name):
    """Without gradients wanted, the same programs run."""
    case = CASES[name]()
    kept = _run_in(emulated, architecture, case, ORDERS[1])
    alone = _run_in(emulated, architecture, case, ORDERS[1], wrt=())
    for key in ("o", "final_state"):
        assert_bitwise_equal(alone[key], kept[key], key)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_segments_whose_gates_forget_nothing(gdn, emulated, architecture):
    """Three segments without decay: the middle one's factor M is far from zero."""
    case = base(8193, 1, 1, gate="G0")
    results = _run_in(emulated, architecture, case, Options(order="lazy", detect="cheap", threads=2), wrt=())
    expected = run(gdn.rule, widened(case), wrt=())
    for key in ("o", "final_state"):
        error = float((results[key].double() - expected[key]).norm() / expected[key].norm())
        assert error <= LIMIT, f"{key}: {error:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "powers"), [(1e20, -98), (1e20, -102), (1.0, -98)])
def test_what_segments_forget_is_not_missed(gdn, emulated, size, powers):
    """Native programs count a state behind gates of 2^-100 as gone, and a gradient before them."""
    case = fading(size, powers)
    results = _run_in(emulated, "sm_90a", case, Options(order="lazy", detect="cheap", threads=2))
    assert_fading_is_accurate(gdn.rule, results, case)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TARGETS)
def test_a_long_sequence_runs_every_program_of_segments(gdn, emulated, architecture):
    """8193 tokens are three segments, the last of one token; with this, every program has run under every order."""
    case = base(8193, 1, 1)
    first = None
    for options in ORDERS:
        results = _run_in(emulated, architecture, case, replace(options, detect="cheap", threads=2))
        first = first or results
        for key, value in results.items():
            assert_bitwise_equal(value, first[key], key)
    expected = run(gdn.rule, widened(case))
    for key in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta"):
        error = float((results[key].double() - expected[key]).norm() / expected[key].norm())
        assert error <= LIMIT, f"{key}: {error:.2e}"
    package, _ = emulated(architecture)
    ran = {report.kernel for report in package.reports}
    program = {record.stage: record.program for record in programs_of(gdn.name).records_for(architecture)}
    assert {program[stage] for stage in ("segment_pairs", "segment_gradients", "segment_exits")} <= ran
    assert ran <= set(program.values())
