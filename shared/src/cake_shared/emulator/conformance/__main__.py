"""Command line: run the conformance programs and write one result file."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import sys

from cake_shared.emulator.conformance.device import DriverError
from cake_shared.emulator.conformance.model import Program
from cake_shared.emulator.conformance.programs import PROGRAMS
from cake_shared.emulator.conformance.runner import Side, environment, judge, run_side

# Runs on the GPU side by side: each has a process and a context of its own, most of its time goes into starting them.
DEVICE_JOBS = 6


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cake_shared.emulator.conformance", description=__doc__)
    parser.add_argument("--device", action="store_true", help="run on the GPU too and compare the emulator with it")
    parser.add_argument("--out", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--only", default="", help="only programs whose name or family contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="emulator runs side by side")
    parser.add_argument("--commit", help="the commit to name in the results, where the sources lie outside of git")
    parser.add_argument("--list", action="store_true", help="print the programs and stop")
    return parser.parse_args(argv)


def _line(program: Program, entry: dict) -> str:
    text = f"{entry['verdict']:8} {program.name}"
    for key in ("emulator_error", "device_error"):
        if key in entry:
            text += f"\n         {key}: {entry[key]}"
    for key in ("emulator_against_numpy", "device_against_numpy", "emulator_against_device"):
        for failure in entry.get(key, {}).get("failures", [])[:6]:
            text += f"\n         {key}: {failure}"
    return text


def main(argv: list[str] | None = None) -> int:
    """Run, print one line a program, write the result file; the exit status says whether all agree."""
    arguments = _arguments(argv)
    wanted = [p for p in PROGRAMS if arguments.only in p.name or arguments.only in p.family]
    if not wanted:
        print(f"--only: got {arguments.only!r}, which is in no program's name or family", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{p.family:22} {p.name}" for p in wanted))
        return 0
    from cake_shared.emulator import Module

    # Builds the engine once, before processes race for it.
    Module.from_ptx(".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n", target="sm_90a")
    entries: dict[str, dict] = {}
    try:
        facts = environment(arguments.device, arguments.commit)
    except DriverError as error:
        print(f"--device: {error}", file=sys.stderr)
        return 2
    executor = concurrent.futures.ThreadPoolExecutor
    longest_first = sorted(wanted, key=lambda p: p.family != "own programs")
    with executor(arguments.jobs) as pool, executor(DEVICE_JOBS) as device_pool:
        emulated = {p.name: pool.submit(run_side, "emulator", p) for p in longest_first}
        on_device = {p.name: device_pool.submit(run_side, "device", p) for p in longest_first if arguments.device}
        for program in longest_first:
            measured: Side | None = on_device[program.name].result() if arguments.device else None
            entry = judge(program, emulated[program.name].result(), measured)
            entries[program.name] = entry
            print(_line(program, entry), flush=True)
            if arguments.out:  # what is known so far, should the run be cut short
                known = {p.name: entries[p.name] for p in wanted if p.name in entries}
                result = {"environment": facts, "programs": known}
                arguments.out.write_text(json.dumps(result, indent=1, sort_keys=False) + "\n")
    agreeing = sum(entry["verdict"] == "agrees" for entry in entries.values())
    against = "the GPU and NumPy" if arguments.device else "NumPy"
    print(f"{agreeing} of {len(entries)} programs agree with {against}")
    return 0 if agreeing == len(entries) else 1


if __name__ == "__main__":
    sys.exit(main())
