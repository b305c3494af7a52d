"""The GPU bench of a package of the gated delta rule: `bench_gpu.py` of each package says what its arms are."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cake_shared.bench.environment import commit, version_of
from cake_shared.bench.gdn_gpu import BETAS, LAUNCHES, OPERATIONS, release, title
from cake_shared.bench.gdn_peers import PEERS, GdnArm, installed_peers
from cake_shared.bench.gdn_published import Published
from cake_shared.bench.gdn_report import (
    check_table,
    digest,
    memory_table,
    plotted,
    summary_table,
    time_table,
)
from cake_shared.bench.gdn_session import Case, Session
from cake_shared.bench.gpu import gpu_facts
from cake_shared.bench.result import Result, Table, write_whole
from cake_shared.target import target_of
from cake_shared.workloads import GDN

# Of a budget: what is kept for the end of the second process, and for tables.
_RESERVE_SECONDS = 8.0


@dataclass(frozen=True)
class GdnBench:
    """What a package measures on a GPU. `script` is the file whose `main` runs it: the second process starts it again.

    Attributes
    ----------
    package : str
        Import name.
    script : pathlib.Path
        packages/<package>/benchmarks/bench_gpu.py.
    arms : callable
        `arms(names)` returns our arm, first, and others of this repository: of those names, or all where none is given.
    findings : sequence of callable
        Each returns a table and the figures behind it.
    peers : tuple of str
        Those of `gdn_peers` to look for.
    published : Published, optional
        Times of another GPU to show beside ours.
    """

    package: str
    script: Path
    arms: Callable[[list[str]], list[GdnArm]]
    findings: Sequence[Callable[[], tuple[Table, object]]] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    published: Published | None = None

    @property
    def root(self) -> Path:
        """The checkout that the script belongs to."""
        return self.script.resolve().parents[3]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The command line of a bench script; returns the exit status."""
        options = self._parse(arguments)
        if options.child:
            return self._child(options)
        if options.tables:
            self.renew_tables(options.tables)
            return 0
        if not torch.cuda.is_available():
            print("error: this bench needs a CUDA device", file=sys.stderr)
            return 2
        path = options.out or self.script.resolve().parent / "results" / f"{gpu_name()}.json"
        keep = (lambda result: result.save(path)) if options.write or options.out else (lambda result: None)
        result = self.measure(options, keep)
        print(result.text(), flush=True)
        keep(result)
        return 0

    def _parse(self, arguments):
        parser = argparse.ArgumentParser(description=f"Measures {self.package} beside its peers on a GPU.")
        parser.add_argument("--write", action="store_true", help="write the result file of this package and GPU")
        parser.add_argument("--out", type=Path, help="write the result to this file instead")
        parser.add_argument(
            "--budget", type=float, default=300.0, help="seconds to spend (300); at least half on times"
        )
        parser.add_argument("--workloads", default="", help="only those with one of these texts, separated by ;")
        parser.add_argument("--operations", default=",".join(OPERATIONS), help="of fwd,fwd+bwd,ckpt")
        parser.add_argument("--betas", default=",".join(BETAS), help="of FP32,BF16")
        parser.add_argument("--launches", default=",".join(LAUNCHES), help="of graph,eager,same")
        parser.add_argument("--arms", default="", help="only ours and those named here, separated by commas")
        parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
        parser.add_argument("--tables", type=Path, help="measure nothing: make a result file's tables from its figures")
        parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
        return parser.parse_args(arguments)

    def cases(self, options) -> list[Case]:
        """The cases that the options leave; raises `ValueError` when they leave none or name something unknown."""
        chosen = {}
        for name, known in (("operations", OPERATIONS), ("betas", tuple(BETAS)), ("launches", LAUNCHES)):
            chosen[name] = [text for text in getattr(options, name).split(",") if text]
            unknown = [text for text in chosen[name] if text not in known]
            if unknown:
                raise ValueError(f"--{name}: got {unknown[0]!r}, takes some of {','.join(known)}")
        wanted = [text.strip() for text in options.workloads.split(";") if text.strip()]
        workloads = [w for w in GDN if not wanted or any(text in title(w) for text in wanted)]
        found = [
            Case(w, beta, operation, launch)
            for w in workloads
            for beta in chosen["betas"]
            for operation in chosen["operations"]
            for launch in chosen["launches"]
            # Only FP32: what the identity of a tensor is worth does not depend on beta.
            if launch != "same" or (beta == "FP32" and operation != "ckpt")
        ]
        if not found:
            raise ValueError(f"--workloads: got {options.workloads!r}, fits none of {'; '.join(title(w) for w in GDN)}")
        return found

    def _all_arms(self, options) -> tuple[list[GdnArm], list[str]]:
        wanted = [name for name in options.arms.split(",") if name]
        peers, missing = installed_peers(tuple(name for name in self.peers if not wanted or name in wanted))
        return [*self.arms(wanted), *peers], missing

    def measure(self, options, keep: Callable[[Result], None] = lambda result: None) -> Result:
        """Checks, memory and times here, the findings, then times in the opposite order in a fresh process.

        `keep` gets the result of the first order before the second begins: what ends the process early then loses half.
        """
        with tempfile.TemporaryDirectory() as folder:
            second = self._start_second(options, Path(folder) / "request.json")
            try:
                return self._measure(options, keep, second, Path(folder) / "request.json")
            finally:
                second.kill()
                second.wait()

    def _measure(self, options, keep, second: subprocess.Popen, request: Path) -> Result:
        begin = time.monotonic()
        environment = describe_gpu(self.root, options.commit)
        before = gpu_facts()
        arms, missing = self._all_arms(options)
        environment.update({arm.name: arm.version for arm in arms}, driver=before["driver"])
        cases = self.cases(options)
        session = Session(arms)
        session.prepare(cases, check=True)
        # The other process prepares meanwhile, and then waits: nothing is timed before it is quiet.
        while not request.with_name("ready").exists() and second.poll() is None:
            time.sleep(0.2)
        print(f"checked: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        tables, data = [], {}
        for finding in self.findings:
            table, figures = finding()
            tables.append(table)
            data[table.title] = figures
        least = options.budget / 4  # however long the preparation took: without times it is worth nothing
        half = max((begin + options.budget - _RESERVE_SECONDS - time.monotonic()) / 2, least)
        runs = [session.run(cases, 0.8 * half, 1.1 * half)]
        release()

        def result(failures: list[str]) -> Result:
            after = gpu_facts()
            facts = {
                f"{key} before, after": f"{before[key]}, {after[key]}"
                for key in ("sm_clock", "memory_clock", "temperature", "power", "throttle_reasons")
            }
            found = digest(runs, arms[0].name)
            measured = {
                "cases": found,
                "checks": session.checks,
                "memory_bytes": session.memory_bytes,
                "grid": plotted(found, list(dict.fromkeys(case.workload for case in cases)), arms[0].name),
                **data,
                "failures": failures,
            }
            facts["seconds"] = str(round(time.monotonic() - begin))
            shown = self._tables(measured, arms[0].name)
            return Result(self.package, {**environment, **facts}, [*shown, *tables], measured)

        failures = [*missing, *session.failures]
        keep(result([*failures, "only the first order was measured"]))
        print(f"first order: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        left = max(begin + options.budget - _RESERVE_SECONDS - time.monotonic(), least)
        answer = self._ask(second, request, {"admitted": session.admitted, "seconds": left})
        runs.append(answer["found"])
        failures += [text for text in answer["failures"] if text not in failures]
        once = [key for run in runs for key in run if sum(key in other for other in runs) == 1]
        if once:
            failures.append(f"{len(once)} cases were measured in one order only, the first is {once[0]}")
        return result(failures)

    def _tables(self, data: dict, ours: str) -> list[Table]:
        """The tables of a result's figures, without those of the findings."""
        found, memory = data["cases"], data["memory_bytes"]
        workloads = [w for w in GDN if any(key.startswith(f"{title(w)} | ") for key in memory)]
        betas = [beta for beta in BETAS if any(key.endswith(f" | {beta}") for key in memory)]
        tables = [summary_table(found, ours)]
        for beta in betas:
            for launch in LAUNCHES:
                in_readme = beta == "FP32" and launch != "same"
                table = time_table(found, workloads, beta, launch, ours, in_readme)
                tables += [table] if table else []
        if self.published:
            beside = [self.published.table(found, workloads, beta, ours) for beta in betas]
            tables += [table for table in beside if table]
        tables += [memory_table(memory, beta, beta == "FP32") for beta in betas]
        return [*tables, check_table(data["checks"])]

    def renew_tables(self, path: Path):
        """Make the tables of a result file again from the figures in it; those of the findings stay as they are."""
        result = Result.load(path)
        ours = next(iter(next(iter(result.data["memory_bytes"].values()))))
        findings = [table for table in result.tables if table.title in result.data]
        tables = [*self._tables(result.data, ours), *findings]
        Result(result.package, result.environment, tables, result.data).save(path)

    def _start_second(self, options, request: Path) -> subprocess.Popen:
        """A fresh process that makes first calls now and measures in the opposite order once `request` is there."""
        words = [sys.executable, str(self.script), "--child", str(request)]
        for name in ("workloads", "operations", "betas", "launches", "arms"):
            words += [f"--{name}", getattr(options, name)]
        return subprocess.Popen(words, stdout=sys.stderr)

    def _ask(self, second: subprocess.Popen, request: Path, content: dict) -> dict:
        """Hand the request to the waiting process; returns its answer."""
        write_whole(request, json.dumps(content))
        status = second.wait()
        if status:
            raise RuntimeError(f"{self.package}: the process of the opposite order failed ({status})")
        return json.loads(request.with_name("answer.json").read_text())

    def _child(self, options) -> int:
        parent = os.getppid()
        arms, _ = self._all_arms(options)
        session = Session(arms, reverse=True)
        session.prepare(self.cases(options), check=False)
        write_whole(options.child.with_name("ready"), "")
        while not options.child.exists():
            if os.getppid() != parent:
                return 1
            time.sleep(0.2)
        request = json.loads(options.child.read_text())
        session.admitted = request["admitted"]
        found = session.run(self.cases(options), 0.9 * request["seconds"], request["seconds"])
        write_whole(options.child.with_name("answer.json"), json.dumps({"found": found, "failures": session.failures}))
        return 0


def gpu_name() -> str:
    """The GPU's name as a file takes it: h200."""
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


def describe_gpu(root: Path, commit_given: str = "") -> dict[str, str]:
    """What a figure was taken on, before the clocks."""
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "architecture": target_of().name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "tilelang": version_of("tilelang"),
        "commit": commit_given or commit(root),
    }
    return {key: str(value) for key, value in facts.items()}
