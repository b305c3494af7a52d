"""The cache on disk: entries that appear whole or not at all, are checked before use, and are built once at a time.

An entry is a directory of files with a `manifest.json` that states the size and SHA-256 of each. It is filled in a
private directory beside its place and published by one rename. A lock (`flock`, which the kernel releases when a
process dies) keeps others from building the same entry meanwhile; where the file system has no locks, entries are built
twice, harmlessly.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from cake_shared.jit import settings

MANIFEST = "manifest.json"


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one, or none, or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_elf_library(path: Path) -> bool:
    """Return whether a file is an ELF shared object, which is what a module must be."""
    with path.open("rb") as file:
        head = file.read(18)
    return len(head) == 18 and head[:4] == b"\x7fELF" and int.from_bytes(head[16:18], "little") == 3


def seal(directory: Path, facts: dict) -> dict:
    """Write the manifest of a filled directory: `facts`, and the size and digest of every file in it."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest_of(path)}
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST
    }
    manifest = {**facts, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    directory.chmod(0o755)  # temporary directories are made for their owner alone; a cache may be shared
    return manifest


def damage_of(directory: Path, facts: Mapping[str, type] = MappingProxyType({})) -> str | None:
    """Return what is wrong with an entry, or None when its manifest and every file are as they were published.

    `facts` are what the manifest must state besides, each with its type.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"]
        for name, kind in facts.items():
            if not isinstance(manifest.get(name), kind):
                return f"the manifest states no {name}"
        for name, stated in files.items():
            path = directory / name
            if path.stat().st_size != stated["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {stated['bytes']}"
            if digest_of(path) != stated["sha256"]:
                return f"{name} has other contents than were published"
            if path.suffix == ".so" and not is_elf_library(path):
                return f"{name} is not an ELF shared object"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None if files else "the manifest lists no files"


def manifest_of(directory: Path) -> dict:
    """Return the manifest of an entry that `damage_of` found sound."""
    return json.loads((directory / MANIFEST).read_text())


def _open_lock(path: Path) -> IO[str]:
    try:
        return path.open("a")
    except PermissionError:  # another user's: flock takes a file that is open for reading, too
        return path.open()


class Shelf:
    """One directory of entries, whose manifests state `facts`."""

    def __init__(self, directory: Path, facts: Mapping[str, type] = MappingProxyType({})):
        self.directory = directory
        self.facts = facts

    def find(self, name: str) -> Path | None:
        """Return the entry's directory if it is there and sound."""
        entry = self.directory / name
        if not os.path.lexists(entry):
            return None
        damage = damage_of(entry, self.facts)
        if damage is not None:
            settings.say(f"{entry} is damaged and is built again: {damage}")
            return None
        return entry

    def find_any(self, prefix: str) -> Path | None:
        """Return a sound entry whose name starts so, the last by name, or None."""
        try:
            names = sorted(
                (path.name for path in self.directory.iterdir() if path.name.startswith(prefix)), reverse=True
            )
        except OSError:
            return None
        return next((entry for entry in map(self.find, names) if entry is not None), None)

    def prepare(self) -> None:
        """Make the directory, and fail with OSError where entries cannot be written."""
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, prefix=".probe-")
        os.close(handle)
        os.unlink(name)

    @contextlib.contextmanager
    def lock(self, name: str):
        """Hold the entry's lock; yields whether there is one, False where file system, platform or rights give none."""
        with contextlib.ExitStack() as held:
            try:
                import fcntl

                fcntl.flock(held.enter_context(_open_lock(self.directory / f".lock-{name}")), fcntl.LOCK_EX)
                locked = True
            except (ImportError, OSError) as error:
                settings.say(f"no lock in {self.directory} ({error}): others may build the same module meanwhile")
                locked = False
            yield locked

    @contextlib.contextmanager
    def workshop(self, name: str, locked: bool):
        """A private directory in which to fill the entry, removed at the end whatever happens."""
        prefix = f".building-{name}-"
        if locked:  # whoever left these held the lock and is dead
            for left in self.directory.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(dir=self.directory, prefix=prefix))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def publish(self, filled: Path, name: str) -> Path:
        """Rename a sealed directory to its place; a sound entry that is there wins, anything else is moved away."""
        entry = self.directory / name
        for _ in range(8):
            try:
                os.rename(filled, entry)
                return entry
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if damage_of(entry, self.facts) is None:
                return entry
            aside = Path(tempfile.mkdtemp(dir=self.directory, prefix=f".damaged-{name}-"))
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                os.rename(entry, aside / "entry")
            shutil.rmtree(aside, ignore_errors=True)
        raise OSError(f"{entry} could not be replaced: it keeps coming back damaged")
