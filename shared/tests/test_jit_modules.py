"""Sources to loaded module with a real compiler: many processes, killed ones, damage, no compiler, no room to write."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from cake_shared import jit
from cake_shared.errors import BuildError, UnsupportedArchError
from cake_shared.jit import builder, compilers, modules, sources, store
from cake_shared.target import TARGETS
from cake_shared.testing.tiny_package import TinyPackage, counting_nvcc, forget, runs, script, without_compilers

ARCH = "sm_90a"
UNITS = 2  # bind.cu and the one kernel
PROCESSES = 8
WAIT_SECONDS = 120

fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def real_nvcc():
    try:
        return compilers.find_nvcc(TARGETS[ARCH]).path
    except BuildError as error:
        pytest.skip(f"a compiler is what this tests: {error}")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A package of its own name for each test, and an empty cache."""
    name = "cake_tiny_" + "".join(c if c.isalnum() else "_" for c in tmp_path.name)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    package = TinyPackage(tmp_path / "packages", name)
    yield package
    forget(name)


@pytest.fixture
def nvcc(monkeypatch, tmp_path, real_nvcc):
    """A compiler that counts its runs."""
    path = counting_nvcc(tmp_path / "bin" / "nvcc", real_nvcc)
    monkeypatch.setenv("CAKE_NVCC", str(path))
    return path


def compilations(nvcc) -> int:
    """Whole modules compiled: a run for each unit and one to link."""
    assert runs(nvcc) % (UNITS + 1) == 0
    return runs(nvcc) // (UNITS + 1)


def _answer(name, start, results):
    start.wait(WAIT_SECONDS)
    try:
        results.put(jit.load(name, ARCH)["answer"]())
    except BaseException as error:
        results.put(repr(error))


def start_processes(name, count):
    start, results = fork.Barrier(count + 1), fork.Queue()
    processes = [fork.Process(target=_answer, args=(name, start, results)) for _ in range(count)]
    for process in processes:
        process.start()
    start.wait(WAIT_SECONDS)
    return processes, results


def answers(processes, results):
    found = [results.get(timeout=WAIT_SECONDS) for _ in processes]
    for process in processes:
        process.join(WAIT_SECONDS)
    return found


def entries(tmp_path, name):
    return sorted(path.name for path in (tmp_path / "cache" / "modules" / name).iterdir() if path.name[0] != ".")


def test_builds_once_then_loads_without_a_compiler(tiny, nvcc, tmp_path):
    assert jit.load(tiny.name, ARCH)["answer"]() == 42
    assert compilations(nvcc) == 1
    for _ in range(50):
        assert jit.load(tiny.name, ARCH)["answer"]() == 42
    forget(tiny.name)
    assert jit.load(tiny.name, ARCH)["answer"]() == 42
    assert compilations(nvcc) == 1
    assert len(entries(tmp_path, tiny.name)) == 1
    reports = jit.kernel_reports(jit.build_module(tiny.name, ARCH))
    assert set(reports) == {"fill_any"}
    assert 0 < reports["fill_any"].registers <= 32
    assert 0 < jit.core_seconds(jit.build_module(tiny.name, ARCH)) < 60


def test_eight_processes_at_once_build_once(tiny, nvcc, tmp_path):
    processes, results = start_processes(tiny.name, PROCESSES)
    assert answers(processes, results) == [42] * PROCESSES
    assert compilations(nvcc) == 1
    assert len(entries(tmp_path, tiny.name)) == 1


