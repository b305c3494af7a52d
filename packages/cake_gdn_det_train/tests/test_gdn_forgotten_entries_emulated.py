"""Segments that gates part from all but the end of the one before, in the emulator of sm_90a."""

import pytest
import torch

from cake_shared.emulator import Options as EmulatorOptions
from cake_shared.errors import BuildError
from cake_shared.gdn.cuda.devices import ErrorWord
from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule
from cake_shared.testing.bits import bits_of
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.gdn_cuda import BF16_LIMIT
from cake_shared.testing.gdn_golden import golden_case

PACKAGE, ARCHITECTURE, SEGMENT = "cake_gdn_det_train", "sm_90a", 4096
SCALE = 128**-0.5


@pytest.fixture(scope="module")
def backend_of():
    """For a number of multiprocessors: few have CTAs of 128 value columns, many of 64."""
    try:
        package = EmulatedPackage(PACKAGE, ARCHITECTURE, EmulatorOptions(order="eager"))
    except BuildError as error:
        pytest.skip(f"compilers are what this needs: {error}")
    word = ErrorWord(torch.zeros(1, dtype=torch.int32))
    with package:
        native = uses_native(PACKAGE, ARCHITECTURE)
        yield lambda multiprocessors: RuleBackend(package.module, word, multiprocessors, lambda: 0, native)


def assert_near(got, expected):
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error < BF16_LIMIT, error


def test_chains_begin_with_what_is_not_forgotten(backend_of):
    """Head 0 forgets within two chunks, head 1 in its first segment alone: its second hands the end on to the third."""
    tokens = 2 * SEGMENT + 70
    case = golden_case((tokens,), 1, 2)
    g = torch.full((1, tokens, 2), -1.0)
    g[:, SEGMENT:, 1] = -0.001
    inputs = Inputs(case.k, g, case.beta, case.q, case.v)
    o, final, tape, _ = backend_of(132).forward(inputs, Options(SCALE), True, True)
    without_tape = backend_of(1).forward(inputs, Options(SCALE), True, False)
    assert torch.equal(bits_of(o), bits_of(without_tape[0]))
    assert torch.equal(bits_of(final), bits_of(without_tape[1]))

    entries = tape[TAPE_HEAD:].view(2, 2, 128, 128).transpose(-1, -2)  # [slot, head, key, value]
    begin, state, outputs = 0, None, []
    for slot, end in enumerate((SEGMENT, 2 * SEGMENT, tokens)):
        q, k, v, gates, beta = (x[:, begin:end].double() for x in (case.q, case.k, case.v, g, case.beta))
        part, state = ref_chunk_gated_delta_rule(
            q, k, v, gates, beta, SCALE, initial_state=state, output_final_state=True
        )
        outputs.append(part)
        begin = end
        for head in range(2):
            assert_near(entries[slot, head] if slot < 2 else final[0, head], state[0, head])
    for head in range(2):
        assert_near(o[:, :, head], torch.cat(outputs, 1)[:, :, head])
