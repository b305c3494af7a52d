"""What the tests of every package use: poisoned allocations, guard bands, bitwise comparison."""
