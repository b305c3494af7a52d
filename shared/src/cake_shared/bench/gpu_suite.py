"""A package's bench on the GPU: checks first, then every cell in two fresh processes with opposite orders."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cake_shared.bench.environment import describe_environment
from cake_shared.bench.result import Result, Table
from cake_shared.bench.timing import SAME_ARM, compare

MODES = ("graph", "eager")


@dataclass(frozen=True)
class GpuCell:
    """One comparison on the GPU. The first arm is ours, the others are peers.

    Attributes
    ----------
    name : str
        Unique in the suite.
    calls : callable
        Returns, for each mode, the arms by name: calls that enqueue work on the current stream. Those of "graph" are
        captured.
    check : callable
        Returns, for each arm, its error against float64 and the limit; run before anything is timed.
    """

    name: str
    calls: Callable[[], dict[str, dict[str, Callable[[], object]]]]
    check: Callable[[], dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class GpuSuite:
    """What a package measures on a GPU. `script` is the file whose `main` runs the suite.

    `tables` makes the result's tables from the figures of all cells, `findings` are measured beside them. `groups` are
    samples of each cell, order and mode. `facts` adds to the environment what only the package knows, `grid` makes
    of the figures what the plot shows.
    """

    package: str
    script: Path
    cells: Sequence[GpuCell]
    tables: Callable[[dict], list[Table]]
    groups: dict[str, int] = field(default_factory=lambda: {"graph": 25, "eager": 15})
    findings: Sequence[Callable[[], tuple[Table, object]]] = ()
    facts: Callable[[], dict] = dict
    grid: Callable[[dict], dict] | None = None

    @property
    def root(self) -> Path:
        """The checkout that the script belongs to: packages/<package>/benchmarks/<script>."""
        return self.script.resolve().parents[3]

    def result_path(self, gpu: str) -> Path:
        """Where the results of a GPU are kept: `results/h200.json` for "NVIDIA H200"."""
        return self.script.resolve().parent / "results" / f"{gpu.split()[-1].lower()}.json"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The command line of a bench script; returns the exit status."""
        parser = argparse.ArgumentParser(description=f"Measures {self.package} beside its peers on the GPU.")
        parser.add_argument("--write", action="store_true", help="write the result files of this package")
        parser.add_argument("--out", type=Path, help="write the result there instead of into the package")
        parser.add_argument("--only", default="", help="cells whose names contain this text")
        parser.add_argument("--samples", type=int, help="samples of a cell, order and mode, for a quick look")
        parser.add_argument("--seconds", type=float, default=3600.0, help="after which a process begins no cell")
        parser.add_argument("--commit", help="commit of this tree, where git cannot say it")
        parser.add_argument("--child", choices=["forward", "reverse"], help=argparse.SUPPRESS)
        parser.add_argument("--request", type=Path, help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        groups = dict.fromkeys(MODES, options.samples) if options.samples else self.groups
        if options.child:
            answer = self._child(options.child == "reverse", options.only, groups, options.seconds)
            options.request.write_text(json.dumps(answer))
            return 0
        result = self.measure(options.only, groups, options.seconds)
        if options.commit:
            result.environment["commit"] = options.commit
        print(result.text(), flush=True)
        if options.write or options.out:
            path = options.out or self.result_path(str(result.environment["gpu"]))
            result.save(path)
            print(f"written: {path}")
        for sentence in result.data["refused"]:
            print(f"not timed: {sentence}", file=sys.stderr)
        return 1 if result.data["refused"] else 0

    def measure(self, only: str, groups: dict[str, int], seconds: float) -> Result:
        """Checks and times in one fresh process, times in the opposite order in another, then the findings."""
        begin = time.perf_counter()
        environment = describe_environment(self.root)
        runs = self._runs(only, groups, seconds)
        refused = runs[1]["refused"]
        figures: dict[str, dict] = {}
        for name, first in runs[0]["cells"].items():
            if name not in runs[1]["cells"]:
                refused.setdefault(name, f"{name}: no time was left for it")
                continue
            found = {"checks": first["checks"]}
            for mode in MODES:
                samples = [run["cells"][name][mode] for run in runs]
                ours = next(iter(samples[0]))
                result = compare(ours, samples)
                found[mode] = {
                    "median_us": {arm: 1e3 * ms for arm, ms in result.median_ms.items() if arm != SAME_ARM},
                    "ratio_to_ours": {arm: r for arm, r in result.ratio_to_ours.items() if arm not in (ours, SAME_ARM)},
                    "same_arm_spread": result.same_arm_spread,
                    "verdict": result.verdict,
                }
            figures[name] = found
        tables = list(self.tables(figures))
        data: dict = {"cells": figures, "refused": list(refused.values())}
        if self.grid:
            data["grid"] = self.grid(figures)
        for finding in self.findings:
            try:
                table, found = finding()
            except RuntimeError as error:  # what was timed is kept
                data["refused"].append(f"a finding failed: {type(error).__name__}: {error}")
                continue
            tables.append(table)
            data[table.title] = found
        before, after = runs[0]["before"], runs[1]["after"]
        for name, value in before.items():
            same = name == "driver" or after[name] == value
            environment[name] = value if same else f"{value} before, {after[name]} after"
        environment |= self.facts()
        environment["samples"] = ", ".join(f"{2 * groups[mode]} {mode}" for mode in MODES)
        environment["seconds"] = round(time.perf_counter() - begin)
        return Result(self.package, environment, tables, data)

    def _runs(self, only: str, groups: dict[str, int], seconds: float) -> list[dict]:
        """What both processes found. The second imports while the first measures, and touches the GPU after it."""
        orders = ("forward", "reverse")
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{order}.json" for order in orders]
            started = []
            for order, path in zip(orders, paths):
                words = [sys.executable, str(self.script), "--child", order, "--request", str(path), "--only", only]
                words += ["--seconds", str(seconds)]
                if len(set(groups.values())) == 1:
                    words += ["--samples", str(next(iter(groups.values())))]
                started.append(subprocess.Popen(words, stdin=subprocess.PIPE, text=True))
            runs: list[dict] = []
            for order, path, process in zip(orders, paths, started):
                known = json.dumps({"refused": runs[0]["refused"], "cells": list(runs[0]["cells"])} if runs else {})
                process.communicate(known + "\n")
                if process.returncode:
                    for other in started:
                        other.kill()
                    raise RuntimeError(f"{self.package}: the process that times in {order} order failed")
                runs.append(json.loads(path.read_text()))
            return runs

    def _child(self, reverse: bool, only: str, groups: dict[str, int], seconds: float) -> dict:
        from cake_shared.bench.gpu import Flush, captured, gpu_facts, sample

        known = json.loads(sys.stdin.readline() or "{}")
        refused = known.get("refused", {})
        begin = time.monotonic()
        flush, answers, before = Flush(), {}, None
        for cell in self.cells:
            if only not in cell.name or cell.name in refused or (reverse and cell.name not in known["cells"]):
                continue
            if time.monotonic() - begin > seconds:
                if not reverse:
                    refused[cell.name] = f"{cell.name}: no time was left for it"
                continue
            answer: dict[str, object] = {"checks": {}}
            try:
                if not reverse:
                    answer["checks"] = checks = cell.check()
                    wrong = [
                        f"{arm} has error {error:.2g}, the limit is {limit:.2g}"
                        for arm, (error, limit) in checks.items()
                        if not error <= limit
                    ]
                    if wrong:  # what is wrong is not timed, nor anything beside it
                        refused[cell.name] = f"{cell.name}: {'; '.join(wrong)}"
                        continue
                by_mode = cell.calls()
            except RuntimeError as error:  # no program for it, no memory, a fault
                refused[cell.name] = f"{cell.name}: {type(error).__name__}: {error}"
                continue
            before = before or gpu_facts()
            for mode in MODES:
                calls = by_mode[mode]
                if mode == "graph":
                    calls = {arm: captured(call) for arm, call in calls.items()}
                answer[mode] = sample(calls, groups=groups[mode], reverse=reverse, flush=flush)
                calls.clear()
            answers[cell.name] = answer
        return {"cells": answers, "refused": refused, "before": before or gpu_facts(), "after": gpu_facts()}
