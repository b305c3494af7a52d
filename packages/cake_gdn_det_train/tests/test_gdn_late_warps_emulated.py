"""Warps of token_gradients that are late, in the emulator: who waits for whom does not rest on who is usually fast."""

import re

import pytest
import torch

from cake_shared import jit
from cake_shared.emulator import Options
from cake_shared.errors import BuildError
from cake_shared.gdn.cuda.devices import ErrorWord
from cake_shared.gdn.cuda.rule import RuleBackend
from cake_shared.testing import poisoned_allocations
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.gdn_cuda import assert_accurate, rule_through
from cake_shared.testing.gdn_inputs import base
from cake_shared.testing.gdn_run import run

PACKAGE, KERNEL, LIMIT = "cake_gdn_det_train", "token_gradients_sm90", 6e-3

# The warpgroups that take registers: those that accumulate dQ and dK, the one that makes dP and M.
ROLES = {"dQ, dK": 0, "dP, M": 1}
FENCES = (5, 2)  # groups of products that a role's code begins
_TAKES = "setmaxnreg.inc.sync.aligned.u32"
_LATE = """{
.reg .u32 n;
.reg .pred p;
mov.u32 n, 0;
$late:
add.u32 n, n, 1;
setp.lt.u32 p, n, 3000;
@p bra $late;
}
"""


def delayed(text: str, role: int) -> str:
    """The PTX with some thousand instructions before each of a role's groups of products."""
    parts = re.split("(?=setmaxnreg)", text)
    takes = [i for i, part in enumerate(parts) if part.startswith(_TAKES)]
    assert len(takes) == len(ROLES)
    takes.sort(key=lambda i: -int(parts[i].removeprefix(_TAKES).split(";")[0]))  # accumulators take most registers
    fence = "wgmma.fence.sync.aligned;"
    assert parts[takes[role]].count(fence) == FENCES[role]
    parts[takes[role]] = parts[takes[role]].replace(fence, _LATE + fence)
    return "".join(parts)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("role", ROLES)
def test_late_warps(monkeypatch, role, group):
    """No tile is overwritten before those who are late have read it, and none is read before it is there."""
    try:
        texts = jit.ptx_for(PACKAGE, "sm_90a")
        known = texts[KERNEL]
        late = delayed(known, ROLES[role])
        monkeypatch.setattr(jit, "ptx_for", lambda *_: {name: late if x == known else x for name, x in texts.items()})
        package = EmulatedPackage(PACKAGE, "sm_90a", Options(order="lazy"))
    except BuildError as error:
        pytest.skip(f"compilers are what this needs: {error}")
    backend = RuleBackend(package.module, ErrorWord(torch.zeros(1, dtype=torch.int32)), 1, lambda: 0, True)
    case = base(700, 1, group)
    with package, poisoned_allocations():
        results = run(rule_through("cake_gdn", backend), case)
    assert_accurate(results, case, LIMIT)
