"""`python -m cake_shared.testing.arch sm_100a [package ...]`: everything that can be shown about an architecture here.

For each package it compiles every record of that architecture from cold and times it, holds the compiler's report
against the budgets, runs the programs' emulation tests, and runs the GPU tests where a device of that architecture is
present. The last lines say which of these ran, and only what ran.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cake_shared.errors import BuildError
from cake_shared.program import Record, checkout_packages, programs_of
from cake_shared.target import TARGETS, Target, target_named

CORE_SECONDS_LIMIT = 120.0

_NO_TESTS_COLLECTED = 5


@dataclass
class Outcome:
    """What was tried for one package: a line for each kind of evidence, and what failed."""

    package: str
    compiled: str = "not run"
    emulated: str = "not run"
    measured: str = "not run"
    failures: list[str] = field(default_factory=list)


def budget_faults(record: Record, kernels: dict[str, dict[str, int]], target: Target) -> list[str]:
    """Return how a compiled program exceeds its record's budget.

    Parameters
    ----------
    record
        The program's record for the target.
    kernels
        The compiler's numbers by kernel, as `cake_shared.jit.KernelReport.as_dict` gives them. Its shared bytes are the
        static ones; dynamic shared memory is the launch's, which the emulator holds against the budget.
    target
        The architecture that they were compiled for.
    """
    if record.program not in kernels:
        return [f"{record.program} is not in the module, which has {', '.join(sorted(kernels)) or 'no kernels'}"]
    used, budget = kernels[record.program], record.budget
    found = []
    if used["registers"] > budget.registers:
        found.append(f"{record.program} uses {used['registers']} registers, its budget is {budget.registers}")
    if used["shared_bytes"] > budget.shared_bytes:
        found.append(f"{record.program} uses {used['shared_bytes']} shared bytes, its budget is {budget.shared_bytes}")
    spilled = used["spill_store_bytes"] + used["spill_load_bytes"]
    if spilled:
        found.append(f"{record.program} spills {spilled} bytes, programs spill nothing")
    resident = target.resident_ctas(
        registers=used["registers"],
        shared_bytes=max(used["shared_bytes"], budget.shared_bytes),
        threads=budget.threads,
    )
    if resident < budget.ctas_per_sm:
        found.append(f"{record.program}: {resident} CTAs fit on an SM, its budget says {budget.ctas_per_sm}")
    return found


def _compile(outcome: Outcome, records: tuple[Record, ...], target: Target) -> None:
    from cake_shared import jit

    with tempfile.TemporaryDirectory(prefix="cake-cold-") as directory:
        try:
            entry = jit.build_module_into(outcome.package, target.name, Path(directory))
        except BuildError as error:
            outcome.compiled = "failed"
            outcome.failures.append(str(error))
            return
        core_seconds = jit.core_seconds(entry)
        kernels = {name: report.as_dict() for name, report in jit.kernel_reports(entry).items()}
    for record in records:
        used, budget = kernels.get(record.program), record.budget
        if used is not None:
            print(
                f"  {record.program}: registers {used['registers']} of {budget.registers}, "
                f"shared bytes {used['shared_bytes']} of {budget.shared_bytes}, "
                f"spilled {used['spill_store_bytes'] + used['spill_load_bytes']}"
            )
        outcome.failures += budget_faults(record, kernels, target)
    for name in sorted(set(kernels) - {record.program for record in records}):
        outcome.failures.append(f"kernel {name} is in the module without a record")
    budgets = "a budget is exceeded" if outcome.failures else "budgets hold"
    if core_seconds > CORE_SECONDS_LIMIT:
        outcome.failures.append(f"cold compilation took {core_seconds:.1f} core-seconds, limit {CORE_SECONDS_LIMIT}")
    count = f"{len(records)} program{'s' if len(records) > 1 else ''}"
    outcome.compiled = f"{count}, {core_seconds:.1f} core-seconds (limit {CORE_SECONDS_LIMIT:.0f}), {budgets}"


def _run_tests(outcome: Outcome, tests: list[Path], selection: list[str], what: str) -> str:
    if not tests:
        return f"not run (the package has no {what})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, tests), *selection]
    status = subprocess.run(command).returncode
    if status == 0:
        return "passed"
    if status == _NO_TESTS_COLLECTED:
        return f"not run (the package has no {what})"
    outcome.failures.append(f"the {what} failed")
    return "failed"


def run_emulated(outcome: Outcome, folder: Path, target: Target) -> str:
    """Run a package's emulation tests for one architecture and return one phrase about it.

    They are the tests in `tests/test_*_emulated.py` with the architecture's name among their parameters.
    """
    tests = sorted((folder / "tests").glob("test_*_emulated.py"))
    return _run_tests(outcome, tests, ["-k", target.name], "emulation tests")


def run_measured(outcome: Outcome, folder: Path, target: Target) -> str:
    """Run a package's GPU tests if a device of the architecture is present and return one phrase about it."""
    import torch

    present = torch.cuda.is_available() and torch.cuda.get_device_capability() == target.compute_capability
    if not present:
        return f"not run (no {target.name} device here)"
    name = torch.cuda.get_device_name()
    return f"{_run_tests(outcome, [folder / 'tests'], ['-m', 'gpu'], 'GPU tests')} on {name}"


def check_package(package: str, folder: Path, target: Target) -> Outcome | None:
    """Check one package on one architecture; None when it has no record there.

    Parameters
    ----------
    package
        Import name.
    folder
        Its folder in the checkout, which holds `tests/`.
    target
        The architecture.
    """
    records = programs_of(package).records_for(target.name)
    if not records:
        return None
    print(f"{package}: {target.name}", flush=True)
    outcome = Outcome(package)
    _compile(outcome, records, target)
    if not outcome.failures:
        outcome.emulated = run_emulated(outcome, folder, target)
        outcome.measured = run_measured(outcome, folder, target)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0, or 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.testing.arch", description=__doc__.splitlines()[0])
    parser.add_argument("architecture", choices=TARGETS)
    parser.add_argument("packages", nargs="*", help="import names (default: all of the checkout)")
    options = parser.parse_args(arguments)
    target = target_named(options.architecture)
    folders = checkout_packages(Path.cwd())
    for package in options.packages:
        if package not in folders:
            parser.error(f"{package} is not among {', '.join(folders)}")
    outcomes = {name: check_package(name, folders[name], target) for name in options.packages or folders}
    print(f"\n{target.name}, what was shown here:")
    failed = False
    for package, outcome in outcomes.items():
        if outcome is None:
            print(f"{package}: no CUDA programs for {target.name}, nothing to show")
            continue
        for failure in outcome.failures:
            print(f"{package}: FAILED: {failure}")
        failed = failed or bool(outcome.failures)
        print(f"{package}: compiled: {outcome.compiled}; emulated: {outcome.emulated}; on a GPU: {outcome.measured}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
