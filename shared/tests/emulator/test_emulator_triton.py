"""PTX of another author: what Triton compiles offline for four architectures gives the right answers."""

import pytest

from cake_shared.emulator import Options
from cake_shared.emulator.conformance import triton_table

triton = pytest.importorskip("triton", reason=f"triton {triton_table.TRITON_VERSION} is not installed")
if triton.__version__ != triton_table.TRITON_VERSION:
    pytest.skip(
        f"triton {triton.__version__} is installed, these tests are for {triton_table.TRITON_VERSION}",
        allow_module_level=True,
    )

BY_NAME = {row.name: row for row in triton_table.ROWS}
# For sm_103a and sm_107a Triton emits what it emits for sm_100a: a product in each style and the reduction suffice.
FEW = [name for name in BY_NAME if name.startswith(("bf16 64x64x64", "chained 128", "tensor maps 256", "row sum"))]
CASES = [(a, name) for a in (90, 100) for name in BY_NAME] + [(a, name) for a in (103, 107) for name in FEW]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
    yield
    triton.knobs.cache.dir = before


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_triton_program_is_right_under_every_order(architecture, name):
    row = BY_NAME[name]
    compiled = triton_table.compile_row(row, architecture)
    orders = [("eager", 0), ("lazy", 0), ("random", 5)] if architecture in (90, 100) else [("lazy", 0)]
    for order, seed in orders:
        outcome = triton_table.judged(row, architecture, compiled, order, seed)
        assert "error" not in outcome, outcome
        assert outcome["outside"] == 0, (order, outcome)


def test_the_judge_sees_a_wrong_element():
    row = BY_NAME["row sum of 3000"]
    compiled = triton_table.compile_row(row, 90)
    broken = compiled.ptx.replace("add.f32", "sub.f32", 1)
    assert broken != compiled.ptx
    outcome = triton_table.run_row(row, 90, triton_table.Compiled(broken, compiled.shared_bytes, []), Options())
    assert outcome["outside"] > 0
