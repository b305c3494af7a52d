"""The README's example runs, and importing the package is cheap."""

import re
import subprocess
import sys
from pathlib import Path

import torch

README = Path(__file__).parents[1] / "README.md"
PACKAGE = "dense_projection_det_gemm"


def test_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 10
    torch.manual_seed(0)
    exec(compile(blocks[0], str(README), "exec"), {})


def test_import_takes_under_a_fifth_of_a_second_and_touches_no_device():
    """On top of torch; processor time, and the least of three processes, since others may be running."""
    code = (
        "import sys, time, torch; before = set(sys.modules); t = time.process_time(); "
        f"import {PACKAGE}; print(time.process_time() - t); "
        "assert not torch.cuda.is_initialized(); "
        "loaded = set(sys.modules) - before; "
        "assert not loaded & {'numpy', 'tvm_ffi', 'matplotlib', 'cake_shared.jit'}, loaded"
    )
    times = []
    for _ in range(3):
        times.append(float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout))
        if times[-1] < 0.2:
            return
    raise AssertionError(f"importing took {min(times):.3f} s")
