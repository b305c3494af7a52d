"""The cache on disk without compilers: whole entries or none, damage found, races lost gracefully."""

import json
import multiprocessing
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from cake_shared.jit import settings, store

ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + bytes(100)


def filled(directory, text=b"x" * 100):
    directory.mkdir(parents=True)
    (directory / "module.so").write_bytes(ELF)
    (directory / "build.log").write_bytes(text)
    store.seal(directory, {"package": "tiny"})
    return directory


def test_a_published_entry_is_found_with_its_facts(tmp_path):
    shelf = store.Shelf(tmp_path / "shelf")
    shelf.prepare()
    assert shelf.find("entry") is None
    entry = shelf.publish(filled(tmp_path / "made"), "entry")
    assert shelf.find("entry") == entry
    assert shelf.find_any("ent") == entry
    assert shelf.find_any("other") is None
    assert store.manifest_of(entry)["package"] == "tiny"


DAMAGES = {
    "zero bytes": lambda e: (e / "module.so").write_bytes(b""),
    "cut short": lambda e: (e / "module.so").write_bytes(ELF[:50]),
    "one bit": lambda e: (e / "module.so").write_bytes(ELF[:-1] + b"\x01"),
    "longer": lambda e: (e / "module.so").write_bytes(ELF + b"\0"),
    "file missing": lambda e: (e / "module.so").unlink(),
    "manifest missing": lambda e: (e / store.MANIFEST).unlink(),
    "manifest empty": lambda e: (e / store.MANIFEST).write_text(""),
    "manifest cut": lambda e: (e / store.MANIFEST).write_text('{"files": {"module.so"'),
    "manifest of another kind": lambda e: (e / store.MANIFEST).write_text("[1]"),
    "manifest without files": lambda e: (e / store.MANIFEST).write_text('{"files": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_not_found_and_is_replaced(tmp_path, damage):
    shelf = store.Shelf(tmp_path / "shelf")
    shelf.prepare()
    entry = shelf.publish(filled(tmp_path / "made"), "entry")
    damage(entry)
    assert shelf.find("entry") is None
    assert shelf.find_any("entry") is None
    assert shelf.publish(filled(tmp_path / "again"), "entry") == entry
    assert shelf.find("entry") == entry
    assert [path.name for path in shelf.directory.iterdir()] == ["entry"]


THINGS = {
    "a file": lambda entry: entry.write_bytes(b""),
    "a dangling link": lambda entry: entry.symlink_to("nowhere"),
    "a link to a file": lambda entry: entry.symlink_to(__file__),
    "a link to a directory": lambda entry: entry.symlink_to(entry.parent),
}


@pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS)
def test_what_is_no_entry_is_replaced(tmp_path, thing):
    """What lies in the place of an entry's directory is moved away as a damaged entry is; what a link names stays."""
    shelf = store.Shelf(tmp_path / "shelf")
    shelf.prepare()
    entry = shelf.directory / "entry"
    thing(entry)
    assert shelf.find("entry") is None
    assert shelf.publish(filled(tmp_path / "made"), "entry") == entry
    assert shelf.find("entry") == entry
    assert [path.name for path in shelf.directory.iterdir()] == ["entry"]
    assert not entry.is_symlink()


@pytest.mark.parametrize("facts", [{}, {"kernels": None}, {"kernels": []}])
def test_a_manifest_that_lacks_a_fact_is_damage(tmp_path, facts):
    shelf = store.Shelf(tmp_path / "shelf", {"kernels": dict})
    shelf.prepare()
    entry = shelf.publish(filled(tmp_path / "made"), "entry")
    store.seal(entry, facts)
    assert store.damage_of(entry) is None
    assert shelf.find("entry") is None
    again = filled(tmp_path / "again")
    store.seal(again, {"kernels": {}})
    shelf.publish(again, "entry")
    assert shelf.find("entry") == entry


def _lock_as_another_user(directory, locks, results):
    if os.geteuid() == 0:  # root may write everything
        os.setuid(65534)
    for name in locks:
        with store.Shelf(directory).lock(name) as locked:
            results.put(locked)


def test_another_users_lock_file_is_no_error():
    """One that may be read locks; one that may not is worked on without, as where a file system has no locks."""
    fork = multiprocessing.get_context("fork")
    directory = Path(tempfile.mkdtemp(prefix="cake-locks-"))
    try:
        directory.chmod(0o777)
        for name, mode in (("readable", 0o444), ("closed", 0)):
            (directory / f".lock-{name}").touch()
            (directory / f".lock-{name}").chmod(mode)
        (directory / ".lock-directory").mkdir()
        results = fork.Queue()
        child = fork.Process(
            target=_lock_as_another_user, args=(directory, ("readable", "closed", "directory"), results)
        )
        child.start()
        assert [results.get(timeout=60) for _ in range(3)] == [True, False, False]
        child.join(60)
    finally:
        shutil.rmtree(directory)


def test_a_sealed_text_that_is_no_library_is_damage(tmp_path):
    directory = tmp_path / "made"
    directory.mkdir()
    (directory / "module.so").write_text("not a library")
    store.seal(directory, {})
    assert store.damage_of(directory) == "module.so is not an ELF shared object"


def test_the_first_to_publish_wins(tmp_path):
    shelf = store.Shelf(tmp_path / "shelf")
    shelf.prepare()
    shelf.publish(filled(tmp_path / "first", b"first"), "entry")
    shelf.publish(filled(tmp_path / "second", b"second"), "entry")
    assert (shelf.directory / "entry" / "build.log").read_bytes() == b"first"


def test_publishing_from_many_threads_over_damage_leaves_one_sound_entry(tmp_path):
    shelf = store.Shelf(tmp_path / "shelf")
    shelf.prepare()
    (shelf.directory / "entry").mkdir()
    (shelf.directory / "entry" / "module.so").write_bytes(b"")
    made = [filled(tmp_path / f"made{i}") for i in range(8)]
    start = threading.Barrier(8)
    errors = []

    def publish(directory):
        start.wait()
        try:
            shelf.publish(directory, "entry")
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(directory,)) for directory in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert shelf.find("entry") is not None
    assert [path.name for path in shelf.directory.iterdir()] == ["entry"]


