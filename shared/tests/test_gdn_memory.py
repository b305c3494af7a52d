"""The CPU backend keeps one segment's chunk tensors alive, whatever the length or the number of sequences."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cake_shared.gdn.backward import Needs, backward
from cake_shared.gdn.forward import forward
from cake_shared.gdn.plan import Problem, plan_rule
from cake_shared.plan import WorkBudget
from cake_shared.testing.gdn_core import make_inputs


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, while they live, those of `given` tensors aside."""

    def __init__(self, given):
        super().__init__()
        self.known = {x.untyped_storage()._cdata: None for x in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    size = storage.nbytes()
                    self.known[key] = weakref.finalize(storage, self.forget, key, size)
                    self.now += size
                    self.peak = max(self.peak, self.now)
        return result

    def forget(self, key, size):
        self.known.pop(key, None)
        self.now -= size


BUDGET = WorkBudget(wave_bytes=1 << 16, group_bytes=1 << 19)


def peaks(lengths, key, value, budget):
    """Workspace peaks of both passes, beside what they are given and what they return."""
    inputs, options, d_out, d_final = make_inputs(lengths, 1, 1, key, value)
    given = [x for x in vars(inputs).values() if x is not None]
    with LiveBytes(given) as forward_bytes:
        o, final, tape = forward(inputs, options, True, True, budget)
    needs = Needs(A_log=False, dt_bias=False)
    with LiveBytes([*given, d_out, d_final, tape]) as backward_bytes:
        grads = backward(inputs, options, d_out, d_final, tape, needs, (1, value), budget)
    returned = sum(x.nbytes for x in (grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state))
    return forward_bytes.peak - o.nbytes - final.nbytes - tape.nbytes, backward_bytes.peak - returned


def test_a_long_sequence_needs_the_workspace_of_a_segment():
    """Eight times the length, the same workspace."""
    short, long = peaks([8200], 16, 16, BUDGET), peaks([65536], 16, 16, BUDGET)
    assert long[0] <= 1.25 * short[0]
    assert long[1] <= 1.25 * short[1]


@pytest.mark.parametrize("length", [1, 20])
def test_many_short_sequences_need_a_bounded_workspace(length):
    """Beyond a group of sequences, more of them add only their outputs and states."""
    few, many = peaks([length] * 800, 16, 16, BUDGET), peaks([length] * 3200, 16, 16, BUDGET)
    assert many[0] <= 1.25 * few[0]
    assert many[1] <= 1.25 * few[1]


def test_the_plan_states_the_workspace():
    """The estimate of the plan bounds what the passes hold."""
    plan = plan_rule(Problem(1, 5000, (5000,), 1, 1, 64, 64))
    forward_peak, backward_peak = peaks([5000], 64, 64, WorkBudget())
    assert forward_peak <= plan.wave_bytes
    assert backward_peak <= plan.wave_bytes + plan.group_bytes


def test_nothing_is_taped_that_is_not_needed():
    """One segment a sequence, or no gradient that needs states: the tape is empty."""
    inputs, options, _, _ = make_inputs([8192], 1, 1, 16, 16)
    assert forward(inputs, options, False, True)[2].numel() == 2
    inputs, options, _, _ = make_inputs([9000], 1, 1, 16, 16)
    assert forward(inputs, options, False, False)[2].numel() == 2
    assert forward(inputs, options, False, True)[2].numel() == 2 + 2 * 16 * 16
