"""The examples of the READMEs that stand above the packages run as they are printed."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["README.md", "shared/README.md"])
def test_every_python_block_runs(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
    assert blocks
    for block in blocks:
        torch.manual_seed(0)
        exec(compile(block, name, "exec"), {})
