"""The project's own programs: the launches of its packages' host chains, as their hosts make them."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

from cake_shared.emulator.conformance.model import Case, Check, Program

if TYPE_CHECKING:
    from cake_shared.emulator.conformance.recorded import Recorder

GDN = "cake_gdn_det_train"

# Results of the rule by call and tensor, with the type that they are stored in.
_RULE = {
    "1 o": "bf16", "1 final_state": "f32", "2 dq": "bf16", "2 dk": "bf16", "2 dv": "bf16", "2 dg": "f32",
    "2 dbeta": "f32", "2 d_initial_state": "f32",
}  # fmt: skip
_SIZES = {"bf16": 2, "f32": 4}


def _rule(recorder: Recorder, *, long: bool = False) -> None:
    """One forward and backward of the gated delta rule: a pack with an empty sequence and states; or three segments."""
    import torch

    from cake_shared.gdn.cuda.devices import ErrorWord
    from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
    from cake_shared.testing.gdn_cuda import rule_through
    from cake_shared.testing.gdn_inputs import base, packed, states
    from cake_shared.testing.gdn_run import run

    torch.manual_seed(0)
    case = base(8193, 1, 1) if long else packed(base(150, 1, 2), (70, 0, 66, 14))
    initial, gradient = states(case, 1 if long else 4)
    case = case.with_(initial_state=initial, d_state=gradient)
    word = ErrorWord(torch.zeros(1, dtype=torch.int32))
    backend = RuleBackend(recorder.module, word, 132, lambda: 0, uses_native(GDN, "sm_90a"))
    run(rule_through(GDN, backend), case)


def _is_gate_stage(kernel: str) -> bool:
    return kernel.startswith(("pack_offsets", "prologue", "gate_parameters"))


def _gate_stage_case() -> Case:
    from cake_shared.emulator.conformance.recorded import record

    def tables(name: str, size: int) -> Check | None:
        return Check(name, "", "b32", size // 4) if name in ("1 groundwork", "1 error_word") else None

    return record(GDN, _rule, tables, _is_gate_stage)


def _rule_case(*, long: bool = False) -> Case:
    from cake_shared.emulator.conformance.recorded import record

    def results(name: str, size: int) -> Check | None:
        if name not in _RULE:
            return None
        return Check(name, "", _RULE[name], size // _SIZES[_RULE[name]])

    return record(GDN, functools.partial(_rule, long=long), results)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


PROGRAMS = []
if _installed(GDN):
    PROGRAMS += [
        Program("gdn gate stage", "own programs", _gate_stage_case),
        Program("gdn rule forward and backward", "own programs", _rule_case),
        Program("gdn rule in segments", "own programs", functools.partial(_rule_case, long=True)),
    ]
