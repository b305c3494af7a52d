"""Accuracy against float64 in the regimes that broke other kernels, and closed forms that need no oracle."""

import pytest
import torch
import torch.nn.functional as F

from cake_shared.testing import assert_near, relative_l2
from cake_shared.testing.gdn_inputs import base, gates, generator, states
from cake_shared.testing.gdn_reference import check_against_reference, limit, reference
from cake_shared.testing.gdn_run import run

DTYPES = (torch.float32, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
by_gate = pytest.mark.parametrize("gate", ["G0", "G0.5", "Gmild", "Gqwen", "Gtiny", "Gspike0", "Gspike31", "Gspike63"])
by_beta = pytest.mark.parametrize("beta", ["b0", "b1", "b2", "brand", "bsat"])


def one_key_case(tokens, dtype, beta, gate, period=None):
    """A case whose key is the same basis vector everywhere, so that only one row of the state is ever alive."""
    case = base(tokens, 1, 2, dtype=dtype)
    k = torch.zeros_like(case.k)
    k[..., 5] = 1.0
    v = case.v if period is None else case.v[:, torch.arange(tokens) % period]
    return case.with_(k=k, v=v, beta=torch.full_like(case.beta, beta), g=torch.full_like(case.g, gate))


def one_key_outputs(case):
    """Closed form of `one_key_case`: u_t = exp(g) (1 - beta) u_{t-1} + beta v_t, o_t = scale q_t[5] u_t, S = k u^T."""
    v, q = case.v[0].double(), case.q[0, :, 0, 5].double()
    keep = ((1 - case.beta[0].double()) * case.g[0].double().exp())[..., None]
    write = case.beta[0].double()[..., None] * v
    u, rows = torch.zeros_like(v[0]), []
    for t in range(len(v)):
        u = keep[t] * u + write[t]
        rows.append(u)
    return (case.scale * q[:, None, None] * torch.stack(rows))[None], u


@by_gate
@by_beta
def test_every_gate_and_beta_regime(gdn, gate, beta):
    """FP32 results and gradients agree with float64 under each pair of regimes, states included."""
    case = base(150, 1, 2, K=32, V=32, gate=gate, beta=beta, dtype=torch.float32)
    h0, ds = states(case, 1)
    check_against_reference(gdn.rule, case.with_(initial_state=h0, d_state=ds))


@by_dtype
@pytest.mark.parametrize("tokens", [256, 70])
def test_U01_gate_gradient_under_strong_decay(gdn, tokens, dtype):
    """The gate's gradient keeps its digits for every strength of a Qwen-style decay, head by head."""
    case = base(tokens, 4, 8, gate="Gqwen", dtype=dtype)
    expected = check_against_reference(gdn.rule, case)
    results = run(gdn.rule, case)
    for head in range(8):
        assert_near(results["dg"][..., head], expected["dg"][..., head], 1e-4, f"dg of head {head}")
    zeros = case.with_(initial_state=torch.zeros(1, 8, 128, 128))
    first = run(gdn.rule, zeros, wrt=("g",))["dg"][:, 0]
    for dg in (results["dg"][:, 0], first):
        assert float(dg.abs().max()) <= 1e-7 * float(expected["dg"].abs().max())


@pytest.mark.parametrize("tokens", [256, 70])
def test_U01_gate_parameters_under_strong_decay(gdn, tokens):
    """dA_log and ddt_bias, sums of the gate's gradient over tokens, agree head by head."""
    case = base(tokens, 4, 8, dtype=torch.float32)
    raw = torch.randn(case.g.shape, generator=generator(3))
    strength = torch.arange(1, 9) * 2.0
    options = {"use_gate_in_kernel": True, "A_log": strength.log(), "dt_bias": torch.ones(8)}
    case = case.with_(g=raw, options=options)
    results, expected = run(gdn.rule, case), reference(case)
    inner = case.with_(g=gates("G0", case.g.shape) - strength * F.softplus(raw + 1.0), options={})
    assert_near(results["o"], reference(inner)["o"], 1e-5, "o with the gate computed outside")
    for name in ("dA_log", "ddt_bias"):
        for head in range(8):
            assert_near(results[name][head : head + 1], expected[name][head : head + 1], 1e-4, f"{name}[{head}]")


@by_dtype
def test_U02_tiny_decay_gives_no_nan(gdn, dtype):
    """Gates of -26 (cumulated -1664 in a chunk) stay finite and equal to the recurrence, with an initial state."""
    case = base(192, 2, 2, gate="Gtiny", dtype=dtype)
    h0, ds = states(case, 1)
    check_against_reference(gdn.rule, case.with_(initial_state=h0, d_state=ds))


def ungated_delta_rule(q, k, v, g, beta, scale, *, output_final_state, cu_seqlens, initial_state):
    """The delta rule without any gate, token by token; a gate argument is taken and must not matter."""
    state, rows = initial_state, []
    ratio = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(ratio, 2) for x in (q, k))
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state


