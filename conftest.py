"""Settings of every test: one torch thread a worker, derandomised hypothesis, GPU tests only where there is a GPU."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["cake_shared.testing.plugin"]

torch.set_num_threads(1)
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, however many tests have it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"skipped: {tests} tests, {reason}")
