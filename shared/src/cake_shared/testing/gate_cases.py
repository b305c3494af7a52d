"""Packs that the gate stage is judged on, what it must write for each, and how a result is compared: bit for bit.

The same cases drive the comparison on a GPU, in the emulator and in the script that writes a result file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cake_shared.gdn.gate_reference import gate_sums
from cake_shared.plan import PackTables, pack_tables

FIRST_OFFSET_NOT_ZERO, OFFSETS_DECREASE, LAST_OFFSET_BEYOND_TOKENS = 1, 2, 4


@dataclass(frozen=True)
class GateCase:
    """One input of the gate stage.

    Attributes
    ----------
    name
        What it is about.
    shape
        `[B, T, HV]` of the gates.
    offsets
        `cu_seqlens`, or None for a batch whose rows are the sequences.
    offsets_dtype, dtype
        int32 or int64; float32 or bfloat16.
    layout
        `contiguous`; `sliced`: every second head of a wider buffer; `transposed`: tokens are the fastest axis.
    regime
        `mild`, `mixed` (-1e-3 to -300 in a chunk), `extreme` (down to -1e30 and -inf), `zero`, `nan` (some are NaN).
    faults
        0, or the sum of the faults of a malformed pack.
    """

    name: str
    shape: tuple[int, int, int]
    offsets: tuple[int, ...] | None
    offsets_dtype: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    regime: str = "mixed"
    faults: int = 0

    def gates(self) -> torch.Tensor:
        """Return the gates on the CPU, the same at every call, in this case's dtype and layout."""
        batch, tokens, heads = self.shape
        wide = heads * 2 if self.layout == "sliced" else heads
        shape = (batch, wide, tokens) if self.layout == "transposed" else (batch, tokens, wide)
        generator = torch.Generator().manual_seed(1)
        g = _regime(self.regime, shape, generator).to(self.dtype)
        if self.layout == "transposed":
            return g.transpose(1, 2)
        return g[..., ::2] if self.layout == "sliced" else g

    def cu_seqlens(self) -> torch.Tensor | None:
        """Return the offsets on the CPU, or None."""
        return None if self.offsets is None else torch.tensor(self.offsets, dtype=self.offsets_dtype)

    def tables(self) -> PackTables:
        """Return the tables that the stage must make: of N empty sequences where the pack is malformed."""
        if self.offsets is None:
            return pack_tables([row * self.shape[1] for row in range(self.shape[0] + 1)])
        return pack_tables([0] * len(self.offsets) if self.faults else self.offsets)


