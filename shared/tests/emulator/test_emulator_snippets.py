"""Single instructions against NumPy: hypothesis draws bits for 32 lanes, one launch runs a whole family on them."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_shared.emulator import Module, Options
from cake_shared.emulator.conformance import compare, snippets
from cake_shared.emulator.conformance.model import STORAGE, Check
from cake_shared.emulator.conformance.programs import SNIPPET_FAMILIES, snippets_of

LANES = 32
# Values that matter to some type when cut to its width: zeros, ones, extremes, infinities, NaN, subnormals, ties.
SPECIAL_BITS = [
    0, 1, 2, 31, 32, 0x7F, 0x80, 0xFF, 0x3C00, 0x7C00, 0xFC00, 0x7E00, 0x0400, 0x03FF, 0x3F80, 0x7F80, 0xFF80, 0x8000,
    0xFFFF, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00800000, 0x007FFFFF, 0x7F7FFFFF, 0x4F000000,
    0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F000000, 0x3FC00000, 0x3FF0000000000000, 0x7FF0000000000000,
    0x7FF8000000000000, 0x000FFFFFFFFFFFFF, 0x8000000000000000, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF,
    0x3FE0000000000000, 0x41E0000000000000, 0x380FFFFFFFFFFFFF,
]  # fmt: skip
word = st.sampled_from(SPECIAL_BITS) | st.integers(0, 2**64 - 1) | st.integers(-1000, 1000).map(lambda v: v % 2**64)


@functools.cache
def family(name: str):
    """The snippets of a family with a NumPy reference, compiled once for 32 lanes."""
    rows = [s for s in snippets_of(name) if s.reference is not None]
    module = Module.from_ptx(snippets.generate(rows, LANES), target="sm_90a", name=f"{name}.ptx")
    return rows, module, snippets.layout(rows, LANES)


def cut(pool: np.ndarray, column: int, kind: str) -> np.ndarray:
    storage = np.dtype(STORAGE[kind])
    return pool[:, column].astype(f"uint{8 * storage.itemsize}").view(storage)


@pytest.mark.parametrize("name", SNIPPET_FAMILIES)
@settings(max_examples=12)
@given(words=st.lists(word, min_size=LANES * 5, max_size=LANES * 5))
def test_a_family_of_instructions_equals_numpy_on_any_bits(name, words):
    rows, module, where = family(name)
    pool = np.array(words, np.uint64).reshape(LANES, 5)
    inputs = []
    for row in rows:
        arrays = tuple(cut(pool, k, kind) for k, kind in enumerate(row.inputs))
        inputs.append(tuple(row.domain(*arrays)) if row.domain else arrays)
    source, out = snippets.pack_inputs(rows, LANES, inputs), np.zeros(where.output_bytes, np.uint8)
    module.launch("snippets", grid=1, block=LANES, params=[module.const(source), out], options=Options(detect="cheap"))
    wrong = []
    for row, arrays, offsets in zip(rows, inputs, where.outputs):
        for kind, offset, want in zip(row.outputs, offsets, snippets.reference_outputs(row, arrays)):
            bound = None
            if row.rule == "bound":
                with np.errstate(all="ignore"):
                    bound = row.bound(*arrays, want)
            else:
                want = np.ascontiguousarray(want).astype(STORAGE[kind], casting="unsafe")
            verdict = compare.against_reference(Check(row.name, "out", kind, LANES, offset, row.rule, want, bound), out)
            if not verdict.passed:
                lane = int(verdict.examples[0].split("]")[0][1:])
                wrong.append(f"{row.name}({', '.join(hex(int(a[lane])) for a in arrays)}): {verdict.examples[0]}")
    assert not wrong, "\n".join(wrong[:10])
