"""`python -m <package> build`: compiles a package's CUDA modules ahead of the first call, with or without a GPU."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from cake_shared.errors import BuildError, UnsupportedArchError
from cake_shared.program import programs_of
from cake_shared.target import TARGETS, target_named, target_of


def _architecture_here() -> str:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedArchError(f"no CUDA device here: name what to build for, --arch {' or --arch '.join(TARGETS)}")
    return target_of().name


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"--out: got {out}, takes a folder that can be written ({error.strerror})") from None


def _build(package: str, architectures: list[str], out: Path | None) -> None:
    from cake_shared import jit

    # Before any compilation, which takes minutes: a name that is wrong, and a place where nothing can be kept.
    for architecture in architectures:
        target_named(architecture)
    if not programs_of(package).records:
        print(f"{package}: no CUDA programs, nothing to compile")
        return
    if out is not None:
        _make_folder(out)
    for architecture in architectures or [_architecture_here()]:
        if out is None:
            with warnings.catch_warnings():
                # A module that is built for this process alone would be gone with it.
                warnings.simplefilter("error", RuntimeWarning)
                entry = jit.build_module(package, architecture)
        else:
            entry = jit.build_module_into(package, architecture, out)
        print(f"{package}: {architecture}: {entry}")


def main(package: str, arguments: list[str] | None = None) -> int:
    """Run the command line of a package.

    Parameters
    ----------
    package
        Import name, `cake_gdn_det_train`.
    arguments
        The command line without the program's name; default `sys.argv[1:]`.

    Returns
    -------
    int
        The exit status: 0, or 1 after one line on stderr that says what is missing and what to do.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=f"Tools of {package}.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the CUDA modules; needs nvcc, no GPU")
    build.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help=f"build for it, may be repeated: {', '.join(TARGETS)} (default: that of the CUDA device)",
    )
    build.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/ARCH, for a wheel with modules inside, instead of the cache",
    )
    options = parser.parse_args(arguments)
    try:
        _build(package, options.arch, options.out)
    except (BuildError, UnsupportedArchError, RuntimeWarning) as error:
        print(f"{package}: {error}", file=sys.stderr)
        return 1
    return 0
