"""Runs the benches of a checkout and keeps the tables of its READMEs in step with the committed results."""

import argparse
import subprocess
import sys
from pathlib import Path

from cake_shared.bench.plot import plot_ratios
from cake_shared.bench.result import Result, StaleReadmeError, update_readme


def checkout(start: Path) -> Path:
    """The folder at or above `start` that holds packages/; raises `FileNotFoundError` when there is none."""
    for folder in (start, *start.parents):
        if (folder / "packages").is_dir() and (folder / "shared").is_dir():
            return folder
    raise FileNotFoundError(f"{start} is not inside a checkout of this repository: no packages/ folder above it")


def benches(root: Path, names: list[str]) -> list[Path]:
    """The bench scripts of the named packages, or of all; raises `ValueError` for a package that has none."""
    scripts = {path.parents[1].name: path for path in sorted(root.glob("packages/*/benchmarks/bench.py"))}
    wanted = [name.replace("-", "_") for name in names] or list(scripts)
    for name in wanted:
        if name not in scripts:
            raise ValueError(f"package: got {name!r}, takes one that has a bench: {', '.join(scripts) or 'none has'}")
    return [scripts[name] for name in wanted]


def run(root: Path, names: list[str], write: bool) -> int:
    """Runs each bench in its own process; with `write` also updates result files, plots and READMEs."""
    for script in benches(root, names):
        status = subprocess.run([sys.executable, str(script), *(["--write"] if write else [])]).returncode
        if status:
            return status
        print(flush=True)
    if write:
        readme(root, check=False)
        for path in results(root):
            result = Result.load(path)
            if result.data.get("times"):
                plot_ratios(result.data["times"], path.with_suffix(".png"), f"{result.package} on the CPU")
    return 0


def results(root: Path) -> list[Path]:
    """The committed result files of all packages."""
    return sorted(root.glob("packages/*/benchmarks/results/cpu.json"))


def readme(root: Path, check: bool) -> int:
    """Writes, or with `check` compares, the tables in the README of every package that has results."""
    stale = 0
    for path in results(root):
        target = path.parents[2] / "README.md"
        try:
            changed = update_readme(target, Result.load(path), check=check)
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
    run_parser = commands.add_parser("run", help="measure the packages and print their tables")
    run_parser.add_argument("packages", nargs="*", help="package names; all by default")
    run_parser.add_argument("--write", action="store_true", help="keep the results and update plots and READMEs")
    readme_parser = commands.add_parser("readme", help="write the tables of the READMEs from the committed results")
    readme_parser.add_argument("--check", action="store_true", help="write nothing, fail where a table is stale")
    options = parser.parse_args(arguments)
    try:
        root = checkout(Path.cwd())
        if options.command == "run":
            return run(root, options.packages, options.write)
        return readme(root, options.check)
    except (FileNotFoundError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
