"""Settings of every test: one torch thread a worker, derandomised hypothesis, GPU tests only where there is a GPU."""

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
