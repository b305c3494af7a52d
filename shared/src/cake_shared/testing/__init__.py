"""What the tests of every package use: poisoned allocations, guard bands, bitwise comparison, known inputs."""

from cake_shared.testing.bits import assert_bitwise_equal, assert_near, bits_of, relative_l2, same_bits
from cake_shared.testing.guard import GuardBand
from cake_shared.testing.poison import deterministic_fill, leave_nan_blocks, poison_, poisoned_allocations

__all__ = [
    "GuardBand",
    "assert_bitwise_equal",
    "assert_near",
    "bits_of",
    "deterministic_fill",
    "leave_nan_blocks",
    "poison_",
    "poisoned_allocations",
    "relative_l2",
    "same_bits",
]
