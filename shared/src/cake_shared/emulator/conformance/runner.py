"""Runs the conformance programs, each in a process of its own so that a fault or a hang costs only that program."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pathlib
import platform
import subprocess
import time
from collections.abc import Sequence

import numpy as np

from cake_shared._version import __version__
from cake_shared.emulator.conformance import compare
from cake_shared.emulator.conformance.model import Check, Program, Refusal

PROGRAM_SECONDS = 300


@dataclasses.dataclass
class Side:
    """One run of a program: what it wrote, or why it failed, and how the case that it built is judged."""

    data: dict[str, np.ndarray] | None
    error: str | None
    seconds: float
    checks: Sequence[Check] | None = None
    refusal: Refusal | None = None


def _work(side: str, program: Program, connection) -> None:
    began = time.perf_counter()
    checks, refusal = None, None
    try:
        case = program.build()
        checks, refusal = case.checks, case.refusal
        if side == "device":
            from cake_shared.emulator.conformance.device import Device

            data = Device().run_case(case)
        else:
            from cake_shared.emulator.conformance.emulate import run_case

            data = run_case(case, name=program.name)
        connection.send(Side(data, None, time.perf_counter() - began, checks, refusal))
    except Exception as error:  # whatever a program raises is its result, and is reported as a failure
        connection.send(Side(None, f"{type(error).__name__}: {error}", time.perf_counter() - began, checks, refusal))


def run_side(side: str, program: Program) -> Side:
    """Run ``program`` on ``side`` ("device" or "emulator") in a fresh process, with a time limit."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(side, program.name, sender))
    process.start()
    sender.close()
    result = None
    try:
        if receiver.poll(PROGRAM_SECONDS):
            result = receiver.recv()
    except EOFError:
        process.join(10)
        result = Side(None, f"the process ended with exit code {process.exitcode} without an answer", 0.0)
    if result is None:
        result = Side(None, f"no answer within {PROGRAM_SECONDS} s", float(PROGRAM_SECONDS))
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return result


def _worker(side: str, name: str, connection) -> None:
    from cake_shared.emulator.conformance.programs import PROGRAMS

    _work(side, next(p for p in PROGRAMS if p.name == name), connection)


def _tally(verdicts: Sequence[compare.Verdict]) -> dict:
    bounded = [v for v in verdicts if v.rule == "bound"]
    exact = [v for v in verdicts if v.rule != "bound"]
    summary: dict = {
        "elements": sum(v.elements for v in verdicts),
        "exact": {"elements": sum(v.elements for v in exact), "different": sum(v.wrong for v in exact)},
    }
    if bounded:
        summary["within_bound"] = {
            "elements": sum(v.elements for v in bounded),
            "outside": sum(v.wrong for v in bounded),
            "worst_error": max(v.worst_error for v in bounded),
            "worst_error_as_fraction_of_bound": round(max(v.worst_of_bound for v in bounded), 6),
        }
    spreads = {v.name: float(f"{v.spread:.3g}") for v in verdicts if v.spread is not None}
    if spreads:
        summary["spread"] = spreads
    identical = [v for v in verdicts if v.identical is not None]
    if identical:
        summary["identical"] = {v.name: f"{v.identical} of {v.elements}" for v in identical}
    failures = [f"{v.name}: {v.wrong} of {v.elements}; {'; '.join(v.examples)}" for v in verdicts if not v.passed]
    if failures:
        summary["failures"] = failures
    return summary


def _judge_reference(checks: Sequence[Check], data: dict[str, np.ndarray]) -> list[compare.Verdict]:
    verdicts = (compare.against_reference(check, data[check.buffer]) for check in checks)
    return [v for v in verdicts if v is not None]


def _judge_refusal(refusal: Refusal, emulated: Side, measured: Side | None) -> dict:
    """A program that both sides must refuse: the emulator with its error, the GPU with its own."""
    ended = {"emulator": emulated.error, "device": None if measured is None else measured.error}
    wanted = {"emulator": refusal.emulator, "device": refusal.device}
    refused = {
        side: wanted[side] in (ended[side] or "") for side in wanted if side == "emulator" or measured is not None
    }
    entry = {"refusal_expected": wanted, "refused": refused}
    entry["seconds"] = {"emulator": round(emulated.seconds, 2)}
    return entry | {"verdict": "agrees" if all(refused.values()) else "differs"}


def judge(program: Program, emulated: Side, measured: Side | None) -> dict:
    """One program's entry of the result file."""
    checks, refusal = emulated.checks, emulated.refusal
    if checks is None:  # the run did not come so far
        case = program.build()
        checks, refusal = case.checks, case.refusal
    entry: dict = {"family": program.family, "checks": len(checks)}
    if refusal is not None:
        return entry | _judge_refusal(refusal, emulated, measured)
    passed = emulated.error is None
    if emulated.error:
        entry["emulator_error"] = emulated.error
    if measured is not None and measured.error:
        entry["device_error"] = measured.error
        passed = False
    if emulated.data is not None:
        verdicts = _judge_reference(checks, emulated.data)
        entry["emulator_against_numpy"] = _tally(verdicts)
        passed &= all(v.passed for v in verdicts)
    if measured is not None and measured.data is not None:
        verdicts = _judge_reference(checks, measured.data)
        entry["device_against_numpy"] = _tally(verdicts)
        passed &= all(v.passed for v in verdicts)
        entry["device_sha256"] = compare.fingerprint(checks, measured.data)
        if any(check.same_bits for check in checks):
            entry["device_sums_sha256"] = compare.fingerprint(checks, measured.data, sums=True)
        if emulated.data is not None:
            both = [
                compare.against_device(check, emulated.data[check.buffer], measured.data[check.buffer])
                for check in checks
            ]
            entry["emulator_against_device"] = _tally(both)
            passed &= all(v.passed for v in both)
    entry["seconds"] = {"emulator": round(emulated.seconds, 2)}
    if measured is not None:
        entry["seconds"]["device"] = round(measured.seconds, 2)
    entry["verdict"] = "agrees" if passed else "differs"
    return entry


def environment(with_device: bool, commit: str | None = None) -> dict:
    """What a result depends on: versions, commit (asked of git unless given), and the GPU where there is one."""
    git = ("git", "-C", str(pathlib.Path(__file__).parent))
    facts = {
        "cake_shared": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "commit": commit or _command(*git, "rev-parse", "HEAD"),
        "nvcc": (_command("nvcc", "--version") or "").split("release ")[-1].split("\n")[0] or None,
        "cxx": (_command("c++", "--version") or "").split("\n")[0] or None,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if commit is None:
        changes = _command(*git, "status", "--porcelain", "--untracked-files=no", ".")
        facts["uncommitted_changes"] = bool(changes)
    if with_device:
        from cake_shared.emulator.conformance.device import Device

        facts |= Device().describe()
        drivers = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        facts["driver"] = drivers.split("\n")[0]  # one line a GPU
    return facts


def _command(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
