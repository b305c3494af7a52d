"""The table of instructions against ptxas: which forms there are on which target, and what their operands are.

``python -m cake_shared.emulator.conformance.isa --out FILE`` writes every form of the table (``cpp/isa_table*.cpp``)
with every word of every slot, and malformed variants of each, as PTX; ptxas and the emulator must take and refuse the
same. An instruction that ptxas takes and no decoder executes is counted apart. No GPU is needed.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from cake_shared.emulator.conformance.isa_operands import DECLARED, operand_lists
from cake_shared.emulator.conformance.runner import environment
from cake_shared.emulator.module import Module
from cake_shared.emulator.native import forms
from cake_shared.jit.compilers import find_nvcc
from cake_shared.target import TARGETS, target_named

# Where ptxas and the emulator part on purpose: what begins the line or is in it, how the line was changed, why.
EXCEPTIONS = (
    (r"cvt\.sat\.u8\.u8", "", "ptxas has no .sat between types of one width, where it changes nothing"),
    (
        r"\w+\.param::func",
        "",
        "ptxas takes it for parameters of functions only; the emulator goes by the parameter's name",
    ),
    (r"(popc|clz|brev|shl|shr|bfi)\.b", "f32|float", "ptxas wants integers, where .b takes floats elsewhere"),
    (r"\S*\.bf16(x2)? ", "braces|integer|s32|f32", "ptxas reads braces around bf16, and takes or refuses more besides"),
    (r"cp\.\S*tensor", "without brackets", "ptxas takes addresses without the ISA's brackets"),
    (r"(st|red)\.async", "left out", "ptxas takes it without the ISA's mbarrier"),
    (r"atom\.and", "one operand more", "ptxas takes a fourth operand and the ISA has none"),
    (r"(mbarrier\.arrive\.noComplete|cp\.\S*multicast)", "braces", "ptxas reads braces around one register"),
    (r"movmatrix|tcgen05\.commit", "an integer", "ptxas wants a register where the ISA has an operand"),
)


@dataclass(frozen=True)
class Line:
    """One instruction as text, of a form of the table; `change` says how it differs from the form."""

    form: str
    text: str
    change: str = ""


def _words(slot: str) -> tuple[list[str], bool]:
    return slot.rstrip("?").split("|"), slot.endswith("?")


def spellings(modifiers: str) -> list[tuple[str, ...]]:
    """Parts of opcodes of a form: every word of every slot at least once, optional slots left out otherwise."""
    slots = [_words(slot) for slot in modifiers.split()]
    plain = [None if optional else words[0] for words, optional in slots]
    found = [plain]
    for at, (words, _) in enumerate(slots):
        found += [[*plain[:at], word, *plain[at + 1 :]] for word in words]
    parts = [tuple(part.replace("#", "64") for word in row if word for part in word.split(".")) for row in found]
    return list(dict.fromkeys(parts))


def _integer(opcode: str, at: int) -> str:
    """An integer in the range of an operand, for those that have one."""
    if opcode.startswith(("mbarrier", "wgmma")) or (re.match(r"bar(rier)?\.red", opcode) and at == 1):
        return "1"
    return "8" if opcode.startswith("cp.async.ca") else "32"


def _malformed(form: str, opcode: str, operands: list[str]) -> list[Line]:
    """What is wrong by one operand, one modifier or one register."""
    wrong = []
    if operands:
        wrong.append(Line(form, f"{opcode} {', '.join(operands[:-1])};", "the last operand left out"))
        wrong.append(Line(form, f"{opcode} {', '.join([*operands, '%r1'])};", "one operand more"))
    for at, operand in enumerate(operands):
        other = "%d1" if re.fullmatch(r"%(r|h)\d+", operand) else "%h1"
        if re.fullmatch(r"%[a-z]+\d+", operand):
            changed = [*operands[:at], other, *operands[at + 1 :]]
            wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} of another size"))
            changed[at] = "%i1" if operand[1] == "r" else operand
            if changed[at] != operand:
                wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} of .s32"))
                changed[at] = "%f1"
                wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} of .f32"))
            if at:
                changed[at] = _integer(opcode, at)
                wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} an integer"))
                changed[at] = "0f3f800000"
                wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} a float"))
                changed[at] = f"{{{operand}, {operand}}}"
                wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} in braces"))
        elif operand.startswith("["):
            changed = [*operands[:at], operand.strip("[]").split(",")[0], *operands[at + 1 :]]
            wrong.append(Line(form, f"{opcode} {', '.join(changed)};", f"operand {at + 1} without brackets"))
    parts = opcode.split(".")
    if len(parts) > 1:
        wrong.append(Line(form, f"{opcode}.{parts[-1]} {', '.join(operands)};", "the last modifier twice"))
        wrong.append(Line(form, f"{'.'.join(parts[:-1])} {', '.join(operands)};", "the last modifier left out"))
    return wrong


def lines(with_malformed: bool) -> list[Line]:
    """All lines to put to both."""
    found: dict[str, Line] = {}
    for base, modifiers, operands, _ in forms():
        form = f"{base} {modifiers} | {operands}"
        for at, parts in enumerate(spellings(modifiers)):
            opcode = ".".join((base, *parts))
            for number, listed in enumerate(operand_lists(base, parts, operands)):
                own = [Line(form, f"{opcode} {', '.join(listed)};")]
                if with_malformed and at == 0 and number == 0:
                    own += _malformed(form, opcode, listed)
                for line in own:
                    found.setdefault(line.text, line)
    return list(found.values())


def _text(rows: list[Line], target: str, version: str) -> tuple[str, list[int]]:
    """PTX with a kernel for each line, and the number of each line in it."""
    text = [f".version {version}", f".target {target}", ".address_size 64"]
    at = []
    for number, row in enumerate(rows):
        used = sorted(set(re.findall(r"%([a-z]+)\d+", row.text)) & set(DECLARED))
        text.append(f".entry k{number}(.param .b64 parameter[16]) {{ {' '.join(DECLARED[name] for name in used)}")
        text.append("label: table: .branchtargets label;")
        text.append(row.text)
        at.append(len(text))
        text.append("ret; }")
    return "\n".join(text) + "\n", at


def ask_ptxas(rows: list[Line], target: str) -> tuple[list[str], str]:
    """What ptxas says about each line ("" where it takes it), and its version."""
    compiler = find_nvcc(target_named(target))
    major, minor = (int(part) for part in compiler.version.split(".")[:2])
    # A line that is certainly wrong keeps it from generating code for the rest.
    text, at = _text([*rows, Line("", "add.s32 %r1;")], target, "9.0" if (major, minor) == (13, 0) else "9.3")
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "isa.ptx"
        path.write_text(text)
        command = [compiler.path.parent / "ptxas", "-arch", target, path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
    said = {}
    for number, what in re.findall(r"isa\.ptx, line (\d+); (?:error|fatal)\s*: (.*)", done.stdout + done.stderr):
        said.setdefault(int(number), what)
    if at[-1] not in said:
        raise RuntimeError(f"ptxas does not refuse what is certainly wrong: {done.stderr[-500:]}")
    return [said.get(number, "") for number in at[:-1]], compiler.version


def ask_emulator(rows: list[Line], target: str) -> list[str]:
    """What the emulator says about each line ("" where it takes it)."""
    module = Module.from_ptx(_text(rows, target, "9.0")[0], target)
    errors = [module.kernels[f"k{number}"].error for number in range(len(rows))]
    return ["" if error is None else str(error) for error in errors]


def _excused(row: Line) -> bool:
    return any(re.match(begins, row.text) and re.search(change, row.change) for begins, change, _ in EXCEPTIONS)


def compare(target: str, with_malformed: bool = True) -> dict:
    """Put all lines to both. `differences` is empty where the table is right."""
    rows = lines(with_malformed)
    theirs, version = ask_ptxas(rows, target)
    ours = ask_emulator(rows, target)
    counts: collections.Counter = collections.Counter()
    differences, idle = [], []
    for row, ptxas, emulator in zip(rows, theirs, ours, strict=True):
        not_executed = emulator.startswith("UnsupportedInstruction") and "exists on" not in emulator
        if bool(ptxas) == bool(emulator):
            counts["both refuse" if ptxas else "both take"] += 1
        elif not ptxas and not_executed:
            counts["ptxas takes, not executed here"] += 1
            idle.append(row.text)
        elif _excused(row):
            counts["excepted"] += 1
        else:
            differences.append({"line": row.text, "change": row.change, "ptxas": ptxas, "emulator": emulator})
    return {
        "ptxas": version,
        "lines": len(rows),
        **dict(sorted(counts.items())),
        "not_executed": idle,
        "differences": differences,
    }


def table_hash() -> str:
    """Hash of the table, to tell whether results are of it."""
    return hashlib.sha256(json.dumps(forms()).encode()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Compare for each target, write the result file; the exit status says whether both agree everywhere."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.emulator.conformance.isa", description=__doc__)
    parser.add_argument("--target", action="append", choices=tuple(TARGETS), help="only this target; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, help="write the results here as JSON")
    arguments = parser.parse_args(argv)
    results = {target: compare(target) for target in arguments.target or TARGETS}
    for target, result in results.items():
        counts = {key: value for key, value in result.items() if not isinstance(value, list)}
        print(f"{target}: {', '.join(f'{key} {value}' for key, value in counts.items())}")
        for difference in result["differences"]:
            print(f"  {difference['line']}  ({difference['change'] or 'as the table says'})")
            print(
                f"    ptxas: {difference['ptxas'] or 'takes it'}\n    emulator: {difference['emulator'] or 'takes it'}"
            )
    facts = environment(False)
    del facts["nvcc"]  # each target's ptxas is named with it
    document = {
        "environment": facts,
        "table_sha256": table_hash(),
        "exceptions": [why for _, _, why in EXCEPTIONS],
        "targets": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(result["differences"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
