"""Counters of a launch."""

from __future__ import annotations

from dataclasses import dataclass

_CLASSES = {
    "float": {"add", "sub", "mul", "fma", "mad", "div", "min", "max", "abs", "neg", "rcp", "sqrt", "rsqrt", "ex2",
              "lg2", "sin", "cos", "tanh", "copysign", "testp"},
    "integer": {"addc", "subc", "madc", "rem", "sad", "mul24", "mad24", "dp4a", "dp2a", "and", "or", "xor", "not",
                "cnot", "shl", "shr", "shf", "lop3", "popc", "clz", "brev", "bfind", "bfe", "bfi", "bmsk", "prmt",
                "szext", "fns"},
    "convert": {"cvt", "cvta"},
    "compare": {"setp", "set", "selp", "slct", "isspacep"},
    "move": {"mov", "mapa", "getctarank"},
    "memory": {"ld", "ldu", "st", "atom", "red", "prefetch", "prefetchu", "ldmatrix", "stmatrix", "multimem"},
    "control": {"bra", "brx", "call", "ret", "exit", "trap", "nanosleep"},
    "warp": {"shfl", "vote", "match", "redux", "activemask", "elect"},
    "sync": {"bar", "barrier", "fence", "membar", "mbarrier", "griddepcontrol", "setmaxnreg"},
    "copy": {"cp"},
    "mma": {"mma", "wgmma", "tcgen05"},
}  # fmt: skip
_BY_BASE = {base: name for name, bases in _CLASSES.items() for base in bases}
_INTEGER_SUFFIXES = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "b16", "b32", "b64")


def class_of(opcode: str) -> str:
    """Return the class that an opcode is counted under."""
    base = opcode.split(".")[0]
    kind = _BY_BASE.get(base, "other")
    if kind == "float" and opcode.rsplit(".", 1)[-1] in _INTEGER_SUFFIXES:
        return "integer"
    return kind


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes
    ----------
    instructions, thread_instructions
        Warp instructions executed, and lanes that took part, summed.
    by_opcode, by_line
        Warp instructions by opcode and by PTX line.
    bytes
        Bytes moved by `<space>_read` and `<space>_write`; `generic` are accesses without a state space.
    shared_accesses, shared_wavefronts
        Phases of shared-memory accesses and the wavefronts that they take (only with `Options(profile=True)`).
    mma_flops
        Floating-point operations of matrix products.
    async_copies
        Asynchronous copies issued.
    seconds
        Time of the emulation.
    printf
        What device code printed.
    """

    kernel: str
    instructions: int
    thread_instructions: int
    by_opcode: dict
    by_line: dict
    bytes: dict
    shared_accesses: int
    shared_wavefronts: int
    mma_flops: int
    async_copies: int
    seconds: float
    printf: str

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond one a phase."""
        return self.shared_wavefronts - self.shared_accesses

    @property
    def by_class(self) -> dict:
        """Warp instructions by class of instruction."""
        counts: dict[str, int] = {}
        for opcode, count in self.by_opcode.items():
            kind = class_of(opcode)
            counts[kind] = counts.get(kind, 0) + count
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def table(self) -> str:
        """Return the counters as lines of text."""
        lines = [
            f"kernel              {self.kernel}",
            f"warp instructions   {self.instructions}",
            f"thread instructions {self.thread_instructions}",
            f"seconds             {self.seconds:.3f}",
            f"MMA operations      {self.mma_flops}",
            f"async copies        {self.async_copies}",
        ]
        lines += [f"  {name:<17} {count}" for name, count in self.by_class.items()]
        lines += [f"bytes {name:<13} {count}" for name, count in self.bytes.items() if count]
        if self.shared_accesses:
            lines.append(f"shared phases       {self.shared_accesses}, wavefronts {self.shared_wavefronts}")
        return "\n".join(lines)


def report_of(kernel: str, counters: dict) -> Report:
    """Return the report that the native library's counters describe."""
    return Report(
        kernel=kernel,
        instructions=counters["instructions"],
        thread_instructions=counters["thread_instructions"],
        by_opcode=counters["by_opcode"],
        by_line={int(line): count for line, count in counters["by_line"].items()},
        bytes=counters["bytes"],
        shared_accesses=counters["shared_accesses"],
        shared_wavefronts=counters["shared_wavefronts"],
        mma_flops=counters["mma_flops"],
        async_copies=counters["async_copies"],
        seconds=counters["microseconds"] * 1e-6,
        printf=counters["printed"],
    )
