import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_in_ten_lines():
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len([line for line in block.splitlines() if line]) <= 10
    code = block + "\nassert q.grad.shape == q.shape and o.shape == v.shape and o.isfinite().all()\n"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_takes_under_200_ms_on_top_of_torch():
    code = "import time, torch; t = time.process_time(); import cake_gdn_train_kcp; print(time.process_time() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout) for _ in range(3)
    ]
    assert min(seconds) < 0.2, seconds
