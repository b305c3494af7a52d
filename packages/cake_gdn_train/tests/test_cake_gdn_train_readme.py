"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_is_an_example_of_the_rule_and_one_of_a_plan():
    assert [name in source for source in EXAMPLES for name in ("chunk_gated_delta_rule(", "plan(")] == [1, 0, 0, 1]


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source, capsys):
    names = {}
    exec(compile(source, str(README), "exec"), names)
    assert "64" in capsys.readouterr().out
    if "chunk_gated_delta_rule(" in source:
        assert names["o"].shape == names["v"].shape
        assert names["v"].grad.isfinite().all()
