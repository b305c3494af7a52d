"""Runs the benches of a checkout and keeps the tables of its READMEs in step with the committed results."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from cake_shared.bench.grid import plot_grid
from cake_shared.bench.plot import plot_ratios
from cake_shared.bench.result import Result, StaleReadmeError, update_readme


def checkout(start: Path) -> Path:
    """The folder at or above `start` that holds packages/; raises `FileNotFoundError` when there is none."""
    for folder in (start, *start.parents):
        if (folder / "packages").is_dir() and (folder / "shared").is_dir():
            return folder
    raise FileNotFoundError(f"{start} is not inside a checkout of this repository: no packages/ folder above it")


def has_gpu() -> bool:
    """Whether the benches of CUDA programs can run here."""
    import torch

    return torch.cuda.is_available()


def benches(root: Path, names: list[str], gpu: bool = False) -> list[Path]:
    """The bench scripts of the named packages, or of all; raises `ValueError` for a package that has none.

    With `gpu` a package's `bench_gpu.py` takes the place of its `bench.py`, where it has one.
    """
    scripts = {path.parents[1].name: path for path in sorted(root.glob("packages/*/benchmarks/bench.py"))}
    if gpu:
        on_gpu = {path.parents[1].name: path for path in sorted(root.glob("packages/*/benchmarks/bench_gpu.py"))}
        scripts = {**scripts, **on_gpu}
    wanted = [name.replace("-", "_") for name in names] or list(scripts)
    for name in wanted:
        if name not in scripts:
            raise ValueError(f"package: got {name!r}, takes one that has a bench: {', '.join(scripts) or 'none has'}")
    return [scripts[name] for name in wanted]


def run(root: Path, names: list[str], write: bool, extra: list[str]) -> int:
    """Runs each bench in its own process; with `write` also updates result files, plots and READMEs."""
    for script in benches(root, names, has_gpu()):
        words = [sys.executable, str(script), *(["--write"] if write else []), *extra]
        status = subprocess.run(words).returncode
        if status:
            return status
        print(flush=True)
    return readme(root, check=False) if write else 0


def results(root: Path) -> list[Path]:
    """The committed result files of all packages: cpu.json, and one named after each GPU that was measured."""
    found = sorted(root.glob("packages/*/benchmarks/results/*.json"))
    return [path for path in found if "schema" in json.loads(path.read_text())]


def draw(path: Path):
    """Draws the plot of a result file beside it, where the file has a grid of ratios or times."""
    result = Result.load(path)
    where = result.environment.get("gpu", "the CPU") if path.stem != "cpu" else "the CPU"
    title = f"{result.package} on {where}"
    if result.data.get("grid"):
        plot_grid(result.data["grid"], path.with_suffix(".png"), title)
    elif result.data.get("times"):
        plot_ratios(result.data["times"], path.with_suffix(".png"), title)


def readme(root: Path, check: bool) -> int:
    """Writes, or with `check` compares, the tables in the README of every package that has results; draws the plots."""
    stale = 0
    for path in results(root):
        target = path.parents[2] / "README.md"
        plot = path.with_suffix(".png")
        if not check and (not plot.exists() or plot.stat().st_mtime < path.stat().st_mtime):
            draw(path)
        try:
            changed = update_readme(target, Result.load(path), check=check, device=path.stem)
        except StaleReadmeError as problem:
            print(str(problem).replace(str(root) + "/", ""), file=sys.stderr)
            stale = 1
            continue
        if changed:
            print(f"written: {target.relative_to(root)}")
    return stale


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="measure the packages (their CUDA programs where there is a GPU)")
    run_parser.add_argument("packages", nargs="*", help="package names; all by default")
    run_parser.add_argument("--write", action="store_true", help="keep the results and update plots and READMEs")
    readme_parser = commands.add_parser("readme", help="write README tables and plots from the committed results")
    readme_parser.add_argument("--check", action="store_true", help="write nothing, fail where a table is stale")
    # Options that a package's own bench takes (`bench.py --help`) pass through.
    options, extra = parser.parse_known_args(arguments)
    if extra and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    try:
        root = checkout(Path.cwd())
        if options.command == "run":
            return run(root, options.packages, options.write, extra)
        return readme(root, options.check)
    except (FileNotFoundError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
