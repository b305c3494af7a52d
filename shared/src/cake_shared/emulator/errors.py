"""What the emulator raises: one class a detector, all of them `EmulatorError`."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A detector fired. The text names the detector, the PTX line, the source line where known, CTA, warp and lane.

    Attributes
    ----------
    detector
        Name of the class.
    line
        PTX line, 0 where none applies.
    source
        `file:line` of the CUDA source through `-lineinfo`, or None.
    cta
        (x, y, z) of the CTA, or None.
    warp, lane
        Their indices in the CTA and in the warp, or None.
    """

    def __init__(
        self,
        text: str,
        *,
        line: int = 0,
        source: str | None = None,
        cta: tuple[int, int, int] | None = None,
        warp: int | None = None,
        lane: int | None = None,
        kernel: str | None = None,
        file: str | None = None,
    ):
        self.line, self.source, self.cta, self.warp, self.lane = line, source, cta, warp, lane
        place = []
        if kernel:
            place.append(f"kernel {kernel}")
        if line:
            place.append(f"{file or 'PTX'} line {line}")
        if source:
            place.append(source)
        if cta is not None:
            place.append(f"CTA {cta}")
        if warp is not None:
            place.append(f"warp {warp}")
        if lane is not None:
            place.append(f"lane {lane}")
        super().__init__(f"{self.detector}: {text}" + (f" [{', '.join(place)}]" if place else ""))

    @property
    def detector(self) -> str:
        """The detector's name."""
        return type(self).__name__


class PtxSyntaxError(EmulatorError):
    """The text is no PTX that this parser reads, or is for another target."""


class UnsupportedInstruction(EmulatorError):
    """The text has an instruction, modifier or operand that the emulator does not execute; nothing has run."""


class LaunchError(EmulatorError):
    """The launch breaks a limit of the kernel or of the target, or its parameters do not fit."""


class OutOfBounds(EmulatorError):
    """An access outside of every registered allocation, of shared, local or tensor memory."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of the access's size."""


class UninitialisedRead(EmulatorError):
    """A read of shared, tensor or global memory that nothing has written."""


class ConstWrite(EmulatorError):
    """A write to an input that is const."""


class UnwaitedResult(EmulatorError):
    """The destination of an asynchronous operation was read before its wait."""


class MissingProxyFence(EmulatorError):
    """Shared memory written by ordinary stores was read by the asynchronous proxy without a proxy fence between."""


class SharedRace(EmulatorError):
    """Two warps accessed the same bytes of shared memory, one of them writing, with nothing that orders them."""


class MissingGridWait(EmulatorError):
    """A programmatic launch touched what an earlier launch, which may still run, wrote, or wrote what that one read."""


class BarrierMisuse(EmulatorError):
    """A barrier was used against its rules: too many arrivals, another count, a phase reused, bytes overflowed."""


class Deadlock(EmulatorError):
    """No warp can go on; the text says where every one of them waits."""


class Hang(EmulatorError):
    """Very many instructions without a store or a signal."""


class TensorMemoryLeak(EmulatorError):
    """Tensor memory was allocated or freed against the rules, or not freed at exit."""


class AsyncInFlight(EmulatorError):
    """Asynchronous copies were not waited for before the CTA ended."""


class Trap(EmulatorError):
    """The program executed `trap` or failed an assertion."""


class IllegalInstruction(EmulatorError):
    """The values of an instruction's operands break the rules of the instruction set."""


class Stop(EmulatorError):
    """The line that was asked for has been reached."""


_CLASSES = {
    cls.__name__: cls
    for cls in (
        PtxSyntaxError,
        UnsupportedInstruction,
        LaunchError,
        OutOfBounds,
        Misaligned,
        UninitialisedRead,
        ConstWrite,
        UnwaitedResult,
        MissingProxyFence,
        SharedRace,
        MissingGridWait,
        BarrierMisuse,
        Deadlock,
        Hang,
        TensorMemoryLeak,
        AsyncInFlight,
        Trap,
        IllegalInstruction,
        Stop,
    )
}


def from_native(found: dict, *, file: str, kernel: str | None = None) -> EmulatorError:
    """Return the exception for what the native library reports."""
    cls = _CLASSES.get(found["detector"])
    if cls is None:
        raise RuntimeError(f"the emulator reports an unknown detector {found['detector']!r}: {found['text']}")
    has_place = found.get("cta", -1) >= 0
    return cls(
        found["text"],
        line=found.get("line", 0),
        source=found.get("source"),
        cta=tuple(found["cta_id"]) if has_place else None,
        warp=found["warp"] if found.get("warp", -1) >= 0 else None,
        lane=found["lane"] if found.get("lane", -1) >= 0 else None,
        kernel=kernel,
        file=file,
    )