def test_one_killed_half_way_delays_nobody(tiny, real_nvcc, monkeypatch, tmp_path):
    # The first compilation hangs after it has written half of its output; the others are real.
    half_way = tmp_path / "half_way"
    text = f'''case "$*" in *--version*) exec "{real_nvcc}" "$@" ;; esac
if mkdir "{half_way}" 2>/dev/null; then
  printf half > unit_bind.o
  echo $$ > "{half_way}/pid"
  exec sleep 600
fi
exec "{real_nvcc}" "$@"'''
    monkeypatch.setenv("CAKE_NVCC", str(script(tmp_path / "bin" / "nvcc", text)))
    victims, _ = start_processes(tiny.name, 1)
    deadline = time.monotonic() + WAIT_SECONDS
    while not (half_way / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    processes, results = start_processes(tiny.name, PROCESSES - 1)
    time.sleep(0.2)
    assert all(process.is_alive() for process in processes), "they wait for the one that builds"
    victims[0].kill()
    victims[0].join(WAIT_SECONDS)
    try:
        assert answers(processes, results) == [42] * (PROCESSES - 1)
    finally:
        os.kill(int((half_way / "pid").read_text()), signal.SIGKILL)
    left = [p.name for p in (tmp_path / "cache" / "modules" / tiny.name).iterdir() if p.name.startswith(".building")]
    assert left == []
    assert len(entries(tmp_path, tiny.name)) == 1


def test_a_module_of_zero_bytes_is_built_again_by_eight_processes(tiny, nvcc):
    entry = jit.build_module(tiny.name, ARCH)
    (entry / builder.MODULE).write_bytes(b"")
    processes, results = start_processes(tiny.name, PROCESSES)
    assert answers(processes, results) == [42] * PROCESSES
    assert compilations(nvcc) == 2
    assert store.damage_of(entry) is None


def test_a_manifest_without_kernels_is_built_again(tiny, nvcc):
    entry = jit.build_module(tiny.name, ARCH)
    reports = jit.kernel_reports(entry)
    manifest = json.loads((entry / store.MANIFEST).read_text())
    del manifest["kernels"]
    (entry / store.MANIFEST).write_text(json.dumps(manifest))
    assert jit.kernel_reports(jit.build_module(tiny.name, ARCH)) == reports
    assert compilations(nvcc) == 2


def test_a_second_process_needs_no_compiler_at_all(tiny, nvcc, monkeypatch):
    jit.build_module(tiny.name, ARCH)
    without_compilers(monkeypatch)
    processes, results = start_processes(tiny.name, 1)
    assert answers(processes, results) == [42]
    tiny.set_answer(43)
    processes, results = start_processes(tiny.name, 1)
    (refusal,) = answers(processes, results)
    assert "no nvcc for sm_90a" in refusal


def _load_as_nobody(name, results):
    if os.geteuid() == 0:
        os.seteuid(65534)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = jit.load(name, ARCH)["answer"]()
        forget(name)
        second = jit.load(name, ARCH)["answer"]()
    results.put((first, second, [str(w.message) for w in caught if w.category is RuntimeWarning]))


def test_a_directory_that_cannot_be_written_costs_a_warning_not_the_run(real_nvcc, monkeypatch):
    monkeypatch.setenv("CAKE_NVCC", str(real_nvcc))
    root = Path(tempfile.mkdtemp(prefix="cake-read-only-"))
    name = "cake_tiny_read_only"
    try:
        TinyPackage(root, name)
        cache = root / "cache"
        cache.mkdir()
        root.chmod(0o755)
        cache.chmod(0o555)
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setenv("CAKE_CACHE_DIR", str(cache))
        # What the child needs is imported here: as another user it may not be able to read this user's libraries.
        sources.tvm_ffi_facts()
        builder.find_ninja()
        results = fork.Queue()
        child = fork.Process(target=_load_as_nobody, args=(name, results))
        child.start()
        first, second, said = results.get(timeout=WAIT_SECONDS)
        child.join(WAIT_SECONDS)
        assert (first, second) == (42, 42)
        assert len(said) == 1
        assert f"cache directory {cache} cannot be written (Permission denied)" in said[0]
        assert "set CAKE_CACHE_DIR" in said[0]
        assert list(cache.iterdir()) == []
        # A cache that cannot be written but has the module serves it as any other.
        cache.chmod(0o755)
        entry = jit.build_module(name, ARCH)
        entry.parent.chmod(0o555)
        child = fork.Process(target=_load_as_nobody, args=(name, results))
        child.start()
        assert results.get(timeout=WAIT_SECONDS) == (42, 42, [])
        child.join(WAIT_SECONDS)
    finally:
        forget(name)
        shutil.rmtree(root)


def test_a_cache_under_a_file_is_as_good_as_read_only(tiny, nvcc, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"cannot be written \((Not a directory|File exists)\)"):
        assert jit.load(tiny.name, ARCH)["answer"]() == 42


def test_a_module_inside_the_package_is_used_first(tiny, nvcc, monkeypatch, tmp_path):
    prebuilt = tiny.directory / "prebuilt"
    assert jit.build_module_into(tiny.name, ARCH, prebuilt) == prebuilt / ARCH
    assert [p.name for p in prebuilt.iterdir()] == [ARCH]
    without_compilers(monkeypatch)
    monkeypatch.setenv("CAKE_CACHE_DIR", "/nonexistent/cake")
    assert jit.load(tiny.name, ARCH)["answer"]() == 42


def test_a_stale_module_inside_the_package_is_said_and_not_used(tiny, nvcc):
    jit.build_module_into(tiny.name, ARCH, tiny.directory / "prebuilt")
    tiny.set_answer(43)
    with pytest.warns(RuntimeWarning, match="is not used: it is of other sources"):
        assert jit.load(tiny.name, ARCH)["answer"]() == 43
    forget(tiny.name)
    (tiny.directory / "prebuilt" / ARCH / builder.MODULE).write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=r"is not used: module\.so has 0 bytes"):
        assert jit.load(tiny.name, ARCH)["answer"]() == 43


