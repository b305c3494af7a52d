"""Pieces of sequences as affine maps of the state: they compose to what the whole sequence does."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cake_shared.gdn.options import Options
from cake_shared.gdn.segments import StateMap, backward_constants, forward_maps
from cake_shared.testing.gdn_core import call, make_inputs, relative

OPTIONS = [Options(0.2), Options(0.2, qk_l2norm=True, gate=True, beta_sigmoid=True)]


def piece(inputs, first, last):
    cut = {n: getattr(inputs, n)[:, first:last] for n in ("q", "k", "v", "g", "beta")}
    return replace(inputs, cu_seqlens=None, initial_state=None, **cut)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "options"])
@pytest.mark.parametrize("cuts", [(0, 100, 300), (0, 64, 128, 300), (0, 1, 300), (0, 8200, 8300)])
def test_pieces_compose_to_the_sequence(options, cuts):
    """Forward and backward, for cuts at chunk boundaries and elsewhere, and a piece of several segments."""
    inputs, options, d_out, d_final = make_inputs([cuts[-1]], 1, 2, 12, 20, dtype=torch.float64, options=options)
    whole = call(inputs, options, d_out, d_final)
    pieces = list(pairwise(cuts))
    maps = [forward_maps(piece(inputs, a, b), options) for a, b in pieces]
    state = inputs.initial_state
    for one in maps:
        state = one(state)
    assert relative(state, whole["final"]) < 1e-13
    total = maps[0]
    for one in maps[1:]:
        total = total.then(one)
    assert relative(total(inputs.initial_state), whole["final"]) < 1e-13
    grad = d_final
    for (a, b), one in reversed(list(zip(pieces, maps))):
        constant = backward_constants(piece(inputs, a, b), options, d_out[:, a:b], 20)
        grad = StateMap(one.linear.mT, constant)(grad)
    assert relative(grad, whole["initial_state"]) < 1e-13


def test_a_run_from_the_composed_state_is_the_sequence():
    """The second piece, run from the first one's map, gives the outputs that the whole sequence has there."""
    inputs, options, d_out, d_final = make_inputs([300], 1, 2, 16, 16, dtype=torch.float64)
    whole = call(inputs, options, d_out, d_final)
    state = forward_maps(piece(inputs, 0, 128), options)(inputs.initial_state)
    rest = replace(piece(inputs, 128, 300), initial_state=state)
    part = call(rest, options, d_out[:, 128:], d_final)
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert relative(part[name], whole[name][:, 128:]) < 1e-13, name


def test_packs_have_a_map_for_each_sequence():
    """Empty sequences are the identity; the others are what they are alone."""
    inputs, options, d_out, _ = make_inputs([0, 40, 130], 1, 2, 16, 16, dtype=torch.float64)
    maps, constants = forward_maps(inputs, options), backward_constants(inputs, options, d_out, 16)
    assert torch.equal(maps.linear[0], torch.eye(16, dtype=torch.float64).expand(2, 16, 16))
    assert not bool(maps.constant[0].any())
    assert not bool(constants[0].any())
    alone = forward_maps(piece(inputs, 40, 170), options)
    assert torch.equal(maps.linear[2], alone.linear[0])
    assert torch.equal(maps.constant[2], alone.constant[0])
    assert torch.equal(constants[2], backward_constants(piece(inputs, 40, 170), options, d_out[:, 40:], 16)[0])
    assert not bool(backward_constants(inputs, options, None, 16).any())
