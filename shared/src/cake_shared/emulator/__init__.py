"""A functional emulator: runs the PTX of a CUDA program on the CPU.

`Module.from_ptx(text).launch(kernel, grid, block, params)` executes a kernel on NumPy arrays or torch CPU tensors and
raises an `EmulatorError` for what it does wrong. The page EMULATOR.md of this distribution explains the model.
"""

from cake_shared.emulator.errors import (
    AsyncInFlight,
    BarrierMisuse,
    ConstWrite,
    Deadlock,
    EmulatorError,
    Hang,
    IllegalInstruction,
    LaunchError,
    Misaligned,
    MissingGridWait,
    MissingProxyFence,
    OutOfBounds,
    PtxSyntaxError,
    SharedRace,
    Stop,
    TensorMemoryLeak,
    Trap,
    UninitialisedRead,
    UnsupportedInstruction,
    UnwaitedResult,
)
from cake_shared.emulator.module import Kernel, Module, Options, Stream
from cake_shared.emulator.params import Param, Region
from cake_shared.emulator.report import Report
from cake_shared.emulator.tensor_maps import tensor_map

__all__ = [
    "AsyncInFlight",
    "BarrierMisuse",
    "ConstWrite",
    "Deadlock",
    "EmulatorError",
    "Hang",
    "IllegalInstruction",
    "Kernel",
    "LaunchError",
    "Misaligned",
    "MissingGridWait",
    "MissingProxyFence",
    "Module",
    "Options",
    "OutOfBounds",
    "Param",
    "PtxSyntaxError",
    "Region",
    "Report",
    "SharedRace",
    "Stop",
    "Stream",
    "TensorMemoryLeak",
    "Trap",
    "UninitialisedRead",
    "UnsupportedInstruction",
    "UnwaitedResult",
    "tensor_map",
]
