"""The three environment variables of the project, and what they decide."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def nvcc_setting() -> str | None:
    """Return `CAKE_NVCC`: the compiler to try first."""
    return os.environ.get("CAKE_NVCC") or None


def verbose() -> bool:
    """Return whether `CAKE_JIT_VERBOSE` asks for a line on stderr about every decision."""
    return os.environ.get("CAKE_JIT_VERBOSE", "") not in ("", "0")


def say(text: str) -> None:
    """Print one line to stderr where `CAKE_JIT_VERBOSE` asks for it."""
    if verbose():
        print(f"cake jit: {text}", file=sys.stderr, flush=True)


def cache_directory() -> Path:
    """Return where modules are kept: `CAKE_CACHE_DIR`, else `cake` in the platform's cache directory of the user."""
    chosen = os.environ.get("CAKE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cake"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "cake" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "cake"
