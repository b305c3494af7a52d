"""A pytest plugin, named in the root conftest: every test runs with poisoned allocations."""

import pytest

from cake_shared.testing.poison import poisoned_allocations

pytest.register_assert_rewrite("cake_shared.testing.gdn_suite")


@pytest.fixture(autouse=True)
def poisoned():
    """Fill what the code under test allocates and does not write with NaN."""
    with poisoned_allocations():
        yield
