"""Which program serves a stage on an architecture, what it may use, and what has been shown about it.

A package states its CUDA programs in `programs.json` beside its modules:

    {"stages": {"gate_sums": "what the stage writes", ...},
     "records": [{"stage": "gate_sums", "architecture": "sm_90a", "program": "gate_sums_any", "kind": "portable",
                  "sources": ["any/gate_sums.cuh"],
                  "budget": {"threads": 128, "registers": 48, "shared_bytes": 0, "tmem_columns": 0, "ctas_per_sm": 8},
                  "evidence": [{"kind": "compiled", "compiler": "nvcc 13.0.88", "date": "2026-01-31"},
                               {"kind": "emulated", "orders": ["eager", "lazy"], "date": "2026-01-31"},
                               {"kind": "measured", "gpu": "NVIDIA H200", "date": "2026-01-31",
                                "result": "benchmarks/results/gate.json"}]}]}

`stages` lists every stage that the package's CUDA path needs, so one without a record is a stage still to be written.
Budget numbers are upper bounds per thread and per CTA, `ctas_per_sm` a lower bound. `result` is a path in the package's
folder of the checkout, of a JSON object with `gpu`, `programs` and `failed`.

`python -m cake_shared.program status --check` (or `--write`) keeps the status tables of READMEs equal to the records.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from cake_shared.errors import BuildError, UnsupportedArchError
from cake_shared.target import TARGETS, Target

STATUS_BEGIN = "<!-- status:begin -->"
STATUS_END = "<!-- status:end -->"

_WAY_OUT = "The CPU backend serves it: move the tensors to the CPU"

_EVIDENCE_FIELDS = {
    "compiled": {"kind", "compiler", "date"},
    "emulated": {"kind", "orders", "date"},
    "measured": {"kind", "gpu", "date", "result"},
}


def package_directory(package: str) -> Path:
    """Return the directory of an importable package, from a wheel or from a checkout.

    Raises
    ------
    BuildError
        There is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"package {package!r} cannot be imported. remedy: pip install {package.replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class Budget:
    """What a program may use: threads and shared bytes per CTA, registers per thread; CTAs that must fit on an SM."""

    threads: int
    registers: int
    shared_bytes: int
    tmem_columns: int
    ctas_per_sm: int

    def faults(self, target: Target) -> list[str]:
        """Return why this budget cannot be met on the target, whatever the program."""
        found = []
        for name, limit in (
            ("threads", target.threads_per_cta),
            ("registers", target.registers_per_thread),
            ("shared_bytes", target.shared_bytes_per_cta),
            ("tmem_columns", target.tmem_columns),
        ):
            if getattr(self, name) > limit:
                found.append(f"{name} {getattr(self, name)} is beyond {target.name}'s {limit}")
        resident = target.resident_ctas(registers=self.registers, shared_bytes=self.shared_bytes, threads=self.threads)
        if self.tmem_columns:
            resident = min(resident, target.tmem_columns // self.tmem_columns)
        if resident < self.ctas_per_sm:
            found.append(f"ctas_per_sm {self.ctas_per_sm}, but {resident} fit on an SM of {target.name}")
        return found


@dataclass(frozen=True)
class Evidence:
    """One thing shown about a program on an architecture: `compiled`, `emulated` or `measured`, when and how."""

    kind: str
    date: str
    compiler: str = ""
    orders: tuple[str, ...] = ()
    gpu: str = ""
    result: str = ""


@dataclass(frozen=True)
class Record:
    """The program that serves a stage on an architecture; `kind` is `portable` or `native`."""

    stage: str
    architecture: str
    program: str
    kind: str
    sources: tuple[str, ...]
    budget: Budget
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Programs:
    """A package's stages, with what each writes, and its records."""

    package: str
    stages: dict[str, str]
    records: tuple[Record, ...]

    def records_for(self, architecture: str) -> tuple[Record, ...]:
        """Return the records of one architecture, in the order of the file."""
        return tuple(record for record in self.records if record.architecture == architecture)


def _require(condition: bool, where: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{where}: {message}")


def _keys(value: object, where: str, expected: set[str]) -> dict:
    _require(isinstance(value, dict), where, f"expected an object, got {type(value).__name__}")
    assert isinstance(value, dict)
    _require(set(value) == expected, where, f"expected the keys {sorted(expected)}, got {sorted(value)}")
    return value


def _parse_evidence(value: object, where: str) -> Evidence:
    kind = value.get("kind") if isinstance(value, dict) else None
    _require(kind in _EVIDENCE_FIELDS, where, f"expected the kind {' or '.join(_EVIDENCE_FIELDS)}, got {kind!r}")
    entry = _keys(value, where, _EVIDENCE_FIELDS[kind])
    _require(bool(re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(entry["date"]))), where, f"date {entry['date']!r} is no date")
    if kind == "emulated":
        orders = entry["orders"]
        _require(isinstance(orders, list) and len(orders) > 0, where, "orders: expected the completion orders tried")
        return Evidence(**{**entry, "orders": tuple(orders)})
    return Evidence(**entry)


def _parse_record(value: object, where: str, stages: dict[str, str]) -> Record:
    entry = _keys(value, where, {field.name for field in fields(Record)})
    stage, architecture = entry["stage"], entry["architecture"]
    where = f"{where} ({stage}, {architecture})"
    _require(stage in stages, where, f"stage {stage!r} is not among the stages {', '.join(stages)}")
    _require(architecture in TARGETS, where, f"architecture {architecture!r} is not among {', '.join(TARGETS)}")
    _require(entry["kind"] in ("portable", "native"), where, f"kind {entry['kind']!r} is neither portable nor native")
    _require(bool(re.fullmatch(r"[a-z_][a-z0-9_]*", str(entry["program"]))), where, f"program {entry['program']!r}")
    sources = entry["sources"]
    _require(isinstance(sources, list) and len(sources) > 0, where, "sources: expected at least one file")
    numbers = _keys(entry["budget"], f"{where} budget", {field.name for field in fields(Budget)})
    for name, number in numbers.items():
        _require(type(number) is int and number >= 0, where, f"budget {name}: expected a count, got {number!r}")
    budget = Budget(**numbers)
    faults = budget.faults(TARGETS[architecture])
    _require(not faults, where, "; ".join(faults))
    _require(isinstance(entry["evidence"], list), where, "evidence: expected a list")
    evidence = tuple(_parse_evidence(item, f"{where} evidence {i}") for i, item in enumerate(entry["evidence"]))
    return Record(stage, architecture, entry["program"], entry["kind"], tuple(sources), budget, evidence)


def parse_programs(package: str, text: str) -> Programs:
    """Return the stages and records in the text of a `programs.json`.

    Raises
    ------
    ValueError
        The text breaks the schema; the message names package, record and what was expected.
    """
    where = f"{package}/programs.json"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    _keys(content, where, {"stages", "records"})
    stages = content["stages"]
    texts = isinstance(stages, dict) and all(isinstance(text, str) for text in stages.values())
    _require(texts, where, "stages: expected an object of names and texts")
    _require(isinstance(content["records"], list), where, "records: expected a list")
    records = tuple(_parse_record(item, f"{where} record {i}", stages) for i, item in enumerate(content["records"]))
    seen = set()
    for record in records:
        key = (record.stage, record.architecture)
        _require(key not in seen, where, f"two records for stage {record.stage} on {record.architecture}")
        seen.add(key)
    return Programs(package, stages, records)


@functools.cache
def programs_of(package: str) -> Programs:
    """Return what a package's `programs.json` states; a package without one has no stages and no records.

    Raises
    ------
    ValueError
        The file breaks the schema.
    BuildError
        There is no such package.
    """
    path = package_directory(package) / "programs.json"
    if not path.is_file():
        return Programs(package, {}, ())
    return parse_programs(package, path.read_text())


def program_for(package: str, stage: str, architecture: str) -> Record:
    """Return the record that serves a stage on an architecture.

    Raises
    ------
    UnsupportedArchError
        None does; the message names the package, the architectures that are served, and the way out.
    """
    programs = programs_of(package)
    for record in programs.records:
        if record.stage == stage and record.architecture == architecture:
            return record
    served = [record.architecture for record in programs.records if record.stage == stage]
    raise UnsupportedArchError(
        f"{package} has no CUDA program for stage {stage!r} on {architecture} "
        f"(it is served on: {', '.join(served) or 'no architecture yet'}). {_WAY_OUT}"
    )


def require_programs(package: str, architecture: str) -> tuple[Record, ...]:
    """Return the records of every stage of a package's CUDA path on an architecture, in the order of the stages.

    Raises
    ------
    UnsupportedArchError
        A stage has no program there, or the package has no CUDA path yet; the message names package, architecture and
        way out.
    """
    stages = programs_of(package).stages
    if not stages:
        raise UnsupportedArchError(f"{package} has no CUDA programs yet, so none for {architecture}. {_WAY_OUT}")
    return tuple(program_for(package, stage, architecture) for stage in stages)


def _measured_version(package: str, root: Path | None, result: str) -> str:
    """The version of a package that a result file is of, to stand in a list; "" where nothing says it."""
    path = None if root is None else root / result
    version = json.loads(path.read_text()).get(package) if path is not None and path.is_file() else None
    return f"{version}, " if version else ""


def _cell(package: str, record: Record | None, root: Path | None) -> str:
    if record is None:
        return "no program yet"
    kinds = {evidence.kind: evidence for evidence in record.evidence}
    parts = []
    if "measured" in kinds:
        measured = kinds["measured"]
        parts.append(f"measured ({_measured_version(package, root, measured.result)}{measured.gpu}, {measured.date})")
    if "emulated" in kinds:
        parts.append("emulated")
    if "compiled" in kinds:
        parts.append("compiled")
    return ", ".join(parts) or "not checked"


def status_table(package: str, root: Path | None = None) -> str:
    """Return the Markdown table of a package's stages by architecture, as its records state it.

    Parameters
    ----------
    package
        Import name.
    root
        The package's folder in the checkout: with it the table says which version each result file is of.
    """
    programs = programs_of(package)
    if not programs.stages:
        return "No CUDA programs of its own."
    lines = [
        "| stage | writes | program | " + " | ".join(TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    for stage, writes in programs.stages.items():
        by_architecture = {record.architecture: record for record in programs.records if record.stage == stage}
        names = dict.fromkeys(f"{record.program} ({record.kind})" for record in by_architecture.values())
        cells = [_cell(package, by_architecture.get(architecture), root) for architecture in TARGETS]
        lines.append(f"| {stage} | {writes} | {', '.join(names) or 'none'} | " + " | ".join(cells) + " |")
    if any(record.kind == "portable" for record in programs.records):
        lines += [
            "",
            "A portable program is one source for all architectures: emulated for several, it is one program emulated.",
        ]
    return "\n".join(lines)


def result_faults(package: str, root: Path) -> list[str]:
    """Return what is wrong with the result files that a package's `measured` evidence names.

    Parameters
    ----------
    package
        Import name.
    root
        The package's folder in the checkout, which `result` paths start from.
    """
    faults = []
    for record in programs_of(package).records:
        for evidence in record.evidence:
            if evidence.kind != "measured":
                continue
            where = f"{package}: {record.program} on {record.architecture}: {evidence.result}"
            path = root / evidence.result
            if not path.is_file():
                faults.append(f"{where} is not there")
                continue
            result = json.loads(path.read_text())
            if result.get("gpu") != evidence.gpu:
                faults.append(f"{where} is of {result.get('gpu')!r}, the record says {evidence.gpu!r}")
            if record.program not in result.get("programs", ()) or result.get("architecture") != record.architecture:
                faults.append(f"{where} does not cover this program on this architecture")
            if result.get("failed") != 0:
                faults.append(f"{where} states {result.get('failed')!r} failures")
    return faults


def checkout_packages(root: Path) -> dict[str, Path]:
    """Return the packages of a checkout by import name, each with its folder."""
    found = {path.parent.name: path.parents[2] for path in sorted(root.glob("packages/*/src/*/__init__.py"))}
    if not found:
        raise SystemExit(f"{root} holds no packages/*/src/*: run this in the root of the checkout")
    return found


def _update_status(package: str, folder: Path, write: bool) -> list[str]:
    readme = folder / "README.md"
    text = readme.read_text()
    if STATUS_BEGIN not in text or STATUS_END not in text:
        return [f"{readme}: no lines {STATUS_BEGIN} and {STATUS_END} to put the status between"]
    head, rest = text.split(STATUS_BEGIN, 1)
    tail = rest.split(STATUS_END, 1)[1]
    fresh = f"{head}{STATUS_BEGIN}\n{status_table(package, folder)}\n{STATUS_END}{tail}"
    if fresh == text:
        return []
    if write:
        readme.write_text(fresh)
        return []
    return [f"{readme}: the status table is stale. remedy: python -m cake_shared.program status --write"]


def main(arguments: list[str] | None = None) -> int:
    """Run `python -m cake_shared.program`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.program", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    status = commands.add_parser("status", help="status tables of the packages' READMEs, from their records")
    mode = status.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="exit 1 if a table or result file does not fit the records")
    mode.add_argument("--write", action="store_true", help="bring the tables up to date")
    status.add_argument("packages", nargs="*", help="import names (default: all of the checkout)")
    options = parser.parse_args(arguments)
    folders = checkout_packages(Path.cwd())
    faults = []
    for package in options.packages or folders:
        if package not in folders:
            parser.error(f"{package} is not among {', '.join(folders)}")
        faults += _update_status(package, folders[package], options.write)
        faults += result_faults(package, folders[package])
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
