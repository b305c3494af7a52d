"""Known faults of other kernels as small inputs with right answers: on a GPU, and in the emulator where they fit."""

from itertools import product

import pytest
import torch

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared.emulator import Options
from cake_shared.errors import BuildError
from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
from cake_shared.testing import assert_bitwise_equal, assert_near, poisoned_allocations
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.gdn_cuda import BF16_LIMIT, assert_accurate, moved, on_cpu, rule_through
from cake_shared.testing.gdn_inputs import base, generator, packed, states
from cake_shared.testing.gdn_reference import reference
from cake_shared.testing.gdn_run import run

TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
RESULTS = (*TOKEN_RESULTS, "final_state", "d_initial_state")
SATURATED = 0.99966466  # sigmoid(8)
NEARLY_ONE = 0.998  # rounding it to BF16 loses the most of all betas near 1


class OnGpu:
    """Runs cases through the public function on the current GPU."""

    small = False

    def run(self, case, **keywords):
        with poisoned_allocations():
            return on_cpu(run(chunk_gated_delta_rule, moved(case, "cuda"), **keywords))


class InEmulator:
    """Runs cases through the same host chain with the kernels emulated; smaller ones, to fit."""

    small = True

    def __init__(self, architecture):
        self.package = EmulatedPackage(cuda.PACKAGE, architecture, Options(order="lazy"))
        word = cuda.ErrorWord(torch.zeros(1, dtype=torch.int32))
        native = uses_native(cuda.PACKAGE, architecture)
        self.rule = rule_through(cuda.PACKAGE, RuleBackend(self.package.module, word, 132, lambda: 0, native))

    def run(self, case, **keywords):
        with self.package, poisoned_allocations():
            return run(self.rule, case, **keywords)


GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EMULATED = ("emulated-sm_90a", "emulated-sm_100a")


@pytest.fixture(scope="module", params=[GPU, *EMULATED])
def place(request):
    if request.param == "gpu":
        return OnGpu()
    try:
        return InEmulator(request.param.split("-")[1])
    except BuildError as error:
        return pytest.skip(f"compilers are what this needs: {error}")


def sizes(names, *, gpu, emulated):
    """Parametrises `place` together with others: the values for a GPU, and those that fit in the emulator."""

    def rows(values):
        return [value if isinstance(value, tuple) else (value,) for value in values]

    taken = [pytest.param("gpu", *row, marks=pytest.mark.gpu) for row in rows(gpu)]
    taken += [(where, *row) for where in EMULATED for row in rows(emulated)]
    return pytest.mark.parametrize(("place", *names.split(",")), taken, indirect=["place"])


def with_states(case, sequences):
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


def test_U01_gate_gradient_under_strong_decay(place):
    """dg of every head keeps its digits at any decay; a first token's is about 0, without a state or with zeros."""
    case = base(70, 1, 2, gate="Gqwen") if place.small else base(256, 4, 8, gate="Gqwen")
    heads = case.g.shape[2]
    results, expected = place.run(case), reference(case)
    for head in range(heads):
        assert_near(results["dg"][..., head], expected["dg"][..., head], 1e-2, f"dg of head {head}")
    zeros = place.run(case.with_(initial_state=torch.zeros(1, heads, 128, 128)), wrt=("g",))
    for dg in (results["dg"][:, 0], zeros["dg"][:, 0]):
        assert float(dg.abs().max()) <= 1e-6 * float(expected["dg"].abs().max())


@sizes("tokens", gpu=[256, 70], emulated=[70])
def test_U01_gate_parameters_under_strong_decay(place, tokens):
    """dA_log and ddt_bias head by head, over the norm of the tokens' terms: their sum may be far smaller."""
    heads, values = (1, 2) if place.small else (4, 8)
    case = base(tokens, heads, values)
    strength = torch.arange(1, values + 1) * (16.0 / values)
    raw = torch.randn(case.g.shape, generator=generator(3))
    options = {"use_gate_in_kernel": True, "A_log": strength.log(), "dt_bias": torch.ones(values)}
    results, expected = place.run(case.with_(g=raw, options=options)), reference(case.with_(g=raw, options=options))
    z = raw.double() + 1.0
    dg = reference(case.with_(g=-strength * torch.nn.functional.softplus(z)))["dg"]
    terms = {
        "dA_log": dg * strength * torch.nn.functional.softplus(z),
        "ddt_bias": dg * strength * torch.sigmoid(z),
    }
    for name, summands in terms.items():
        scale = summands.norm(dim=(0, 1))
        error = (results[name].double() - expected[name]).abs()
        assert bool((error <= 1e-2 * scale).all()), f"{name}: {error / scale}"


def test_U02_tiny_decay_gives_no_nan(place):
    case = with_states(base(70, 1, 1, gate="Gtiny") if place.small else base(192, 2, 2, gate="Gtiny"), 1)
    assert_accurate(place.run(case), case)


