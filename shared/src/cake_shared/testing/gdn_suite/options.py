"""Options of the rule against formulas written out here, and random shapes and packs against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule
from cake_shared.testing import assert_bitwise_equal, assert_near
from cake_shared.testing.gdn_inputs import BETAS, GATES, base, generator, packed, states
from cake_shared.testing.gdn_reference import check_against_reference, check_near, reference, widened
from cake_shared.testing.gdn_run import run


def written_out(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    *,
    initial_state=None,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    **rest,
):
    """The options as plain formulas in front of the recurrence without options."""
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_gate_in_kernel:
        g = -A_log.exp() * F.softplus(g if dt_bias is None else g + dt_bias)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = ref_chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state=initial_state, **rest)
    return o, state.transpose(-1, -2) if state_v_first and state is not None else state


def raw_case(dtype, tokens=140, **shape):
    """Raw projections: q and k of any norm, gate and beta before their activations, with states and two sequences."""
    case = base(tokens, 2, 4, dtype=dtype, **{"K": 32, "V": 48, **shape})
    h0, ds = states(case, 2)
    rng = generator(21)
    changes = {name: torch.randn(getattr(case, name).shape, generator=rng) for name in ("q", "k", "g", "beta")}
    changes["q"], changes["k"] = changes["q"].to(dtype), changes["k"].to(dtype)
    return packed(case.with_(**changes), (60, tokens - 60)).with_(initial_state=h0, d_state=ds)


PARAMETERS = {"A_log": torch.linspace(-2.0, 2.0, 4), "dt_bias": torch.linspace(-3.0, 1.0, 4)}
OPTIONS = {
    "l2norm and sigmoid": {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    "negative eigenvalues": {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    },
    "gate": {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, **PARAMETERS},
    "gate without bias": {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": PARAMETERS["A_log"],
    },
    "all": {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        **PARAMETERS,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
    },
}


def activated(case, options):
    """The case with whatever the options do not activate already inside its valid range."""
    g = case.g if options.get("use_gate_in_kernel") else F.logsigmoid(case.g)
    beta = case.beta if options.get("use_beta_sigmoid_in_kernel") else case.beta.sigmoid()
    if options.get("state_v_first"):
        case = case.with_(initial_state=case.initial_state.mT.contiguous(), d_state=case.d_state.mT.contiguous())
    return case.with_(g=g, beta=beta, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_their_formulas(gdn, name, dtype):
    """Each option, and all together, against the formula applied outside, with gradients for every input."""
    case = activated(raw_case(dtype), OPTIONS[name])
    results, expected = run(gdn.rule, case), run(written_out, widened(case))
    assert {n for n, x in results.items() if x is None} == {n for n, x in expected.items() if x is None}
    # A float32 activation in front of the rule costs a few more roundings than the rule alone.
    for result, value in expected.items():
        if value is not None:
            limit = 2.5e-3 if results[result].dtype == torch.bfloat16 else 1e-5
            assert_near(results[result], value, limit, result)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_oracle_has_the_same_options(name):
    """The float64 oracle with options equals the same formulas: two ways to say one thing."""
    case = activated(raw_case(torch.float32), OPTIONS[name])
    expected, results = run(written_out, widened(case)), reference(case)
    for result, value in expected.items():
        if value is not None:
            assert_near(results[result], value, 1e-12, result)


def test_states_with_values_first_are_the_transpose(gdn):
    """`state_v_first` moves no bit: states and their gradients are those of the other layout, transposed."""
    case = packed(base(140, 2, 4, K=32, V=48), (60, 80))
    h0, ds = states(case, 2)
    expected = run(gdn.rule, case.with_(initial_state=h0, d_state=ds))
    flipped = case.with_(initial_state=h0.mT.contiguous(), d_state=ds.mT.contiguous())
    results = run(gdn.rule, flipped, state_v_first=True)
    for name, value in expected.items():
        transposed = name in ("final_state", "d_initial_state")
        assert_bitwise_equal(results[name], value.mT if transposed else value, name)


def test_default_scale(gdn):
    """Without a scale it is K ** -0.5."""
    case = base(70, 2, 4, K=64, V=32)
    expected = run(gdn.rule, case)
    results = run(gdn.rule, case.with_(scale=None))
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)
    doubled = run(gdn.rule, case.with_(scale=0.25, d_state=None))
    assert_near(doubled["o"], expected["o"] * 2, 1e-6, "o with twice the scale")


def test_float64_on_the_cpu(gdn):
    """FP64 inputs are computed in FP64 or FP32, at least as well as FP32 ones; their outputs are FP64."""
    case = widened(base(140, 2, 4, K=32, V=32)).with_(g=base(140, 2, 4).g, beta=base(140, 2, 4).beta)
    results = run(gdn.rule, case)
    assert results["o"].dtype == results["dq"].dtype == torch.float64
    check_near(results, reference(case), ("o", "dq", "dk", "dv", "dbeta", "final_state"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_negative_and_positive_zero_gates(gdn, dtype):
    """-0.0 and +0.0 as gates are the same gate."""
    case = base(70, 1, 2, K=32, V=32, gate="G0", dtype=dtype)
    results, expected = run(gdn.rule, case.with_(g=-case.g)), run(gdn.rule, case)
    for name, value in expected.items():
        if value is not None:
            assert_near(results[name], value, 0.0, name)


def test_gates_beyond_every_exponent(gdn):
    """Gates of -1e6, and minus infinity's neighbourhood, reset the state and leave everything else exact."""
    case = base(200, 1, 2, K=32, V=32, dtype=torch.float32)
    g = case.g.clone()
    g[:, 3], g[:, 64], g[:, 150] = -1e6, -3e38, -1e6
    check_against_reference(gdn.rule, case.with_(g=g))