def _regime(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    uniform = torch.rand(shape, generator=generator)
    if name == "zero":
        return torch.zeros(shape)
    if name == "mild":
        return -uniform / 16
    if name == "mixed":
        scales = torch.tensor([1e-3, 1.0, 26.0, 300.0])
        return -uniform * scales[torch.randint(0, 4, shape, generator=generator)]
    if name == "extreme":
        scales = torch.tensor([1e-30, 1e-3, 127.9, 1e6, 1e30, float("inf")])
        return -(uniform + 0.5) * scales[torch.randint(0, 6, shape, generator=generator)]
    if name == "nan":
        g = -uniform
        g.view(-1)[g.numel() // 2 :: 97] = float("nan")
        return g
    raise ValueError(f"regime: got {name!r}, takes zero, mild, mixed, extreme or nan")


def _cases() -> tuple[GateCase, ...]:
    uneven = (0, 5, 130, 131, 195, 500)
    found = [
        GateCase("one token", (1, 1, 1), (0, 1)),
        GateCase("one chunk", (1, 64, 4), (0, 64)),
        GateCase("one chunk and a token", (1, 65, 4), (0, 65)),
        GateCase("uneven", (1, 500, 6), uneven),
        GateCase("uneven, int32 offsets", (1, 500, 6), uneven, offsets_dtype=torch.int32),
        GateCase("uneven, bf16", (1, 500, 6), uneven, dtype=torch.bfloat16),
        GateCase("uneven, sliced", (1, 500, 6), uneven, layout="sliced"),
        GateCase("uneven, sliced bf16", (1, 500, 3), uneven, layout="sliced", dtype=torch.bfloat16),
        GateCase("uneven, transposed", (1, 500, 6), uneven, layout="transposed"),
        GateCase("buffer longer than the pack", (1, 256, 4), (0, 100, 190)),
        GateCase("buffer longer than whole chunks", (1, 256, 4), (0, 64, 128)),
        GateCase("empty sequences", (1, 70, 4), (0, 0, 5, 5, 70, 70)),
        GateCase("nothing but empty sequences", (1, 0, 4), (0, 0, 0, 0)),
        GateCase("no sequences", (1, 0, 4), (0,)),
        GateCase("empty sequences over a buffer", (1, 64, 4), (0, 0, 0)),
        GateCase("no heads", (1, 64, 0), (0, 64)),
        GateCase("batch", (3, 70, 4), None),
        GateCase("batch, transposed", (3, 130, 4), None, layout="transposed"),
        GateCase("batch of no tokens", (2, 0, 4), None),
        GateCase("just one segment", (1, 8192, 2), (0, 8192)),
        GateCase("just three segments", (1, 8193, 2), (0, 8193)),
        GateCase("segments among short ones", (1, 24000, 2), (0, 40, 9000, 9001, 17193, 24000)),
        GateCase("batch of segments", (2, 8200, 1), None),
        GateCase("1,500 uneven sequences", (1, 33_750, 2), tuple(22 * s + s * s % 20 for s in range(1501))),
        GateCase("70,000 sequences of one token", (1, 70_000, 1), tuple(range(70_001)), offsets_dtype=torch.int32),
        GateCase("2,731 sequences, 24 heads", (1, 5462, 24), tuple(2 * s for s in range(2732))),
    ]
    found += [GateCase(f"{r} gates", (1, 500, 6), uneven, regime=r) for r in ("zero", "mild", "extreme", "nan")]
    found += [GateCase("extreme bf16 gates", (1, 500, 6), uneven, regime="extreme", dtype=torch.bfloat16)]
    for dtype in (torch.int32, torch.int64):
        bits = 31 if dtype == torch.int32 else 63
        far = 2**bits - 1
        malformed = {
            "decreasing offsets": ((0, 70, 60, 128), OFFSETS_DECREASE),
            "last offset beyond the buffer": ((0, 70, 129), LAST_OFFSET_BEYOND_TOKENS),
            "first offset not 0": ((1, 70, 128), FIRST_OFFSET_NOT_ZERO),
            "negative offset": ((0, -5, 128), OFFSETS_DECREASE),
            "offset far away": ((0, far), LAST_OFFSET_BEYOND_TOKENS),
            "peak far away": ((0, far, 128), OFFSETS_DECREASE),
            "from far below to far above": ((-far - 1, far), FIRST_OFFSET_NOT_ZERO | LAST_OFFSET_BEYOND_TOKENS),
            "everything wrong": ((7, 1, far), FIRST_OFFSET_NOT_ZERO | OFFSETS_DECREASE | LAST_OFFSET_BEYOND_TOKENS),
        }
        for name, (offsets, faults) in malformed.items():
            found.append(GateCase(f"{name}, int{bits + 1}", (1, 128, 3), offsets, offsets_dtype=dtype, faults=faults))
    return tuple(found)


GATE_CASES = _cases()


def expected(case: GateCase, chunk_capacity: int, segment_capacity: int) -> dict[str, torch.Tensor]:
    """Return every array that the stage must write for a case, by the names of `TablePlan.views`, and `sums`."""
    tables = case.tables()
    chunks = torch.zeros(chunk_capacity, 4, dtype=torch.int32)
    segments = torch.zeros(segment_capacity, 4, dtype=torch.int32)
    chunks[:, 0] = segments[:, 0] = -1
    used_chunks = (tables.chunk_sequence, tables.chunk_segment, tables.chunk_first_token, tables.chunk_tokens)
    used_segments = (
        tables.segment_sequence,
        tables.segment_first_token,
        tables.segment_tokens,
        tables.segment_first_chunk,
    )
    chunks[: len(tables.chunk_tokens)] = torch.tensor(used_chunks, dtype=torch.int32).T
    segments[: len(tables.segment_tokens)] = torch.tensor(used_segments, dtype=torch.int32).T
    if case.offsets is None:
        tokens = [row * case.shape[1] for row in range(case.shape[0] + 1)]
    else:
        tokens = [0] * len(case.offsets) if case.faults else list(case.offsets)
    has_segments = len(set(tables.segment_sequence)) < len(tables.segment_sequence)
    sums = gate_sums(case.gates(), tables, chunk_capacity)
    return {
        "chunks": chunks,
        "segments": segments,
        "token_offsets": torch.tensor(tokens, dtype=torch.int32),
        "chunk_offsets": torch.tensor(tables.sequence_first_chunk, dtype=torch.int32),
        "segment_offsets": torch.tensor(tables.sequence_first_segment, dtype=torch.int32),
        "status": torch.tensor([case.faults, has_segments], dtype=torch.int32),
        "sums": torch.full_like(sums, float("nan")) if case.faults else sums,
    }


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """Return one line for every array that is not bitwise as it must be; any NaN equals any other.

    Parameters
    ----------
    got
        CPU copies by name; of `status` only the first two words count.
    want
        From `expected`.
    """
    found = []
    for name, right in want.items():
        left = got[name][:2] if name == "status" else got[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            found.append(f"{name}: got {left.dtype} {list(left.shape)}, expected {right.dtype} {list(right.shape)}")
            continue
        other = left.view(torch.int32) != right.view(torch.int32)
        if right.is_floating_point():
            other &= ~(left.isnan() & right.isnan())
        count = int(other.sum())
        if count:
            first = tuple(other.nonzero()[0].tolist())
            found.append(f"{name}: {count} elements differ, first {first}: got {left[first]}, expected {right[first]}")
    return found
