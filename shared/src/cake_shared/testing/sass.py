"""What machine code does to the registers of products that are still running.

The compiler does not keep the registers of a wgmma's left operand until its wait: it may give them to whatever is
loaded meanwhile. The emulator runs PTX and cannot see it; this reads what `cuobjdump -sass` or `nvdisasm -c` print.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^\s*(?:Function : (\S+)|\.text\.(\S+):)")
_LABEL = re.compile(r"^\s*(\.L\S*):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_TARGET = re.compile(r"`\((\.L[^)]*)\)|\b0x([0-9a-f]+)\s*$")
_REGISTER = re.compile(r"R(\d+)\b")
_NO_RESULT = {"BAR", "BMOV", "BPT", "BRX", "CALL", "JMX", "NANOSLEEP", "R2UR", "REDUX", "RET", "WARPSYNC", "YIELD"} | {
    "DSETP",
    "FCHK",
    "FSETP",
    "HSETP2",
    "ISETP",
    "R2P",
    "VSETP",
}  # in a general register
_USUAL = Path("/usr/local/cuda/bin/cuobjdump")
_GROUPS = 8  # that are told apart
_FRAGMENT_REGISTERS = 4  # of a left operand of 64 x 16


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    predicate: str
    name: str
    operands: tuple[str, ...]
    target: int | None

    @property
    def text(self) -> str:
        """As the disassembler prints it, without spaces for columns."""
        return " ".join(filter(None, (self.predicate, self.name, ", ".join(self.operands))))

    def results(self) -> range:
        """Return the numbers of the general registers that it writes."""
        if self.name.split(".")[0] in _NO_RESULT:
            return range(0)
        first = next((o for o in self.operands if not re.fullmatch(r"!?U?P(\d|T)", o)), "")
        found = _REGISTER.fullmatch(first.removesuffix(".64"))
        if found is None:
            return range(0)
        parts = self.name.split(".")
        if parts[0] == "HGMMA":
            count = int(parts[1].split("x")[1]) // 2
        elif "128" in parts or "4" in parts[1:]:
            count = 4
        elif parts[0] in ("DADD", "DFMA", "DMUL") or {"64", "WIDE", "F64"} & set(parts) or self.name == "CS2R":
            count = 2
        else:
            count = 1
        return range(int(found[1]), int(found[1]) + count)

    def fragment(self) -> frozenset[int]:
        """Return the registers of a product's left operand; none where it comes from shared memory."""
        if not self.name.startswith("HGMMA"):
            return frozenset()
        found = _REGISTER.fullmatch(self.operands[1])
        return frozenset() if found is None else frozenset(int(found[1]) + i for i in range(_FRAGMENT_REGISTERS))


def functions_of(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function of a disassembly, in the order of addresses."""
    functions: dict[str, list[tuple[int, str]]] = {}
    labels: dict[str, tuple[str, int]] = {}
    name, waiting = "", []
    for line in text.splitlines():
        if found := _FUNCTION.match(line):
            name = found[1] or found[2]
        elif found := _LABEL.match(line):
            waiting.append(found[1])
        elif found := _INSTRUCTION.search(line):
            address = int(found[1], 16)
            labels.update((label, (name, address)) for label in waiting)
            waiting = []
            functions.setdefault(name, []).append((address, found[2].strip()))
    return {
        name: [_instruction(address, body, name, labels) for address, body in lines]
        for name, lines in functions.items()
    }


def _instruction(address: int, body: str, function: str, labels: dict[str, tuple[str, int]]) -> Instruction:
    predicate, _, rest = body.partition(" ") if body.startswith("@") else ("", "", body)
    name, _, operands = rest.strip().partition(" ")
    target = None
    if name.split(".")[0] in ("BRA", "BSSY", "CALL") and (found := _TARGET.search(operands.strip())):
        where = labels.get(found[1], (function, None)) if found[1] else (function, int(found[2], 16))
        target = where[1] if where[0] == function else None
    split = tuple(o.strip() for o in operands.split(",")) if operands.strip() else ()
    return Instruction(address, predicate, name, split, target)


def writes_to_running_products(code: list[Instruction]) -> list[str]:
    """Return what in a function writes a register of a left operand before its product was waited for.

    Every path is followed. Products are in groups: `gsb0` ends one, `WARPGROUP.DEPBAR` waits for all but the latest.
    """
    at = {i.address: n for n, i in enumerate(code)}
    found: dict[int, str] = {}
    seen: set[tuple[int, tuple[frozenset[int], ...]]] = set()
    work: list[tuple[int, tuple[frozenset[int], ...]]] = [(0, (frozenset(),))]
    while work:
        n, groups = work.pop()
        while n < len(code) and (n, groups) not in seen:
            seen.add((n, groups))
            i = code[n]
            running = frozenset().union(*groups)
            if running.intersection(i.results()) and not i.name.startswith("HGMMA"):
                found[i.address] = f"{i.address:#x}: {i.text}"
            if fragment := i.fragment():
                groups = (*groups[:-1], groups[-1] | fragment)
            if i.name.startswith("HGMMA") and any(o.startswith("gsb") for o in i.operands):
                # Of a loop that never waits the oldest ones count as one.
                oldest = groups[0] | groups[1] if len(groups) > _GROUPS else groups[0]
                groups = (oldest, *groups[1 + (len(groups) > _GROUPS) :], frozenset())
            if i.name.startswith("WARPGROUP.DEPBAR"):
                kept = int(i.operands[-1], 16)
                groups = (*groups[:-1][len(groups) - 1 - kept :], groups[-1]) if kept else (groups[-1],)
            if i.target is not None and i.name == "BRA":
                if i.target in at:
                    work.append((at[i.target], groups))
                if not i.predicate and len(i.operands) == 1:
                    break
            if i.name.split(".")[0] in ("EXIT", "RET") and not i.predicate:
                break
            n += 1
    return [found[address] for address in sorted(found)]


def disassembler() -> str | None:
    """Return a cuobjdump, of `PATH` or of CUDA's usual place, or None."""
    return shutil.which("cuobjdump") or (str(_USUAL) if _USUAL.is_file() else None)


def disassemble(program: str, binary: Path) -> str:
    """Return the machine code in a cubin or a module."""
    return subprocess.run([program, "-sass", str(binary)], check=True, capture_output=True, text=True).stdout