def test_a_locked_workshop_clears_what_the_dead_left_behind(tmp_path):
    shelf = store.Shelf(tmp_path)
    (tmp_path / ".building-entry-dead" / "scratch").mkdir(parents=True)
    (tmp_path / ".building-entrance-alive").mkdir()
    with shelf.lock("entry") as locked, shelf.workshop("entry", locked) as made:
        assert locked
        assert made.is_dir()
        assert not (tmp_path / ".building-entry-dead").exists()
        assert (tmp_path / ".building-entrance-alive").exists()
    assert not made.exists()


def _hold(directory, held, release):
    with store.Shelf(directory).lock("entry"):
        held.set()
        release.wait(60)


def test_a_lock_is_waited_for_and_freed_by_death(tmp_path):
    fork = multiprocessing.get_context("fork")
    held, release = fork.Event(), fork.Event()
    holder = fork.Process(target=_hold, args=(tmp_path, held, release))
    holder.start()
    assert held.wait(60)
    got = threading.Event()

    def take():
        with store.Shelf(tmp_path).lock("entry") as locked:
            assert locked
            got.set()

    waiter = threading.Thread(target=take)
    waiter.start()
    assert not got.wait(0.2)
    holder.kill()
    assert got.wait(60)
    waiter.join()
    holder.join()


def test_file_systems_without_locks_are_worked_on_without(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    shelf = store.Shelf(tmp_path)
    with shelf.lock("entry") as locked, shelf.workshop("entry", locked) as made:
        assert not locked
        shelf.publish(filled(made / "entry"), "entry")
    assert shelf.find("entry") is not None


def test_write_atomically_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    store.write_atomically(tmp_path / "memo", "old")
    monkeypatch.setattr(store.os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        store.write_atomically(tmp_path / "memo", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CAKE_CACHE_DIR": "/a/b"}, "/a/b"),
        ({"CAKE_CACHE_DIR": "~/x"}, "/them/x"),
        ({"CAKE_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/cake"),
        ({"XDG_CACHE_HOME": "relative"}, "/them/.cache/cake"),
        ({}, "/them/.cache/cake"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, expected):
    monkeypatch.setattr(settings.sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/them")
    for name in ("CAKE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(settings.cache_directory()) == expected


def test_manifests_are_plain_json(tmp_path):
    manifest = json.loads((filled(tmp_path / "made") / store.MANIFEST).read_text())
    assert manifest["files"]["module.so"]["bytes"] == len(ELF)
