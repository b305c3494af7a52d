"""The chunked passes against the token recurrence in float64, every output and gradient on its own."""

import pytest
import torch

from cake_shared.gdn.intra import unit_lower_inverse
from cake_shared.gdn.options import Options
from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule
from cake_shared.testing.gdn_core import call, call_oracle, make_inputs, relative
from cake_shared.testing.gdn_gate_scale import gate_summands
from cake_shared.testing.gdn_inputs import BETAS, GATES, base, gates

ALL = Options(0.2, qk_l2norm=True, gate=True, beta_sigmoid=True, neg_eigval=True, state_v_first=True)


def check(case, limit):
    results, right = call(*case), call_oracle(*case)
    assert set(results) == set(right)
    errors = {name: relative(results[name], right[name]) for name in right}
    # A parameter's gradient is one sum over all tokens, whose terms cancel.
    slack = {"A_log": 5.0, "dt_bias": 5.0}
    bad = {name: f"{e:.1e}" for name, e in errors.items() if not e <= limit * slack.get(name, 1.0)}
    assert not bad, f"relative L2 errors beyond {limit}: {bad}"


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 70, 127, 128, 200])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_equations_hold_to_float64(tokens, ratio):
    """In FP64 nothing but rounding is left: a wrong term of any equation shows."""
    check(make_inputs([tokens], 2, ratio, 12, 20, dtype=torch.float64, seed=tokens), 1e-13)


@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_options_hold_to_float64(tokens):
    """The same with every option on, their derivatives included."""
    check(make_inputs([tokens], 2, 2, 16, 8, dtype=torch.float64, options=ALL), 1e-13)


def test_batch_and_pack_hold_to_float64():
    """Rows of a batch, and a pack with empty, short and long sequences and unused rows behind."""
    check(make_inputs([100], 1, 2, 16, 16, dtype=torch.float64, batch=3, options=ALL), 1e-13)
    check(make_inputs([0, 5, 0, 70, 1, 16, 17, 130, 0], 1, 2, 16, 16, dtype=torch.float64, rest=9, options=ALL), 1e-13)


def test_a_sequence_of_several_segments_holds_to_float64():
    """Beyond 8192 tokens the backward pass starts from saved entry states; beside it shorter sequences."""
    check(make_inputs([8193, 40], 1, 1, 4, 4, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 70, 200])
def test_single_precision(tokens, ratio):
    """FP32 inputs: every result within 2e-6."""
    check(make_inputs([tokens], 2, ratio, 128, 128, seed=tokens), 2e-6)
    check(make_inputs([tokens], 1, ratio, 32, 48, seed=tokens, options=ALL), 2e-6)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta", BETAS)
def test_regimes_in_single_precision(gate, beta):
    """Every gate and beta regime at 2e-6; dg, head by head, against the scale of its summands."""
    case = base(135, 2, 4, K=64, V=64, gate=gate, beta=beta, dtype=torch.float32)
    inputs, options, d_out, d_final = make_inputs([135], 2, 2, 64, 64)
    for name in ("q", "k", "v", "g", "beta"):
        setattr(inputs, name, getattr(case, name))
    inputs.initial_state = None
    results, right = call(inputs, options, d_out, d_final), call_oracle(inputs, options, d_out, d_final)
    assert all(bool(x.isfinite().all()) for x in results.values())
    for name in ("o", "final", "q", "k", "v", "beta"):
        assert relative(results[name], right[name]) <= 2e-6, name
    scale = gate_summands(case.with_(do=d_out, d_state=d_final, scale=options.scale))[1]
    error = (results["g"].double() - right["g"]).flatten(0, 1).norm(dim=0)
    assert (error <= 2e-6 * scale.flatten(0, 1).norm(dim=0)).all(), error


def test_half_precision_is_rounded_once():
    """BF16 in and out: the result is that of FP32 arithmetic on the same values, rounded."""
    narrow = make_inputs([150], 1, 2, 32, 32, dtype=torch.bfloat16)
    inputs, _, _, d_final = make_inputs([150], 1, 2, 32, 32)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        setattr(inputs, name, getattr(narrow[0], name).float())
    narrow[0].initial_state = inputs.initial_state
    wide = call(inputs, narrow[1], narrow[2].float(), d_final)
    for name, x in call(*narrow[:3], d_final).items():
        assert torch.equal(x, wide[name].to(x.dtype)), name


@pytest.mark.parametrize("gate", ["G0", "Gmild"])
@pytest.mark.parametrize("top", [1.0, 2.0])
def test_chunk_inverse_of_identical_keys(gate, top):
    """Identical keys and beta up to 2: the inverse is tame and stays at rounding level."""
    b = gates(gate, (64, 3)).T.double().cumsum(-1)
    a = (top * (b[:, :, None] - b[:, None, :]).exp()).tril(-1).float()
    right = torch.linalg.inv(a.double() + torch.eye(64, dtype=torch.float64))
    assert relative(unit_lower_inverse(a), right) < 2e-6


def test_oracle_by_hand():
    """The recurrence itself on two tokens of one-dimensional heads, worked out by hand."""
    one = torch.ones(1, 2, 1, 1)
    g = torch.full((1, 2, 1), 0.5).log()
    o, state = ref_chunk_gated_delta_rule(
        one, one, 3.0 * one, g, torch.full((1, 2, 1), 0.5), 2.0, output_final_state=True
    )
    # S1 = 0.5 * 3; S2 = 0.5 * (S1 - 0.5 * S1) + 1.5
    torch.testing.assert_close(o.flatten(), torch.tensor([3.0, 3.75], dtype=torch.float64))
    torch.testing.assert_close(state.flatten(), torch.tensor([1.875], dtype=torch.float64))
