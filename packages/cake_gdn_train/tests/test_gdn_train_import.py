import statistics
import subprocess
import sys

MEASURE = """
import time, torch
start = time.process_time()
import PACKAGE
print(time.process_time() - start)
import sys
print(*[name for name in ("tvm_ffi", "matplotlib", "torch._dynamo", "hypothesis") if name in sys.modules])
"""


def measure():
    code = MEASURE.replace("PACKAGE", "cake_gdn_train")
    lines = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    return float(lines[0]), lines[1].split()


def test_import_takes_under_200_ms_on_top_of_torch():
    samples = [measure()[0] for _ in range(3)]
    assert min(samples) < 0.2, f"seconds: {samples}, median {statistics.median(samples):.3f}"


def test_import_pulls_nothing_heavy_in():
    assert measure()[1] == []


def test_import_touches_no_device():
    code = "import torch; import cake_gdn_train; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