@by_dtype
@pytest.mark.parametrize("tokens", [7, 50, 64, 65, 1024])
def test_U04_gates_of_one_equal_the_ungated_rule(gdn, tokens, dtype):
    """With all gates zero the result is that of the ungated delta rule, at every length and without drift."""
    case = base(tokens, 2, 2, K=64, V=64, gate="G0", dtype=dtype)
    h0, ds = states(case, 1)
    case = case.with_(initial_state=h0, d_state=ds)
    wide = {name: getattr(case, name).double() for name in ("q", "k", "v", "g", "beta", "initial_state", "d_state")}
    expected = run(ungated_delta_rule, case.with_(**wide, do=case.do.double()), wrt=set(wide) - {"g"})
    results = run(gdn.rule, case)
    for name in ("o", "final_state", "dq", "dk", "dv", "dbeta", "d_initial_state"):
        accuracy = limit(dtype) if results[name].dtype == dtype else 1e-5
        assert_near(results[name], expected[name], accuracy, name)
        if name in ("o", "dv"):
            assert_near(results[name][:, -64:], expected[name][:, -64:], accuracy, f"the last tokens of {name}")


@pytest.mark.parametrize("tokens", [7, 64, 65, 500])
def test_U04_interleaved_gates_of_one(gdn, tokens):
    """A seeded half of the gates exactly zero: outputs and every gradient as in float64."""
    check_against_reference(gdn.rule, base(tokens, 2, 2, K=64, V=64, gate="G0.5", dtype=torch.float32))


@by_dtype
@pytest.mark.parametrize("tokens", [128, 16384])
@pytest.mark.parametrize("gate", [0.0, -1e-3])
@pytest.mark.parametrize("beta", [1.0, 0.99966466])
@pytest.mark.parametrize("period", [None, 16])
def test_U05_identical_keys_have_a_tame_inverse(gdn, tokens, dtype, gate, beta, period):
    """CF1 and its saturated form: one key everywhere; finite, exact to rounding, no growth with the length."""
    case = one_key_case(tokens, dtype, beta, gate, period)
    o, u = one_key_outputs(case)
    results = run(gdn.rule, case)
    assert_near(results["o"], o, limit(dtype), "o")
    assert_near(results["o"][:, -64:], o[:, -64:], limit(dtype), "the last tokens of o")
    assert_near(results["final_state"][0, :, 5], u, 2e-6, "the live row of the state")
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert bool(torch.isfinite(results[name]).all()), name


def test_U05_identical_keys_have_right_gradients(gdn):
    """One key everywhere, beta saturated: each gradient as in float64."""
    check_against_reference(gdn.rule, one_key_case(128, torch.float32, 0.99966466, -1e-3))


@by_dtype
def test_CF1_one_key_returns_its_latest_value(gdn, dtype):
    """One unit key, beta 1, any gate: the state is k v_t^T and o_t = scale (q_t . k) v_t."""
    case = one_key_case(200, dtype, 1.0, 0.0)
    case = case.with_(g=gates("Gmild", case.g.shape))
    results = run(gdn.rule, case)
    expected = case.scale * case.q[..., 5:6].double() * case.v.double()
    assert_near(results["o"], expected, limit(dtype), "o")
    assert_near(results["final_state"][0, :, 5], case.v[0, -1], 2e-6, "the live row of the state")
    assert float(results["final_state"][0, :, :5].abs().max()) == 0.0


@by_dtype
@pytest.mark.parametrize("tokens", [127, 128, 200])
def test_CF2_U06_beta_two_alternates(gdn, tokens, dtype):
    """One unit key, beta 2, no decay, constant v: the state is 2 k v^T, 0, 2 k v^T, 0 and so on."""
    case = one_key_case(tokens, dtype, 2.0, 0.0, period=1)
    results = run(gdn.rule, case)
    alive = (torch.arange(tokens) % 2 == 0)[None, :, None, None].double()
    expected = case.scale * case.q[..., 5:6].double() * 2.0 * case.v.double() * alive
    assert_near(results["o"], expected, limit(dtype), "o")
    assert_near(results["final_state"][0, :, 5], 2.0 * case.v[0, 0] * (tokens % 2), 2e-6, "the live row of the state")


