"""The CPU backend keeps one segment's chunk tensors alive, whatever the length or the number of sequences."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cake_shared.gdn.backward import Needs, backward
from cake_shared.gdn.forward import forward
from cake_shared.gdn.plan import Problem, plan_rule
from cake_shared.testing.gdn_core import make_inputs


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, while they live."""

    def __init__(self):
        super().__init__()
        self.known = {}
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


def peaks(lengths, key=16, value=16):
    """Workspace peaks of both passes beside what they return, and the bytes returned."""
    inputs, options, d_out, d_final = make_inputs(lengths, 1, 1, key, value)
    with LiveBytes() as forward_bytes:
        o, final, tape = forward(inputs, options, True, True)
    out = o.nbytes + final.nbytes + tape.nbytes
    needs = Needs(A_log=False, dt_bias=False)
    with LiveBytes() as backward_bytes:
        grads = backward(inputs, options, d_out, d_final, tape, needs, (1, value))
    given = sum(x.nbytes for x in (grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state))
    return forward_bytes.peak - out, backward_bytes.peak - given, out


def test_a_long_sequence_needs_the_workspace_of_a_segment():
    """Sixteen times the length, the same workspace."""
    short, long = peaks([8200]), peaks([131072])
    assert long[0] <= 1.25 * short[0]
    assert long[1] <= 1.25 * short[1]


@pytest.mark.parametrize("length", [1, 20])
def test_many_short_sequences_need_a_bounded_workspace(length):
    """Beyond a group of sequences, more of them add only their outputs, states and offsets."""
    few, many = peaks([length] * 6000, 8, 8), peaks([length] * 24000, 8, 8)
    assert many[0] <= 1.25 * few[0] + (1 << 20)
    assert many[1] <= 1.25 * few[1] + (1 << 20)


def test_the_plan_states_the_workspace():
    """The estimate of the plan bounds what the passes hold."""
    plan = plan_rule(Problem(1, 5000, (5000,), 1, 1, 64, 64))
    forward_peak, backward_peak, _ = peaks([5000], 64, 64)
    assert forward_peak <= plan.wave_bytes
    assert backward_peak <= plan.wave_bytes + plan.group_bytes


def test_nothing_is_taped_that_is_not_needed():
    """One segment a sequence, or no gradient that needs states: the tape is empty."""
    inputs, options, _, _ = make_inputs([8192, 100], 1, 1, 16, 16)
    assert forward(inputs, options, False, True)[2].numel() == 2
    inputs, options, _, _ = make_inputs([9000], 1, 1, 16, 16)
    assert forward(inputs, options, False, False)[2].numel() == 2
    assert forward(inputs, options, False, True)[2].numel() == 2 + 2 * 16 * 16
