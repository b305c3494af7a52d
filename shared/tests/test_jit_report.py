"""The compiler's report as numbers, from logs as ptxas 13.0 and 13.5 write them."""

import pytest

from cake_shared.jit.report import KernelReport, parse_report

LOG = """[1/3] nvcc -c a.cu
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 260 bytes smem
ptxas info    : Compile time = 38.000 ms
ptxas info    : Compiling entry function 'spilling' for 'sm_90a'
ptxas info    : Function properties for spilling
    120 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 120 bytes cumulative stack size
ptxas info    : Compile time = 6.014 ms
"""


def test_numbers_of_every_kernel():
    assert parse_report(LOG) == {
        "plain": KernelReport(registers=48, shared_bytes=260),
        "spilling": KernelReport(registers=255, stack_bytes=120, spill_store_bytes=40, spill_load_bytes=44),
    }


def test_a_log_of_another_format_is_an_error_not_a_zero():
    cut = LOG.replace("Used 255 registers", "Took 255 registers")
    with pytest.raises(ValueError, match="states no registers for spilling"):
        parse_report(cut)


def test_no_kernels():
    assert parse_report("ptxas info    : 0 bytes gmem\n") == {}
