"""The project's own programs: the launches of its packages' host chains, as their hosts make them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import numpy as np

from cake_shared.emulator.conformance.model import Case, Check, Program

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cake_shared.emulator.conformance.recorded import Recorder
    from cake_shared.testing.gdn_inputs import GdnCase

GDN = "cake_gdn_det_train"

# Results of the rule by call and tensor, with the type that they are stored in.
_RULE = {
    "1 o": "bf16", "1 final_state": "f32", "2 dq": "bf16", "2 dk": "bf16", "2 dv": "bf16", "2 dg": "f32",
    "2 dbeta": "f32", "2 d_initial_state": "f32", "2 dA_log": "f32", "2 ddt_bias": "f32",
}  # fmt: skip
_SIZES = {"bf16": 2, "f32": 4}

# How far the rule's results may lie apart where only the powers of its gates differ (see `_rule_case`).
_POWER = 2 * (2.0**-22 + 2.0**-24)  # two powers a gate factor: within two units on the GPU, correctly rounded here
_ROUNDING = 2.0**-7.5  # spacing of BF16 over the value, in the mean
_PRODUCTS = 6  # products that lie one behind the other, two operands each
_SPREAD = 2 * (2 * _PRODUCTS * _POWER / _ROUNDING) ** 0.5 * _ROUNDING
_LARGEST_TERM = 16 / 64**0.5  # four by four standard deviations, in a sum of at least 64 terms, over that sum's
_TURNED_TOGETHER = 4


def _many_sequences() -> GdnCase:
    """More sequences than the prologue scans by itself."""
    from cake_shared.testing.gdn_inputs import base, packed

    lengths = (1, 0) * 520
    return packed(base(sum(lengths), 1, 2), lengths)


def _pack() -> GdnCase:
    """A pack with an empty sequence, and states."""
    from cake_shared.testing.gdn_inputs import base, packed, states

    initial, gradient = states(base(150, 1, 2), 4)
    return packed(base(150, 1, 2), (70, 0, 66, 14)).with_(initial_state=initial, d_state=gradient)


def _options() -> GdnCase:
    """Every option; gradients of the gate's parameters."""
    import torch

    from cake_shared.testing.gdn_inputs import base

    case = base(130, 1, 2)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.3, -0.2]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    g, beta = torch.randn(1, 130, 2), torch.randn(1, 130, 2)
    return case.with_(q=case.q * 3, k=case.k * 2, g=g, beta=beta, options=options)


def _segments() -> GdnCase:
    """Three segments, the last of one token."""
    from cake_shared.testing.gdn_inputs import base, states

    initial, gradient = states(base(8193, 1, 1), 1)
    return base(8193, 1, 1).with_(initial_state=initial, d_state=gradient)


def _rule(recorder: Recorder, make: Callable[[], GdnCase], found: dict[str, torch.Tensor]) -> None:
    """One forward and backward of the gated delta rule; ``found`` takes the results by name."""
    import torch

    from cake_shared.gdn.cuda.devices import ErrorWord
    from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
    from cake_shared.testing.gdn_cuda import rule_through
    from cake_shared.testing.gdn_run import run

    torch.manual_seed(0)
    word = ErrorWord(torch.zeros(1, dtype=torch.int32))
    backend = RuleBackend(recorder.module, word, 132, lambda: 0, uses_native(GDN, "sm_90a"))
    found |= run(rule_through(GDN, backend), make())


def _is_gate_stage(kernel: str) -> bool:
    return kernel.startswith(("pack_offsets", "prologue"))


def _gate_stage_case() -> Case:
    from cake_shared.emulator.conformance.recorded import record

    def tables(name: str, size: int) -> Check | None:
        return Check(name, "", "b32", size // 4) if name in ("1 groundwork", "1 error_word") else None

    return record(GDN, functools.partial(_rule, make=_many_sequences, found={}), tables, _is_gate_stage)


def _rule_case(make: Callable[[], GdnCase]) -> Case:
    """A run of the rule. The GPU takes powers of gates by an approximate function, in other bits than the emulator.

    All else is the same on both sides to the bit: sums of products, their order, roundings. So an intermediate result
    differs by `_POWER` at most before it is rounded to BF16 as an operand of the next product, and nearly all round
    alike: one in `_ROUNDING / _POWER` turns to its neighbour, off by `_ROUNDING` of its value.

    Over a tensor: of the 2 `_PRODUCTS` operands of a chain of products that share turns, with signs of their own, so
    the root mean square of the differences is `_ROUNDING` times the root of 2 `_PRODUCTS` `_POWER / _ROUNDING` of the
    values': 2^-12.3. Twice that is allowed. One rounding more or less anywhere in the chain is 2^-9.
    An element by itself tells little: a turned operand moves a sum by its largest term at most, and a few may meet.
    In the emulator, powers that are moved by up to two units at random spread dq and dk of the segmented run by
    2^-12.3, the other results by less, and single elements by up to 2^-5.3.
    """
    from cake_shared.emulator.conformance.recorded import record

    found: dict[str, torch.Tensor] = {}

    def results(name: str, size: int) -> Check | None:
        if name not in _RULE:
            return None
        dtype = _RULE[name]
        values = np.abs(found[name.split()[1]].double().numpy().reshape(-1))
        # Its own rounding may turn; so may operands of the sum. Two runs may lie twice the bound apart.
        apart = 2.0**-7 * _LARGEST_TERM * _TURNED_TOGETHER * np.sqrt(np.mean(values**2))
        bound = (apart + (2.0**-7 * values if dtype == "bf16" else 0)) / 2
        return Check(name, "", dtype, size // _SIZES[dtype], rule="bound", bound=bound, spread=_SPREAD)

    return record(GDN, functools.partial(_rule, make=make, found=found), results)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


PROGRAMS = []
if _installed(GDN):
    PROGRAMS += [
        Program("gdn gate stage", "own programs", _gate_stage_case),
        Program("gdn rule", "own programs", functools.partial(_rule_case, _pack)),
        Program("gdn rule with every option", "own programs", functools.partial(_rule_case, _options)),
        Program("gdn rule in segments", "own programs", functools.partial(_rule_case, _segments)),
    ]
