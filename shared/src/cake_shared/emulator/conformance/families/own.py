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
    """The gates' powers are an approximate function, which the emulator computes in other bits than the GPU."""
    from cake_shared.emulator.conformance.recorded import record

    found: dict[str, torch.Tensor] = {}

    def results(name: str, size: int) -> Check | None:
        if name not in _RULE:
            return None
        values = np.abs(found[name.split()[1]].double().numpy().reshape(-1))
        # A power that rounds the other way may turn the rounding of BF16 operands between the stages.
        unit = 2.0**-6 if _RULE[name] == "bf16" else 2.0**-10
        bound = unit * values + 2.0**-9 * np.sqrt(np.mean(values**2))
        return Check(name, "", _RULE[name], size // _SIZES[_RULE[name]], rule="bound", bound=bound)

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
