"""The runs under compute-sanitizer: what counts as nothing found, and what a missing or faulty tool looks like."""

import stat
import sys
import time

import pytest

from cake_shared.testing import sanitizer


@pytest.mark.parametrize(
    ("summary", "clean"),
    [
        ("ERROR SUMMARY: 0 errors", True),
        ("0 errors", True),
        ("0 hazards displayed (0 errors, 0 warnings)", True),
        ("10 errors", False),
        ("20 hazards displayed (20 errors, 0 warnings)", False),
        ("no summary, exit status 1", False),
    ],
)
def test_what_counts_as_nothing(summary, clean):
    assert sanitizer.found_nothing(summary) is clean


def tool(folder, text):
    path = folder / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_all_four_tools_run_and_are_quoted(tmp_path, monkeypatch):
    tool(tmp_path, "import sys; print('========= ERROR SUMMARY:', sys.argv.count('racecheck'), 'errors')")
    monkeypatch.setenv("PATH", str(tmp_path))
    found, clean = sanitizer.sanitize(tmp_path / "script.py")
    said = {name: found[name]["said"] for name in sanitizer.TOOLS}
    assert said == {"memcheck": "0 errors", "racecheck": "1 errors", "initcheck": "0 errors", "synccheck": "0 errors"}
    assert not clean


def test_reports_and_the_version_are_kept(tmp_path, monkeypatch, capsys):
    text = f"import sys\nprint('Version 2026.4' if '--version' in sys.argv else {READS!r} * ('initcheck' in sys.argv))"
    tool(tmp_path, text)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, clean = sanitizer.sanitize(tmp_path / "script.py")
    assert not clean
    assert found["version"] == "Version 2026.4"
    reports = {"Uninitialized __global__ memory read of size 4 bytes at use.cuh:9": 2}
    assert found["initcheck"] == {"said": "2 errors", "reports": reports}
    assert found["memcheck"] == {"said": "no summary, exit status 0", "reports": {}}
    assert "in use.cuh:9" in capsys.readouterr().err


def test_a_tool_that_says_nothing_or_never_ends_is_no_clean_run(tmp_path, monkeypatch):
    tool(tmp_path, "import sys, time; time.sleep(60 if 'memcheck' in sys.argv else 0)")
    monkeypatch.setenv("PATH", str(tmp_path))
    found, clean = sanitizer.sanitize(tmp_path / "script.py", seconds=1.0)
    assert not clean
    assert found["memcheck"]["said"] == "not run to its end within 1 s"
    assert found["synccheck"]["said"] == "no summary, exit status 0"


def test_without_the_tool_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found, clean = sanitizer.sanitize(tmp_path / "script.py")
    assert [found[name]["said"] for name in sanitizer.TOOLS] == ["not run: compute-sanitizer is not on PATH"] * 4
    assert not clean


RACES = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void f()+0x10 in copy.cuh:35
=========     and Read access at void f()+0x90 in use.cuh:7 [16 hazards]
=========     and Read access at void f()+0x98 in use.cuh:8 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
READS = """
========= Uninitialized __global__ memory read of size 4 bytes
=========     at f+0x10 in use.cuh:9
=========     by thread (0,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at f+0x10 in use.cuh:9
========= ERROR SUMMARY: 2 errors
"""


def test_reports_are_counted_by_place():
    found = sanitizer.reports_of(RACES)
    assert found == {
        "race: Write at copy.cuh:35, Read at use.cuh:7": 1,
        "race: Write at copy.cuh:35, Read at use.cuh:8": 1,
    }
    assert sanitizer.reports_of(READS) == {"Uninitialized __global__ memory read of size 4 bytes at use.cuh:9": 2}
    assert sanitizer.summary_of(READS, 0) == ("2 errors", False)


def test_a_launch_that_fails_is_no_clean_run():
    text = "========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.summary_of(text, 0) == ("0 errors", True)
    assert sanitizer.summary_of(text, 1) == ("0 errors, exit status 1", False)


def tool_runs(folder, names):
    return [sanitizer.ToolRun((name,), "memcheck", (name,), folder / f"{name}.txt") for name in names]


def test_side_by_side_each_is_told_as_it_ends_and_what_never_ends_is_stopped(tmp_path, monkeypatch):
    tool(
        tmp_path,
        "import subprocess, sys, time\n"
        "if sys.argv[-1] == 'endless':\n"
        "    subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])\n"  # holds the log open
        "time.sleep(0.5 * (sys.argv[-1] == 'slow'))\n"
        "print('========= ERROR SUMMARY: 0 errors', sys.argv[1:])",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    told, begin = [], time.monotonic()
    sanitizer.run_side_by_side(
        tool_runs(tmp_path, ["endless", "slow", "quick", "third"]),
        lambda run, said: told.append((*run.name, said)),
        workers=3,
        seconds=30.0,
        each=3.0,
        extra=("--word",),
    )
    assert time.monotonic() - begin < 20
    names = [name for name, _ in told]
    assert sorted(names) == ["endless", "quick", "slow", "third"]
    assert names[-1] == "endless"
    assert names.index("quick") < names.index("slow")
    said = dict(told)
    assert said["quick"].nothing
    assert said["quick"].summary == "0 errors ['--tool', 'memcheck', '--word', 'quick']"
    assert not said["endless"].nothing
    assert said["endless"].summary == "not run to its end within 3 s"


def test_a_run_names_the_kernels_that_its_tool_looks_at(tmp_path, monkeypatch):
    tool(tmp_path, "import sys\nprint('========= ERROR SUMMARY: 0 errors', sys.argv[1:])")
    monkeypatch.setenv("PATH", str(tmp_path))
    run = sanitizer.ToolRun(("two",), "racecheck", ("command",), tmp_path / "two.txt", ("wy_any", "wy_sm90"))
    told = []
    sanitizer.run_side_by_side([run], lambda _, said: told.append(said.summary), workers=1, seconds=30.0, each=30.0)
    kernels = ["--kernel-name", "kne=wy_any", "--kernel-name", "kne=wy_sm90"]
    assert told == [f"0 errors {['--tool', 'racecheck', *kernels, 'command']}"]


def test_what_does_not_begin_in_time_is_told_too(tmp_path, monkeypatch):
    tool(tmp_path, "import time; time.sleep(60)")
    monkeypatch.setenv("PATH", str(tmp_path))
    told = {}
    sanitizer.run_side_by_side(
        tool_runs(tmp_path, ["first", "second"]),
        lambda run, said: told.update({run.name[0]: said.summary}),
        workers=1,
        seconds=1.0,
        each=30.0,
    )
    assert told == {"first": "not run to its end within 1 s", "second": "not begun within 1 s"}