def test_a_refused_source_is_one_error_with_the_compilers_words(tiny, nvcc, tmp_path):
    (tiny.csrc / "number.h").write_text("constexpr int kAnswer = forty_two;\n")
    with pytest.raises(BuildError) as caught:
        jit.build_module(tiny.name, ARCH)
    message = str(caught.value)
    assert f"{tiny.name}: compiling for sm_90a with {nvcc}" in message
    assert 'identifier "forty_two" is undefined' in message
    assert entries(tmp_path, tiny.name) == []
    tiny.set_answer(44)
    assert jit.load(tiny.name, ARCH)["answer"]() == 44


def test_what_is_defined_nowhere_is_found_by_the_linker_not_by_the_first_call(tiny, nvcc):
    with (tiny.csrc / "bind.cu").open("a") as file:
        file.write('extern "C" int defined_nowhere();\nint use = defined_nowhere();\n')
    with pytest.raises(BuildError, match="undefined reference to `defined_nowhere'"):
        jit.load(tiny.name, ARCH)


def test_what_does_not_load_is_a_build_error(tmp_path):
    (tmp_path / builder.MODULE).write_bytes(b"\x7fELF and no more")
    with pytest.raises(BuildError, match=r"module\.so was built but does not load"):
        modules._load_library(tmp_path)


def test_variables_that_change_nvccs_command_line_do_not_reach_it(tiny, nvcc, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-no-such-flag")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-no-such-flag")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert jit.load(tiny.name, ARCH)["answer"]() == 42


def test_ptx_is_of_the_architecture_and_has_line_information(tiny, nvcc):
    texts = jit.ptx_for(tiny.name, ARCH)
    assert set(texts) == {"fill_any"}
    assert ".target sm_90a" in texts["fill_any"]
    assert "fill.cuh" in texts["fill_any"]
    assert ".loc" in texts["fill_any"]
    before = runs(nvcc)
    assert jit.ptx_for(tiny.name, ARCH) == texts
    assert runs(nvcc) == before


def test_unknown_architecture_and_package(tiny):
    with pytest.raises(UnsupportedArchError, match="'sm_80' is not known; known are sm_90a, sm_100a"):
        jit.load(tiny.name, "sm_80")
    with pytest.raises(BuildError, match="has no CUDA program for sm_100a"):
        jit.load(tiny.name, "sm_100a")
    with pytest.raises(BuildError, match="'cake_nowhere' cannot be imported"):
        jit.load("cake_nowhere", ARCH)