@pytest.mark.parametrize("size", [1e20, 1e-3, 3e38])
def test_normalisation_of_rows_of_any_size(gdn, size):
    """A row whose sum of squares overflows FP32 is normalised like any other, next to rows that do not."""
    case = base(70, 1, 2, K=32, V=32, dtype=torch.float32)
    q, k = case.q.clone(), case.k.clone()
    q[:, 5:40] *= 1 / q[:, 5:40].abs().amax(-1, keepdim=True)
    q[:, 5:40] *= size
    k[:, 9:50] *= 1 / k[:, 9:50].abs().amax(-1, keepdim=True)
    k[:, 9:50] *= size
    case = case.with_(q=q, k=k, options={"use_qk_l2norm_in_kernel": True})
    results, expected = run(gdn.rule, case), run(written_out, widened(case))
    for name in ("o", "final_state", "dv", "dg", "dbeta"):
        assert_near(results[name], expected[name], 1e-5, name)
    for name, rows in (("dq", slice(5, 40)), ("dk", slice(9, 50))):
        scaled = [x[name][:, rows].double() * size for x in (results, expected)]
        assert_near(*scaled, 1e-5 if size < 1e30 else 1e-2, f"{name}, subnormal at the largest size")


@pytest.mark.parametrize(("A_log", "raw"), [(1000.0, 1.0), (3e38, 0.0), (1000.0, -1000.0), (88.0, -700.0), (5.0, 3e38)])
def test_gate_parameters_of_any_size_give_finite_results(gdn, A_log, raw):
    """Rates beyond every exponent: the decay is zero or one, and no gradient is infinity times zero."""
    case = base(70, 1, 2, K=32, V=32, dtype=torch.float32)
    options = {"use_gate_in_kernel": True, "A_log": torch.full((2,), A_log), "dt_bias": torch.zeros(2)}
    results = run(gdn.rule, case.with_(g=torch.full_like(case.g, raw), options=options))
    assert all(x.isfinite().all() for x in results.values() if x is not None)
    assert results["dA_log"].shape == results["ddt_bias"].shape == (2,)


def test_a_strong_gate_spoils_no_mild_neighbour(gdn):
    """After one gate of -1e6 the differences of mild cumulative gates keep their digits."""
    case = base(64, 1, 2, K=32, V=32, dtype=torch.float32)
    g = torch.full_like(case.g, -0.01)
    g[:, 0] = -1e6
    check_against_reference(gdn.rule, case.with_(g=g))


suite_settings = settings(max_examples=20, suppress_health_check=list(HealthCheck))
lengths_of_packs = st.lists(
    st.one_of(st.integers(0, 5), st.integers(60, 68), st.integers(120, 135)), min_size=1, max_size=5
)


@suite_settings
@given(
    lengths=lengths_of_packs,
    rest=st.integers(0, 70),
    key_heads=st.integers(1, 3),
    ratio=st.integers(1, 3),
    key_dim=st.sampled_from((1, 8, 16, 24)),
    value_dim=st.sampled_from((1, 8, 16, 40)),
    gate=st.sampled_from(GATES),
    beta=st.sampled_from(BETAS),
    seed=st.integers(0, 9),
)
def test_random_packs_against_float64(gdn, lengths, rest, key_heads, ratio, key_dim, value_dim, gate, beta, seed):
    """Any pack, any head ratio, any dims, any regime: all results against the recurrence, zeros beyond the pack."""
    total = sum(lengths)
    case = base(
        total + rest,
        key_heads,
        key_heads * ratio,
        K=key_dim,
        V=value_dim,
        gate=gate,
        beta=beta,
        seed=seed,
        dtype=torch.float32,
    )
    h0, ds = states(case, len(lengths), seed)
    case = packed(case, lengths).with_(initial_state=h0, d_state=ds)
    check_against_reference(gdn.rule, case)
    results = run(gdn.rule, case)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not bool(results[name][:, total:].any()), name


@suite_settings
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(0, 140),
    options=st.sampled_from(sorted(OPTIONS)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    gate_dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 9),
)
def test_random_batches_against_float64(gdn, batch, tokens, options, dtype, gate_dtype, seed):
    """Any batch and length, options and dtypes: results at the rounding of their dtypes."""
    case = base(tokens, 2, 4, K=16, V=24, B=batch, seed=seed, dtype=dtype)
    h0, ds = states(case, batch, seed)
    case = activated(case.with_(initial_state=h0, d_state=ds), OPTIONS[options])
    case = case.with_(g=case.g.to(gate_dtype), beta=case.beta.to(gate_dtype))
    results, expected = run(gdn.rule, case), reference(case)
    for name, value in expected.items():
        if value is not None:
            # Few and small elements: the rounding of one of them is all of the error.
            limit = 4e-3 if results[name].dtype == torch.bfloat16 else 2e-5
            assert_near(results[name], value, limit, name)