@sizes("tokens", gpu=[7, 50, 64, 65, 1024], emulated=[7, 65])
def test_U04_gates_of_one_without_drift(place, tokens):
    """The gated rule with gates of one is the delta rule: the recurrence in float64, also for its last tokens."""
    heads = 1 if place.small else 2
    for gate in ("G0", "G0.5"):
        case = with_states(base(tokens, heads, heads, gate=gate), 1)
        results = place.run(case)
        assert_accurate(results, case, 6e-3)
        right = reference(case)["o"]
        assert_near(results["o"][:, -64:], right[:, -64:], 6e-3, "the last tokens of o")


def one_key(tokens, beta, gate, period=None):
    case = base(tokens, 1, 2)
    k = torch.zeros_like(case.k)
    k[..., 5] = 1.0
    v = case.v if period is None else case.v[:, torch.arange(tokens) % period]
    return case.with_(k=k, v=v, beta=torch.full_like(case.beta, beta), g=torch.full_like(case.g, gate))


@sizes(
    "tokens,gate,beta,period",
    gpu=list(product((128, 16384), (0.0, -1e-3), (1.0, SATURATED, NEARLY_ONE), (None, 16))),
    emulated=[(128, 0.0, 1.0, None), (128, -1e-3, SATURATED, 16), (128, 0.0, NEARLY_ONE, None)],
)
def test_U05_identical_keys_have_a_tame_inverse(place, tokens, gate, beta, period):
    """o follows the scalar recurrence of the only live row, u = exp(g) (1 - beta) u + beta v, and not worse with T.

    With beta just below 1, T = (I + A)^-1 has one large diagonal, whose rounding to BF16 would meet every later token.
    """
    case = one_key(tokens, beta, gate, period)
    results = place.run(case, output_final_state=False)
    decay = float(torch.tensor(gate).double().exp()) * (1.0 - float(case.beta[0, 0, 0].double()))
    v, u = case.v.double() * case.beta.double()[..., None], torch.zeros_like(case.v[:, 0].double())
    right = torch.empty_like(v)
    for t in range(tokens):
        u = decay * u + v[:, t]
        right[:, t] = u
    right *= case.scale * case.q[..., 5].double()[..., None]
    assert_near(results["o"], right, 5e-2, "o")
    assert_near(results["o"][:, -64:], right[:, -64:], 5e-2, "the last tokens of o")
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert bool(torch.isfinite(results[name]).all()), name


@pytest.mark.parametrize("gate", ["G0", "Gmild"])
def test_U06_beta_up_to_two(place, gate):
    """Nothing is clamped to 1, and dbeta is right above 1."""
    case = base(66, 1, 2, gate=gate) if place.small else base(200, 2, 6, gate=gate)
    beta = 2.0 * torch.rand(case.beta.shape, generator=generator(11))
    case = case.with_(beta=beta)
    results = place.run(case)
    assert_accurate(results, case, 1e-2)
    assert_near(results["dbeta"][beta > 1.0], reference(case)["dbeta"][beta > 1.0], 1e-2, "dbeta above 1")


@sizes("tokens", gpu=[64, 128, 256], emulated=[64])
def test_U10_each_gradient_alone(place, tokens):
    case = with_states(base(tokens, 1, 1), 1)
    everything = place.run(case)
    assert_accurate(everything, case)
    wanted = {"dq": "q", "dk": "k", "dv": "v", "dg": "g", "dbeta": "beta", "d_initial_state": "initial_state"}
    for name, argument in wanted.items():
        alone = place.run(case, wrt=(argument,))
        assert_bitwise_equal(alone[name], everything[name], f"{name} alone")
        assert all(alone[other] is None for other in wanted if other != name)


@sizes("tokens", gpu=[1, 63, 65, 127, 1500], emulated=[1, 63, 65])
def test_U12_tail_chunk_of_a_batch_beside_nan(place, tokens):
    """Rows past the end of an unpacked call are NaN in the buffer that its tensors are cut from."""
    case = base(tokens, 1, 2)
    cut = {}
    for name in ("q", "k", "v", "g", "beta", "do"):
        x = getattr(case, name)
        buffer = torch.full((1, tokens + 70, *x.shape[2:]), float("nan"), dtype=x.dtype)
        buffer[:, :tokens] = x
        cut[name] = buffer[:, :tokens]
    expected = place.run(case)
    assert_accurate(expected, case)
    # `moved` keeps strides and not what lies between: on a GPU the buffers are moved whole.
    results = place.run(case.with_(**cut)) if place.small else _cut_on_gpu(case, tokens)
    for name in RESULTS:
        assert_bitwise_equal(results[name], expected[name], name)


