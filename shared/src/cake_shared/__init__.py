"""What the cake training kernels stand on: plans, checks, JIT, oracles, CPU backends, bench and emulator."""

from cake_shared._version import __version__

__all__ = ["__version__"]
