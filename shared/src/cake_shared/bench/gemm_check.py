"""The command by which a GEMM package compares its programs with float64 on this GPU and writes what records name."""

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import cake_shared
from cake_shared import jit
from cake_shared.bench.environment import commit
from cake_shared.bench.gpu import gpu_facts
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.sanitizer import sanitize


@dataclass
class Findings:
    """What a check found: the relative L2 error of every case, what is wrong with some, hashes of results."""

    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, object] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    def refuse(self, name: str, what: object):
        """Note and print what is wrong with a case."""
        self.failures[name] = what
        print(f"{name}: {what}", file=sys.stderr)


@dataclass(frozen=True)
class GemmCheck:
    """A package's check on the GPU.

    Attributes
    ----------
    package, version
        Whose programs are checked.
    script
        The file that runs the check: packages/<package>/benchmarks/<script>.
    result
        Name of the result file beside it, in results/.
    what
        A line on what is compared.
    repeats
        Of every case.
    measure
        Runs all cases.
    launch
        A few launches of every program, small enough for a tool that slows them down a thousand times.
    """

    package: str
    version: str
    script: Path
    result: str
    what: str
    repeats: int
    measure: Callable[[], Findings]
    launch: Callable[[], None]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """The command line; returns the exit status."""
        parser = argparse.ArgumentParser(description=f"Compares the programs of {self.package} with float64.")
        default = self.script.resolve().parent / "results" / self.result
        parser.add_argument("--out", type=Path, default=default)
        parser.add_argument("--commit", default="", help="commit of the checkout where git cannot say it")
        parser.add_argument("--sanitize", action="store_true", help="run a few launches under compute-sanitizer too")
        parser.add_argument("--seconds", type=float, default=150.0, help="after which the tools are stopped")
        parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        if options.launch:
            self.launch()
            torch.cuda.synchronize()
            return 0
        found = self.measure()
        result, clean = self.describe(found, options.commit), True
        if options.sanitize:
            result["compute_sanitizer"], clean = sanitize(self.script, options.seconds)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        shown = {name: value for name, value in result.items() if name not in ("sha256", "errors")}
        print(json.dumps(shown, indent=1))
        return 1 if found.failures or not clean else 0

    def describe(self, found: Findings, commit_text: str) -> dict:
        """The result file's content."""
        target = target_of()
        manifest = json.loads((jit.build_module(self.package, target.name) / "manifest.json").read_text())
        return {
            "what": self.what,
            "gpu": torch.cuda.get_device_name(),
            "architecture": target.name,
            "driver": gpu_facts()["driver"],
            "date": datetime.date.today().isoformat(),
            "commit": commit_text or commit(self.script.resolve().parents[3]),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nvcc": manifest["compiler"],
            "cake_shared": cake_shared.__version__,
            self.package: self.version,
            "programs": [record.program for record in programs_of(self.package).records_for(target.name)],
            "cases": len(found.errors),
            "repeats": self.repeats,
            "passed": len(found.errors) - len(found.failures),
            "failed": len(found.failures),
            "failures": found.failures,
            **({"sha256": found.sha256} if found.sha256 else {}),
            "errors": {name: float(f"{error:.2e}") for name, error in found.errors.items()},
        }
