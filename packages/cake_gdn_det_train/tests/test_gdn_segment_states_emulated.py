"""The states at the borders of many segments, some of which forget what came before them, in the emulator of sm_90a."""

import ctypes

import pytest
import torch

from cake_shared import jit
from cake_shared.emulator import Module, Options, Region
from cake_shared.emulator.params import span_of
from cake_shared.errors import BuildError
from cake_shared.program import program_for

PACKAGE, ARCHITECTURE = "cake_gdn_det_train", "sm_90a"
CHUNKS, TOKENS = 64, 4096  # of a segment
LOG2_DECAY, LAST = 3, 63  # where the scalars of a chunk keep the sum of its gates
i32, pointer = ctypes.c_int32, ctypes.c_void_p


class Params(ctypes.Structure):
    """SegmentStatesParams of cake/gdn/rule_params.h."""

    _fields_ = (
        *((name, i32) for name in ("key_heads", "value_heads", "group", "tokens_per_row")),
        *(
            (name, pointer)
            for name in ("status", "chunks", "segments", "token_offsets", "chunk_offsets", "segment_offsets")
        ),
        *((name, i32) for name in ("sequences", "chunk_capacity", "segment_capacity")),
        *((name, pointer) for name in ("factors", "states", "scalars")),
        ("slots_per_row", i32),
        ("items", i32),
    )


def composed(factors, states, forgets, reverse):
    """What the borders become, in float64; `factors[s]` is M of segment s + 1, transposed, as the slots hold them."""
    found = states.double()
    borders = range(1, len(states))
    for i in reversed(borders) if reverse else borders:
        here, before = (i - 1, i) if reverse else (i, i - 1)
        if not forgets[i]:  # segment i lies between the borders i - 1 and i
            m = factors[i - 1].double()
            found[here] += found[before] @ (m.T if reverse else m)
    return found


@pytest.fixture(scope="module")
def kernels():
    try:
        texts = jit.ptx_for(PACKAGE, ARCHITECTURE)
    except BuildError as error:
        pytest.skip(f"compilers are what this needs: {error}")
    names = {stage: program_for(PACKAGE, stage, ARCHITECTURE) for stage in ("segment_entries", "segment_exits")}
    return {stage: (Module.from_ptx(texts[x.program], ARCHITECTURE, "rule.ptx"), x) for stage, x in names.items()}


@pytest.mark.parametrize(
    ("segments", "forgetting", "ctas"), [(3, 0.0, None), (3, 0.0, 3), (3, 1.0, None), (70, 0.7, 2), (130, 0.95, None)]
)
@pytest.mark.parametrize("stage", ["segment_entries", "segment_exits"])
def test_borders(kernels, stage, segments, forgetting, ctas):
    module, record = kernels[stage]
    generator = torch.Generator().manual_seed(segments)
    tokens = segments * TOKENS - 100
    slots = tokens // TOKENS
    forgets = torch.rand(segments, generator=generator) < forgetting
    scalars = torch.zeros(segments * CHUNKS, 4, 64)
    scalars[:, LOG2_DECAY, LAST] = torch.where(forgets, -5.0, -0.01).repeat_interleave(CHUNKS)
    factors, states = (torch.randn(slots, 128, 128, generator=generator) for _ in range(2))
    factors /= 12
    expected = composed(factors, states[: segments - 1], forgets.tolist(), stage == "segment_exits")
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (tokens, -(-tokens // 64), segments)]
    tensors = {"factors": factors, "states": states, "scalars": scalars, "tokens": offsets[0], "chunks": offsets[1]}
    tensors["segments"], status = offsets[2], torch.tensor([0, 1], dtype=torch.int32)
    tensors["status"] = status
    tables = (status.data_ptr(), 0, 0, *(x.data_ptr() for x in offsets))
    params = Params(1, 1, 1, tokens, *tables, 1, len(scalars), segments)
    params.factors, params.states, params.scalars = factors.data_ptr(), states.data_ptr(), scalars.data_ptr()
    params.slots_per_row, params.items = slots, -(-tokens // 8192) * 8
    module.launch_packed(
        record.program,
        (ctas or params.items, 1, 1),
        (record.budget.threads, 1, 1),
        bytes(params),
        [Region(*span_of(x), name) for name, x in tensors.items()],
        smem_bytes=record.budget.shared_bytes,
        options=Options(order="random", seed=1),
    )
    error = (states[: segments - 1].double() - expected).norm() / expected.norm()
    assert float(error) < 1e-6
