"""Tests that both Gated DeltaNet packages must pass, written once.

A package's test file imports all names of one of these modules and provides a fixture `gdn`, a `GdnPackage`. Tests
named `test_U..` and `test_CF..` are known faults of other kernels, restated as small inputs with their right answer.
"""

import importlib
from dataclasses import dataclass

from cake_shared.testing.bits import assert_bitwise_equal, assert_near
from cake_shared.testing.gdn_reference import limit


@dataclass(frozen=True)
class GdnPackage:
    """A package under test and what it promises.

    Attributes
    ----------
    name : str
        Import name.
    deterministic : bool
        Whether equal inputs give equal bits wherever they stand in the pack.
    """

    name: str
    deterministic: bool

    @property
    def module(self):
        """The imported package."""
        return importlib.import_module(self.name)

    @property
    def rule(self):
        """Its `chunk_gated_delta_rule`."""
        return self.module.chunk_gated_delta_rule

    def same(self, actual, expected, name="tensor"):
        """Assert equal bits where the package promises bits, else agreement at the rounding of the dtype."""
        __tracebackhide__ = True
        if self.deterministic or actual is None or expected is None:
            assert_bitwise_equal(actual, expected, name)
        else:
            assert_near(actual, expected, 2.0 * limit(actual.dtype), name)

    def all_same(self, actual, expected, names=None):
        """`same` for two dictionaries of results, over `names` or all of them."""
        __tracebackhide__ = True
        for name in names or expected:
            self.same(actual[name], expected[name], name)