@by_dtype
@pytest.mark.parametrize("gate", ["G0", "Gmild"])
def test_U06_beta_up_to_two(gdn, gate, dtype):
    """Beta anywhere in [0, 2]: nothing is clamped to 1, and its gradient is right above 1."""
    case = base(200, 2, 6, gate=gate, dtype=dtype)
    beta = 2.0 * torch.rand(case.beta.shape, generator=generator(11))
    case = case.with_(beta=beta)
    expected = check_against_reference(gdn.rule, case)
    above = beta > 1.0
    assert_near(run(gdn.rule, case)["dbeta"][above], expected["dbeta"][above], 1e-5, "dbeta above 1")


@by_dtype
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_U10_each_gradient_alone(gdn, tokens, dtype):
    """Every gradient is right when it is the only one asked for."""
    case = base(tokens, 1, 1, dtype=dtype)
    h0, ds = states(case, 1)
    case = case.with_(initial_state=h0, d_state=ds)
    expected = check_against_reference(gdn.rule, case)
    for name, argument in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dg", "g"), ("dbeta", "beta")):
        alone = run(gdn.rule, case, wrt=(argument,))
        assert_near(alone[name], expected[name], limit(dtype) if name in ("dq", "dk", "dv") else 1e-4, name)
        assert all(alone[other] is None for other in ("dq", "dk", "dv", "dg", "dbeta") if other != name)


@pytest.mark.parametrize("key_dim", [16, 32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("value_dim", [64, 96, 128, 256])
def test_U14_every_head_dim(gdn, key_dim, value_dim):
    """Head dims other than 128 are right on the CPU, keys and values apart."""
    case = base(70, 1, 2, K=key_dim, V=value_dim, dtype=torch.float32)
    h0, ds = states(case, 1)
    check_against_reference(gdn.rule, case.with_(initial_state=h0, d_state=ds))


@pytest.mark.parametrize(("norm", "overflows"), [(4.0, True), (1.0, False), (0.125, False)])
def test_U15_unnormalised_keys_are_as_finite_as_the_recurrence(gdn, norm, overflows):
    """Keys that are not unit vectors overflow exactly where the recurrence in FP32 range does, and not before."""
    case = base(64, 1, 1)
    k = torch.randn(case.k.shape, generator=generator(5)) * norm
    case = case.with_(k=k.bfloat16())
    results, expected = run(gdn.rule, case, wrt=()), reference(case, wrt=())
    for name in ("o", "final_state"):
        assert bool(torch.isfinite(expected[name].float()).all()) != overflows
        assert bool(torch.isfinite(results[name]).all()) != overflows, name
        if not overflows:
            assert relative_l2(results[name], expected[name]) < 1e-2, name


@by_dtype
def test_CF3_sequences_of_length_one(gdn, dtype):
    """All sequences of length 1: o_t = scale beta_t (q_t . k_t) v_t, each final state beta_t k_t v_t^T."""
    case = base(40, 2, 4, dtype=dtype)
    case = case.with_(cu_seqlens=torch.arange(41))
    results = run(gdn.rule, case)
    q, k = (x[0].double().repeat_interleave(2, 1) for x in (case.q, case.k))
    write = case.beta[0].double()[..., None] * case.v[0].double()
    assert_near(results["o"][0], case.scale * (q * k).sum(-1, keepdim=True) * write, limit(dtype), "o")
    assert_near(results["final_state"], torch.einsum("thk,thv->thkv", k, write), 2e-6, "final_state")


@by_dtype
def test_CF4_orthogonal_keys_accumulate(gdn, dtype):
    """Keys e_0 .. e_127, beta 1, no decay: o_t = scale * sum over s <= t of q_t[s] v_s, and the state is v itself."""
    case = base(128, 1, 2, gate="G0", beta="b1", dtype=dtype)
    case = case.with_(k=torch.eye(128).to(dtype)[None, :, None])
    results = run(gdn.rule, case)
    weights = case.q[0, :, 0].double().tril()
    expected = case.scale * torch.einsum("ts,shv->thv", weights, case.v[0].double())
    assert_near(results["o"][0], expected, limit(dtype), "o")
    assert_near(results["final_state"][0], case.v[0].transpose(0, 1), 2e-6, "final_state")
