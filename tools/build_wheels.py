"""Builds the wheels of cake-shared and of every package into dist/, with CUDA modules inside when --arch names some."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cake_shared.errors import UnsupportedArchError
from cake_shared.program import programs_of
from cake_shared.target import target_named

ROOT = Path(__file__).resolve().parents[1]


def projects() -> list[Path]:
    """The folders of all distributions: the shared one, then the packages."""
    return [ROOT / "shared", *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]


def served(project: Path, architectures: list[str]) -> list[str]:
    """Those of the architectures for which the project's records name programs."""
    if project.name == "shared":
        return []
    programs = programs_of(project.name)
    return [architecture for architecture in architectures if programs.records_for(target_named(architecture).name)]


def build_modules(project: Path, architectures: list[str], folder: Path):
    """Compiles the project's CUDA modules of these architectures into `folder`."""
    flags = [part for arch in architectures for part in ("--arch", arch)]
    command = [sys.executable, "-m", project.name, "build", *flags, "--out", str(folder)]
    subprocess.run(command, check=True)


def build_wheel(project: Path, out: Path) -> Path:
    """Builds one wheel with the hatchling that is installed here, without a network; returns its path.

    It takes the place of every wheel of the same project and version in `out`, whatever platform that is for.
    """
    fresh = out / f".{project.name}"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(fresh), str(project)]
    # The reproducible-build date: the same sources give the same wheel.
    variables = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "1577836800")}
    finished = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if finished.returncode:
        sys.stderr.write(finished.stdout + finished.stderr)
        raise SystemExit(f"error: the wheel of {project.name} could not be built")
    (wheel,) = fresh.glob("*.whl")
    wheel = wheel.replace(out / wheel.name)
    fresh.rmdir()
    # pip prefers a wheel for this platform: one with CUDA modules would hide a later one without, however stale it is.
    for other in out.glob("-".join([*wheel.name.split("-")[:2], "*.whl"])):
        if other != wheel:
            other.unlink()
    return wheel


def main() -> int:
    """Builds all wheels; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", default=[], help="build CUDA modules for this architecture in")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    try:
        wanted = {project: served(project, options.arch) for project in projects()}
    except UnsupportedArchError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    for project, architectures in wanted.items():
        if project.name != "shared" and (left := [name for name in options.arch if name not in architectures]):
            print(f"{project.name}: no CUDA programs for {', '.join(left)} yet, its wheel holds none")
        prebuilt = project / "src" / project.name / "prebuilt"
        try:
            if architectures:
                build_modules(project, architectures, prebuilt)
            wheel = build_wheel(project, options.out)
        finally:
            if architectures:
                shutil.rmtree(prebuilt, ignore_errors=True)
        print(wheel.relative_to(ROOT) if wheel.is_relative_to(ROOT) else wheel, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
