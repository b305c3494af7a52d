"""The machine code of sm_90a: what the emulator, which runs PTX, cannot see."""

import pytest

from cake_shared import jit
from cake_shared.errors import BuildError
from cake_shared.testing import sass
from dense_projection_det_gemm import cuda


@pytest.mark.slow
def test_nothing_writes_the_left_operand_of_a_running_product():
    program = sass.disassembler()
    if program is None:
        pytest.skip("cuobjdump is what this needs")
    try:
        entry = jit.build_module(cuda.PACKAGE, "sm_90a")
    except BuildError as error:
        pytest.skip(f"compilers are what this needs: {error}")
    functions = sass.functions_of(sass.disassemble(program, entry / "module.so"))
    with_fragments = {name for name, code in functions.items() if any(i.fragment() for i in code)}
    assert with_fragments >= {"router_out_sm90", "router_bf16_out_sm90", "router_narrow_out_sm90"}
    found = {name: faults for name, code in functions.items() if (faults := sass.writes_to_running_products(code))}
    assert not found
