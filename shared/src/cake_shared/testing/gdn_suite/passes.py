"""The forward and the backward pass as functions of their own, without autograd."""

import pytest
import torch

from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_inputs import base, generator, packed, states
from cake_shared.testing.gdn_run import run

INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
NAMES = dict(zip(INPUTS, ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias")))


def full_case(lengths=(60, 70), **shape):
    """A pack in which everything optional is given."""
    case = packed(base(sum(lengths), 2, 4, **{"K": 32, "V": 48, **shape}), lengths)
    h0, ds = states(case, len(lengths))
    raw = torch.randn(case.g.shape, generator=generator(3))
    options = {
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-1, 1, 4),
        "dt_bias": torch.linspace(0, 1, 4),
        "use_qk_l2norm_in_kernel": True,
    }
    return case.with_(initial_state=h0, d_state=ds, g=raw, options=options)


def both_passes(module, case, needs=None):
    """Outputs and gradients by the separate passes, under the names that `run` uses."""
    tensors = (case.q, case.k, case.v, case.g, case.beta, case.scale)
    keywords = {"initial_state": case.initial_state, "cu_seqlens": case.cu_seqlens, **case.options}
    o, final_state, saved = module.chunk_gated_delta_rule_fwd(*tensors, output_final_state=True, **keywords)
    grads = module.chunk_gated_delta_rule_bwd(case.do, case.d_state, saved, *tensors, needs=needs, **keywords)
    results = {NAMES[name]: getattr(grads, name) for name in INPUTS}
    return {"o": o, "final_state": final_state, **results}


@pytest.mark.parametrize("lengths", [(60, 70), (8300, 20)], ids=("short", "several segments"))
def test_the_passes_are_what_autograd_runs(gdn, lengths):
    """Both passes by hand give the results of the differentiable function, also where states are saved."""
    case = full_case(lengths, K=16, V=16)
    results, expected = both_passes(gdn.module, case), run(gdn.rule, case)
    for name, value in expected.items():
        gdn.same(results[name], value, name)


@pytest.mark.parametrize("wanted", INPUTS)
def test_the_backward_pass_gives_what_is_needed(gdn, wanted):
    """`needs` names the gradients that are computed; the others are None and move nothing."""
    case = full_case()
    module = gdn.module
    full = both_passes(module, case)
    part = both_passes(module, case, module.Needs(*[name == wanted for name in INPUTS]))
    for name in INPUTS:
        if name == wanted:
            gdn.same(part[NAMES[name]], full[NAMES[name]], NAMES[name])
        else:
            assert part[NAMES[name]] is None, name


def test_without_options_their_gradients_are_none(gdn):
    """Inputs that were not given have no gradient."""
    case = base(70, 2, 4, K=32, V=32)
    results = both_passes(gdn.module, case)
    assert all(results[name] is None for name in ("d_initial_state", "dA_log", "ddt_bias"))
    expected = run(gdn.rule, case)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta"):
        gdn.same(results[name], expected[name], name)


def test_the_passes_record_nothing(gdn):
    """Outputs of the separate passes carry no autograd history, whatever the inputs ask for."""
    case = base(70, 2, 4, K=32, V=32)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    o, final_state, saved = gdn.module.chunk_gated_delta_rule_fwd(*leaves, output_final_state=True)
    assert not o.requires_grad
    assert not final_state.requires_grad
    grads = gdn.module.chunk_gated_delta_rule_bwd(case.do, None, saved, *leaves)
    assert not any(x.requires_grad for x in grads if x is not None)


def test_a_gradient_of_nothing_is_zero(gdn):
    """Neither an output's nor a state's gradient: all gradients are zeros."""
    case = full_case()
    results = both_passes(gdn.module, case.with_(do=None, d_state=None))
    for name in NAMES.values():
        assert not bool(results[name].any()), name


def test_the_final_state_only_on_request(gdn):
    """Without `output_final_state` the forward pass returns None for it and the same output."""
    case = full_case()
    keywords = {"initial_state": case.initial_state, "cu_seqlens": case.cu_seqlens, **case.options}
    tensors = (case.q, case.k, case.v, case.g, case.beta, case.scale)
    o, final_state, _ = gdn.module.chunk_gated_delta_rule_fwd(*tensors, **keywords)
    assert final_state is None
    assert_bitwise_equal(o, gdn.module.chunk_gated_delta_rule_fwd(*tensors, output_final_state=True, **keywords)[0])


def test_a_long_sequence_needs_the_saved_states(gdn):
    """Without saved states a sequence of several segments gives the gradients of v and h0, and for others an error."""
    case = base(8200, 1, 1, K=8, V=8)
    module, tensors = gdn.module, (case.q, case.k, case.v, case.g, case.beta)
    saved = module.chunk_gated_delta_rule_fwd(*tensors)[2]
    bare = module.chunk_gated_delta_rule_fwd(*tensors, save_states=False)[2]
    expected = module.chunk_gated_delta_rule_bwd(case.do, None, saved, *tensors)
    only_v = module.Needs(False, False, True, False, False, False, False, False)
    gdn.same(module.chunk_gated_delta_rule_bwd(case.do, None, bare, *tensors, needs=only_v).v, expected.v, "dv")
    with pytest.raises(ValueError, match="saved: got no states, takes those of the 2 segments"):
        module.chunk_gated_delta_rule_bwd(case.do, None, bare, *tensors)
    other = type(saved)(saved.entry_states[:-1])
    with pytest.raises(ValueError, match="saved: got 129 elements, takes the 130"):
        module.chunk_gated_delta_rule_bwd(case.do, None, other, *tensors)
    packed_case = packed(case, (8000, 200))
    shorter = module.chunk_gated_delta_rule_fwd(*tensors, cu_seqlens=packed_case.cu_seqlens, save_states=False)[2]
    grads = module.chunk_gated_delta_rule_bwd(case.do, None, shorter, *tensors, cu_seqlens=packed_case.cu_seqlens)
    assert grads.q.isfinite().all(), "no sequence of this pack has several segments"
