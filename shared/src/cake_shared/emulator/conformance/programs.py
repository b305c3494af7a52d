"""The table of conformance programs."""

from __future__ import annotations

from cake_shared.emulator.conformance.families import (
    atomic_floats,
    comparing,
    convert,
    floating,
    integer,
    kernels,
    matrix,
    own,
    own_gemm,
    tensor,
    wgmma,
)
from cake_shared.emulator.conformance.model import Program
from cake_shared.emulator.conformance.snippets import Snippet, build_case

# Elements a snippet is applied to; FP64 references go through rational arithmetic, so they take fewer.
COUNT = 1024
COUNT_F64 = 512

SNIPPET_FAMILIES = {
    "integer arithmetic": (integer.arithmetic, COUNT),
    "bit manipulation": (integer.bit, COUNT),
    "carries": (integer.carries, COUNT),
    "fp32 arithmetic": (floating.single, COUNT),
    "fp64 arithmetic": (floating.double, COUNT_F64),
    "fp16 and bf16 arithmetic": (floating.half, COUNT),
    "comparisons and selects": (comparing.comparisons, COUNT),
    "selects by a flushed float": (comparing.flushing_selects, COUNT),
    "integer conversions": (convert.integers, COUNT),
    "float and integer conversions": (convert.floats_and_integers, COUNT),
    "float conversions": (convert.floats, COUNT),
    "approximate functions": (convert.approximate, COUNT),
}


def snippets_of(family: str) -> list[Snippet]:
    """The snippets of one family of single instructions."""
    make, _ = SNIPPET_FAMILIES[family]
    return make()


def _snippet_program(family: str) -> Program:
    make, count = SNIPPET_FAMILIES[family]
    return Program(family, "single instructions", lambda: build_case(make(), count))


PROGRAMS: list[Program] = [
    *(_snippet_program(family) for family in SNIPPET_FAMILIES),
    *kernels.PROGRAMS,
    *atomic_floats.PROGRAMS,
    *matrix.PROGRAMS,
    *wgmma.PROGRAMS,
    *tensor.PROGRAMS,
    *own.PROGRAMS,
    *own_gemm.PROGRAMS,
]
