"""One package's bench: checks, times in two fresh processes, peak memory in one process a figure, tables, files."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cake_shared.bench import memory as peak
from cake_shared.bench.environment import describe_environment
from cake_shared.bench.result import Result, Table
from cake_shared.bench.timing import SAME_ARM, Cell, admitted, compare, time_arms

MIB = 1024 * 1024


@dataclass(frozen=True)
class MemoryCase:
    """Peak memory of one arm: `make()` prepares inputs, warms the libraries up, and returns the call to measure.

    That call returns the bytes of the gradients it leaves, which are not counted.
    """

    name: str
    arm: str
    make: Callable[[], Callable[[], int]]


@dataclass(frozen=True)
class Suite:
    """What a package measures. `script` is the file whose `main` runs the suite: fresh processes start it again."""

    package: str
    script: Path
    cells: Sequence[Cell] = ()
    memory: Sequence[MemoryCase] = ()
    findings: Sequence[Callable[[], tuple[Table, object]]] = ()
    peers: tuple[str, ...] = ()
    notes: Sequence[str] = ()
    missing: Sequence[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The checkout that the script belongs to: packages/<package>/benchmarks/<script>."""
        return self.script.resolve().parents[3]

    @property
    def result_path(self) -> Path:
        """Where the CPU results of this package are kept."""
        return self.script.resolve().parent / "results" / "cpu.json"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The command line of a bench script; returns the exit status."""
        parser = argparse.ArgumentParser(description=f"Measures {self.package} beside its peers on the CPU.")
        parser.add_argument("--write", action="store_true", help="write the result files of this package")
        parser.add_argument("--child", choices=["times", "memory"], help=argparse.SUPPRESS)
        parser.add_argument("--request", type=Path, help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        if options.child:
            request = json.loads(options.request.read_text())
            answer = self._times(request) if options.child == "times" else self._memory(request)
            options.request.write_text(json.dumps(answer))
            return 0
        result = self.measure()
        print(result.text(), flush=True)
        if options.write:
            result.save(self.result_path)
            print(f"written: {self.result_path.relative_to(self.root)}")
        elif self.missing:
            print("\n".join(self.missing))
        return 0

    def measure(self) -> Result:
        """Checks, then times and memory in fresh processes, then the package's own findings."""
        begin = time.perf_counter()
        environment = describe_environment(self.root, self.peers)
        tables, data = [], {}
        if self.cells:
            table, data["times"] = self._time_table()
            tables.append(table)
        if self.memory:
            table, data["memory"] = self._memory_table()
            tables.append(table)
        for finding in self.findings:
            table, figures = finding()
            tables.append(table)
            data[table.title] = figures
        environment["seconds"] = round(time.perf_counter() - begin)
        return Result(self.package, environment, tables, data)

    def _time_table(self) -> tuple[Table, dict]:
        admitted_arms, refused, checks = {}, [], {}
        for cell in self.cells:
            checks[cell.name] = cell.check()
            arms, sentences = admitted(checks[cell.name], cell.arms, cell.name)
            admitted_arms[cell.name] = [arm.name for arm in arms]
            refused += sentences
        runs = [self._ask("times", {"arms": admitted_arms, "reverse": reverse}) for reverse in (False, True)]
        rows, figures = [], {}
        for cell in self.cells:
            ours = cell.arms[0].name
            result = compare(ours, [run[cell.name] for run in runs])
            figures[cell.name] = {
                "checks": checks[cell.name],
                "median_ms": result.median_ms,
                "ratio_to_ours": result.ratio_to_ours,
                "same_arm_spread": result.same_arm_spread,
                "samples_ms": [run[cell.name] for run in runs],
            }
            peers = [name for name in result.median_ms if name not in (ours, SAME_ARM)]
            for name in sorted(peers, key=[arm.name for arm in cell.arms].index):
                rows.append(
                    [
                        cell.name,
                        f"{result.median_ms[ours]:.3g} ms",
                        f"{name}: {result.median_ms[name]:.3g} ms",
                        f"{result.ratio_to_ours[name]:.2f}",
                        f"{100 * result.same_arm_spread:.1f} %",
                        result.verdict[name],
                    ]
                )
            if not peers:
                spread = f"{100 * result.same_arm_spread:.1f} %"
                rows.append([cell.name, f"{result.median_ms[ours]:.3g} ms", "none measured", "", spread, ""])
        note = (
            "Medians of samples taken in turn, in two fresh processes with opposite orders; the spread is that of our "
            "own arm against itself. Every timed arm passed its check against float64 first."
        )
        sentences = [note, *self.notes, *refused, *self.missing]
        return Table(
            "Time, peer's over ours", ["case", "ours", "peer", "ratio", "spread", "verdict"], rows, " ".join(sentences)
        ), figures

    def _memory_table(self) -> tuple[Table, dict]:
        figures: dict[str, dict[str, float]] = {}
        for case in self.memory:
            answer = self._ask("memory", {"name": case.name, "arm": case.arm})
            figures.setdefault(case.name, {})[case.arm] = answer["bytes"] / MIB
        arms = list(dict.fromkeys(case.arm for case in self.memory))
        rows = []
        for name, by_arm in figures.items():
            rows.append([name, *(f"{by_arm[arm]:.0f} MiB" if arm in by_arm else "not measured" for arm in arms)])
        return Table("Peak memory", ["case", *arms], rows, f"Method: {peak.METHOD}."), figures

    def _ask(self, kind: str, request: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "request.json"
            path.write_text(json.dumps(request))
            command = [sys.executable, str(self.script), "--child", kind, "--request", str(path)]
            finished = subprocess.run(command, capture_output=True, text=True)
            if finished.returncode:
                raise RuntimeError(f"{self.package}: the process for {kind} failed:\n{finished.stderr}")
            return json.loads(path.read_text())

    def _times(self, request: dict) -> dict:
        answer = {}
        for cell in self.cells:
            arms = [arm for arm in cell.arms if arm.name in request["arms"][cell.name]]
            answer[cell.name] = time_arms(arms, groups=cell.groups, reverse=request["reverse"])
        return answer

    def _memory(self, request: dict) -> dict:
        (case,) = (c for c in self.memory if (c.name, c.arm) == (request["name"], request["arm"]))
        return {"bytes": peak.peak_growth_bytes(case.make())}