def _cut_on_gpu(case, tokens):
    cut = {}
    for name in ("q", "k", "v", "g", "beta", "do"):
        x = getattr(case, name)
        buffer = torch.full((1, tokens + 70, *x.shape[2:]), float("nan"), dtype=x.dtype, device="cuda")
        buffer[:, :tokens] = x.cuda()
        cut[name] = buffer[:, :tokens]
    return on_cpu(run(chunk_gated_delta_rule, case.with_(**cut)))


def test_U12_a_call_in_another_dtype_between(place):
    """FP32 gates, BF16 gates, FP32 gates in one process: the third call is the first."""
    case = base(66, 1, 2)
    first = place.run(case)
    between = place.run(case.with_(g=case.g.bfloat16()))
    assert between["dg"].dtype is torch.bfloat16
    again = place.run(case)
    for name in RESULTS:
        assert_bitwise_equal(again[name], first[name], name)


def test_U16_empty_sequences_change_nothing(place):
    """cu = [0, 0, 5, 5, 70, 70]: the others bit for bit as without the empty ones, whose states pass through."""
    case = with_states(packed(base(70, 1, 2), (0, 5, 0, 65, 0)), 5)
    results = place.run(case)
    kept = [1, 3]
    without = packed(case.with_(initial_state=case.initial_state[kept], d_state=case.d_state[kept]), (5, 65))
    expected = place.run(without)
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name], expected[name], name)
    for name, passed in (("final_state", case.initial_state), ("d_initial_state", case.d_state)):
        assert_bitwise_equal(results[name][kept], expected[name], name)
        for empty in (0, 2, 4):
            assert_bitwise_equal(results[name][empty], passed[empty], f"{name} of an empty sequence")


def test_U16_nothing_but_empty_sequences(place):
    case = with_states(packed(base(0, 1, 2), (0, 0, 0)), 3)
    results = place.run(case)
    assert_bitwise_equal(results["final_state"], case.initial_state, "final_state")
    assert_bitwise_equal(results["d_initial_state"], case.d_state, "d_initial_state")
    assert results["o"].shape == (1, 0, 2, 128)


def test_U20_no_state_leaks_between_packed_sequences(place):
    lengths = (33, 64, 95)
    case = with_states(packed(base(sum(lengths), 1, 2), lengths), 3)
    results = place.run(case)
    start = 0
    for n, length in enumerate(lengths):
        one = case.tokens(start, start + length)
        alone = place.run(one.with_(initial_state=case.initial_state[n : n + 1], d_state=case.d_state[n : n + 1]))
        for name in TOKEN_RESULTS:
            assert_bitwise_equal(results[name][:, start : start + length], alone[name], f"{name} of sequence {n}")
        for name in ("final_state", "d_initial_state"):
            assert_bitwise_equal(results[name][n : n + 1], alone[name], f"{name} of sequence {n}")
        start += length


@pytest.mark.parametrize("do_layout", ["expanded", "slice", "transposed"])
def test_U25_U26_views_are_the_bits_of_copies(place, do_layout):
    """Interleaved gates and betas, q, k, v cut from one projection, and cotangents of any layout."""
    case = base(66, 1, 3)
    fused = torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], -1)
    q, k, v = (x.unflatten(-1, (-1, 128)) for x in fused.split([128, 128, 3 * 128], -1))
    both = torch.stack([case.g, case.beta], -1).flatten(-2)
    if do_layout == "expanded":
        do = torch.ones((), dtype=torch.bfloat16).expand(case.v.shape)
    elif do_layout == "slice":
        wide = torch.cat([case.do.flatten(2), torch.ones(1, 66, 96).bfloat16()], -1)
        do = wide[..., : 3 * 128].unflatten(-1, (3, 128))
    else:
        do = case.do.transpose(1, 2).contiguous().transpose(1, 2)
    views = case.with_(q=q, k=k, v=v, g=both[..., 0::2], beta=both[..., 1::2], do=do)
    results, expected = place.run(views), place.run(case.with_(do=do.contiguous()))
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name], expected[name], name)


@sizes("heads,sequences", gpu=[(1, 1), (16, 40)], emulated=[(1, 1)])
def test_U33_bits_are_stable_in_one_cta_and_in_an_oversubscribed_grid(place, heads, sequences):
    """T = 65: a second chunk of one token follows at once; races between copies and products would show here first."""
    case = with_states(packed(base(65 * sequences, heads, 2 * heads), (65,) * sequences), sequences)
    if place.small:
        assert_accurate(place.run(case), case, BF16_LIMIT)
        return
    on_gpu = moved(case, "cuda")
    first = run(chunk_gated_delta_rule, on_gpu)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(100):
        results = run(chunk_gated_delta_rule, on_gpu)
        for name in RESULTS:
            a, b = (x[name].contiguous().flatten().view(torch.uint8) for x in (results, first))
            same &= (a == b).all()
    assert bool(same)
