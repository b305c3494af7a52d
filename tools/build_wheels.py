"""Builds the wheels of cake-shared and of every package into dist/, with CUDA modules inside when --arch names some."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def projects() -> list[Path]:
    """The folders of all distributions: the shared one, then the packages."""
    return [ROOT / "shared", *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]


def has_programs(project: Path) -> bool:
    """Whether the project holds CUDA sources of its own."""
    return (project / "src" / project.name / "programs.json").is_file()


def build_modules(project: Path, architectures: list[str], folder: Path):
    """Compiles the project's CUDA modules of these architectures into `folder`."""
    flags = [part for arch in architectures for part in ("--arch", arch)]
    command = [sys.executable, "-m", project.name, "build", *flags, "--out", str(folder)]
    subprocess.run(command, check=True)


def build_wheel(project: Path, out: Path):
    """Builds one wheel with the hatchling that is installed here, without a network."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(project)]
    # The reproducible-build date: the same sources give the same wheel.
    variables = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "1577836800")}
    finished = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if finished.returncode:
        sys.stderr.write(finished.stdout + finished.stderr)
        raise SystemExit(f"error: the wheel of {project.name} could not be built")


def main() -> int:
    """Builds all wheels; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", default=[], help="build CUDA modules for this architecture in")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    for project in projects():
        prebuilt = project / "src" / project.name / "prebuilt"
        modules = bool(options.arch) and has_programs(project)
        if options.arch and not modules and project.name != "shared":
            print(f"{project.name}: has no CUDA programs yet, its wheel holds none")
        try:
            if modules:
                build_modules(project, options.arch, prebuilt)
            build_wheel(project, options.out)
        finally:
            if modules:
                shutil.rmtree(prebuilt, ignore_errors=True)
    for wheel in sorted(options.out.glob("*.whl")):
        print(wheel.relative_to(ROOT) if wheel.is_relative_to(ROOT) else wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
