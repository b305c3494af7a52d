"""The runs under compute-sanitizer: what counts as nothing found, and what a missing or faulty tool looks like."""

import stat
import sys

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
    tool(tmp_path, "import sys; print('========= ERROR SUMMARY:', len([a for a in sys.argv if 'race' in a]), 'errors')")
    monkeypatch.setenv("PATH", str(tmp_path))
    said, clean = sanitizer.sanitize(tmp_path / "script.py")
    assert said == {"memcheck": "0 errors", "racecheck": "1 errors", "initcheck": "0 errors", "synccheck": "0 errors"}
    assert not clean


def test_a_tool_that_says_nothing_or_never_ends_is_no_clean_run(tmp_path, monkeypatch):
    tool(tmp_path, "import sys, time; time.sleep(60 if 'memcheck' in sys.argv else 0)")
    monkeypatch.setenv("PATH", str(tmp_path))
    said, clean = sanitizer.sanitize(tmp_path / "script.py", seconds=1.0)
    assert not clean
    assert said["memcheck"] == "not run to its end within 1 s"
    assert said["synccheck"] == "no summary, exit status 0"


def test_without_the_tool_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said, clean = sanitizer.sanitize(tmp_path / "script.py")
    assert set(said.values()) == {"not run: compute-sanitizer is not on PATH"}
    assert not clean
