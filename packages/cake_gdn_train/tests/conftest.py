import pytest

from cake_shared.testing.gdn_suite import GdnPackage


@pytest.fixture(scope="session")
def gdn():
    return GdnPackage("cake_gdn_train", deterministic=False)