def test_key_follows_everything_that_the_module_depends_on(tiny, monkeypatch):
    target = TARGETS[ARCH]
    found = {}

    def key(why):
        forget(tiny.name)
        found[why] = sources.module_sources(tiny.name, target).digest

    key("as it is")
    tiny.set_answer(43)
    key("a header of a header")
    (tiny.csrc / "any" / "fill.cuh").open("a").write("// more\n")
    key("a kernel")
    (tiny.csrc / "bind.cu").open("a").write("// more\n")
    key("bind.cu")
    (tiny.directory / "_version.py").write_text('__version__ = "1.0.1"\n')
    key("the package's version")
    monkeypatch.setattr("cake_shared.__version__", "9.9.9")
    key("cake-shared's version")
    monkeypatch.setattr(sources, "DEVICE_FLAGS", (*sources.DEVICE_FLAGS, "-DX=1"))
    key("a flag")
    monkeypatch.setattr(sources, "FORMAT", sources.FORMAT + 1)
    key("the cache's format")
    assert len(set(found.values())) == len(found)
    again = sources.module_sources(tiny.name, target).digest
    assert again == found["the cache's format"]
    (tiny.csrc / "unused.h").write_text("")
    assert sources.module_sources(tiny.name, target).digest == again


def test_key_follows_a_project_header_of_cake_shared(tiny, monkeypatch, tmp_path):
    before = sources.module_sources(tiny.name, TARGETS[ARCH]).digest
    own, shared = sources.include_directories(tiny.name)
    copy = tmp_path / "include"
    shutil.copytree(shared, copy)
    monkeypatch.setattr(sources, "include_directories", lambda package: (own, copy))
    assert sources.module_sources(tiny.name, TARGETS[ARCH]).digest == before
    (copy / "cake" / "host" / "kernel_ref.h").open("a").write("// more\n")
    assert sources.module_sources(tiny.name, TARGETS[ARCH]).digest != before


def test_entry_names_follow_tvm_ffi_and_compiler(tiny, nvcc, monkeypatch, tmp_path):
    jit.build_module(tiny.name, ARCH)
    facts = sources.tvm_ffi_facts()
    monkeypatch.setattr(modules, "tvm_ffi_facts", lambda: sources.TvmFfi("0.0.1", facts.include, facts.library))
    jit.build_module(tiny.name, ARCH)
    first, second = entries(tmp_path, tiny.name)
    assert ("-ffi0.0.1-" in first) != ("-ffi0.0.1-" in second)
    assert first.split("-nvcc")[1] == second.split("-nvcc")[1]


def test_a_missing_header_of_the_project_is_named(tiny):
    (tiny.csrc / "number.h").write_text('#include "cake/ptx/nothing.h"\n')
    with pytest.raises(BuildError, match=r"number\.h names cake/ptx/nothing\.h, which is in none of"):
        jit.build_module(tiny.name, ARCH)
    (tiny.csrc / "any" / "fill.cuh").unlink()
    with pytest.raises(BuildError, match=r"programs\.json names any/fill\.cuh"):
        jit.build_module(tiny.name, ARCH)


def test_without_ninja_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no ninja: .* pip install ninja"):
        builder.find_ninja()


def test_without_tvm_ffi_the_remedy_is_said(monkeypatch):
    sources.tvm_ffi_facts.cache_clear()
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(BuildError, match=r"apache-tvm-ffi cannot be imported .* pip install apache-tvm-ffi"):
        sources.tvm_ffi_facts()
    sources.tvm_ffi_facts.cache_clear()


def test_paths_with_spaces_and_dollars(nvcc, monkeypatch, tmp_path):
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "a cache $HOME it's: here"))
    monkeypatch.syspath_prepend(str(tmp_path / "so many $packages"))
    TinyPackage(tmp_path / "so many $packages", "cake_tiny_spaces")
    assert jit.load("cake_tiny_spaces", ARCH)["answer"]() == 42
    forget("cake_tiny_spaces")
