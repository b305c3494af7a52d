"""The bits belong to a version and an architecture: fixed calls against hashes that were taken before.

A failure means that results have other bits than those of the version in golden.json. If that is meant, the version
goes up and `python -m cake_shared.testing.gdn_golden` renews the file.
"""

import json
from pathlib import Path

import pytest
import torch

from cake_shared.errors import BuildError
from cake_shared.testing import gdn_golden

PACKAGE = "cake_gdn_det_train"
GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
INPUTS = "759214e6e5d65fa11a8f57966f222a4ce8e5b1c64cf38a03cce064d0c1343bf2"
EMULATED = [name.split()[1] for name in GOLDEN if name.startswith("emulator ")]


def compare(place, hashes):
    known = GOLDEN[place]
    other = [name for name, value in known["sha256"].items() if hashes[name] != value]
    assert not other, f"{place}: other bits than those of version {known['version']} in {', '.join(other)}"
    assert set(hashes) == set(known["sha256"])


@pytest.mark.gpu
def test_bits_of_this_gpu():
    from cake_shared.target import target_of

    architecture = target_of().name
    if architecture not in GOLDEN:
        pytest.skip(f"no golden hashes of {architecture} have been taken")
    compare(architecture, gdn_golden.gpu_hashes(PACKAGE))


@pytest.mark.parametrize("architecture", EMULATED)
def test_emulated_bits(architecture):
    try:
        hashes = gdn_golden.emulated_hashes(PACKAGE, architecture)
    except BuildError as error:
        pytest.skip(f"compilers are what this needs: {error}")
    compare(f"emulator {architecture}", hashes)


def test_inputs_are_the_same_everywhere():
    """Golden hashes mean nothing if their inputs move with torch's generators."""
    case = gdn_golden.CASES["pack"]()
    assert gdn_golden.digest({"q": case.q, "v": case.v, "g": case.g, "h0": case.initial_state}) == INPUTS
    assert torch.equal(case.q.float().norm(dim=-1), torch.ones(case.q.shape[:3]))
