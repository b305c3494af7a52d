"""The bench: what it refuses to time, what it concludes from samples, what it writes and what it calls stale."""

import subprocess
import sys
from pathlib import Path

import pytest

from cake_shared.bench import Arm, Cell, Result, Suite, Table, describe_environment
from cake_shared.bench.__main__ import benches, checkout, readme
from cake_shared.bench.plot import plot_ratios
from cake_shared.bench.result import BEGIN, END, StaleReadmeError, update_readme, write_whole
from cake_shared.bench.timing import SAME_ARM, RefusedToTime, admitted, compare, time_arms

VERDICTS = ("ours is faster", "at parity", "ours is slower")


def arm(name, log=None):
    return Arm(name, lambda: lambda: log.append(name) if log is not None else None)


def test_an_arm_above_its_limit_is_not_timed():
    arms = [arm("ours"), arm("peer"), arm("wrong peer")]
    checks = {"ours": (1e-7, 1e-6), "peer": (1e-6, 1e-6), "wrong peer": (2e-6, 1e-6)}
    timed, sentences = admitted(checks, arms, "case")
    assert [a.name for a in timed] == ["ours", "peer"]
    assert sentences == ["case: wrong peer has error 2e-06 against float64, the limit is 1e-06: not timed"]


@pytest.mark.parametrize("error", [2e-6, float("nan"), float("inf")])
def test_nothing_is_timed_when_ours_is_wrong(error):
    with pytest.raises(RefusedToTime, match="case: ours has error"):
        admitted({"ours": (error, 1e-6), "peer": (0.0, 1e-6)}, [arm("ours"), arm("peer")], "case")


def test_an_unchecked_arm_is_refused():
    with pytest.raises(RefusedToTime, match="peer was not checked"):
        admitted({"ours": (0.0, 1e-6)}, [arm("ours"), arm("peer")], "case")


@pytest.mark.parametrize("reverse", [False, True])
def test_arms_run_in_turn(reverse):
    log = []
    samples = time_arms([arm("ours", log), arm("peer", log)], groups=3, reverse=reverse, warm=1)
    group = ["peer", "ours", "ours"] if reverse else ["ours", "ours", "peer"]
    assert log == ["ours", "peer", *group * 3]
    assert {name: len(taken) for name, taken in samples.items()} == {"ours": 3, SAME_ARM: 3, "peer": 3}
    assert all(sample >= 0 for taken in samples.values() for sample in taken)


def test_too_few_groups_are_refused():
    with pytest.raises(ValueError, match="groups: got 2, takes 3 or more"):
        time_arms([arm("ours")], groups=2, reverse=False)


@pytest.mark.parametrize(
    ("peer", "verdict"), [(20.0, "ours is faster"), (10.5, "at parity"), (9.5, "at parity"), (5.0, "ours is slower")]
)
def test_a_verdict_is_judged_by_the_spread_of_ours_against_itself(peer, verdict):
    run = {"ours": [10.0] * 10, SAME_ARM: [10.0] * 4 + [11.0] * 6, "peer": [peer] * 10}
    result = compare("ours", [run, run])
    assert result.verdict == {"peer": verdict}
    assert result.ratio_to_ours["peer"] == pytest.approx(peer / 10.0)
    assert result.same_arm_spread == pytest.approx(0.1)


HOLDS_64_MIB_KEEPS_16 = """
import torch
from cake_shared.bench.memory import peak_growth_bytes

kept = []

def call():
    scratch = torch.ones(16 * 1024 * 1024)
    kept.append(scratch[: 4 * 1024 * 1024].clone())
    return kept[0].numel() * 4

print(peak_growth_bytes(call))
"""


def test_peak_growth_sees_what_a_call_held_and_not_what_it_keeps():
    # In a fresh process, as the bench does: this one's heap has free memory that a call could take without growth.
    run = subprocess.run([sys.executable, "-c", HOLDS_64_MIB_KEEPS_16], check=True, capture_output=True, text=True)
    # The allocator may round either.
    assert 56 * 1024**2 < int(run.stdout) < 80 * 1024**2


def sample_result():
    table = Table(
        "Time", ["case", "ours", "peer"], [["forward", "1.00 ms", "2.00 ms"], ["both", "3 ms", "5 ms"]], "How."
    )
    return Result("some_package", {"processor": "a processor", "threads": 2}, [table], {"times": {}})


def test_a_result_survives_its_file(tmp_path):
    path = tmp_path / "results" / "cpu.json"
    sample_result().save(path)
    assert Result.load(path) == sample_result()
    assert path.with_suffix(".csv").read_text().splitlines() == [
        "table,row,column,value",
        "Time,forward,ours,1.00 ms",
        "Time,forward,peer,2.00 ms",
        "Time,both,ours,3 ms",
        "Time,both,peer,5 ms",
    ]
    assert sorted(p.name for p in path.parent.iterdir()) == ["cpu.csv", "cpu.json"]


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="got result schema 2, takes 1"):
        Result.load(path)


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError, match="rows: got one of 1 entries, takes 2"):
        Table("Time", ["case", "ours"], [["forward"]])


def test_readme_tables_follow_the_result(tmp_path):
    target = tmp_path / "README.md"
    target.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    with pytest.raises(StaleReadmeError, match="stale"):
        update_readme(target, sample_result(), check=True)
    assert update_readme(target, sample_result(), check=False)
    text = target.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("After.\n")
    assert "| forward | 1.00 ms | 2.00 ms |" in text
    assert not update_readme(target, sample_result(), check=True)


@pytest.mark.parametrize("text", ["nothing", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_readme_without_markers_is_an_error(tmp_path, text):
    target = tmp_path / "README.md"
    target.write_text(text)
    with pytest.raises(StaleReadmeError, match="once each"):
        update_readme(target, sample_result(), check=False)
    assert target.read_text() == text


def test_writing_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def make_checkout(root: Path) -> Path:
    (root / "shared").mkdir()
    folder = root / "packages" / "a_package" / "benchmarks"
    folder.mkdir(parents=True)
    (root / "packages" / "a_package" / "README.md").write_text(f"{BEGIN}\n{END}\n")
    script = folder / "bench.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from cake_shared.bench import Arm, Cell, Suite\n"
        "def make():\n"
        "    return lambda: sum(range(20000))\n"
        "arms = [Arm('ours', make), Arm('peer', lambda: lambda: sum(range(200000)))]\n"
        "cells = [Cell('summing', arms, lambda: {'ours': (0.0, 0.0), 'peer': (0.0, 0.0)})]\n"
        "sys.exit(Suite('a_package', Path(__file__), cells).main())\n"
    )
    return script


def test_a_suite_runs_from_its_script_to_the_readme(tmp_path):
    script = make_checkout(tmp_path)
    command = [sys.executable, "-m", "cake_shared.bench", "run", "a-package", "--write"]
    finished = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    said = [verdict for verdict in VERDICTS if verdict in finished.stdout]  # which one, a busy machine decides
    assert len(said) == 1
    result = Result.load(script.parent / "results" / "cpu.json")
    assert [len(run["peer"]) for run in result.data["times"]["summing"]["samples_ms"]] == [7, 7]
    assert (script.parent / "results" / "cpu.png").read_bytes()[:4] == b"\x89PNG"
    assert readme(tmp_path, check=True) == 0
    target = tmp_path / "packages" / "a_package" / "README.md"
    target.write_text(target.read_text().replace(said[0], "ours is much faster"))
    assert readme(tmp_path, check=True) == 1


def test_a_failing_process_of_a_suite_is_reported_with_its_reason(tmp_path):
    script = make_checkout(tmp_path)
    script.write_text(
        script.read_text().replace("    return lambda: sum(range(20000))", "    raise OSError('no inputs')")
    )
    suite = Suite("a_package", script, [Cell("summing", [arm("ours")], lambda: {"ours": (0.0, 0.0)})])
    with pytest.raises(RuntimeError, match="no inputs"):
        suite.measure()


def test_unknown_packages_and_places_are_errors(tmp_path):
    make_checkout(tmp_path)
    with pytest.raises(ValueError, match="got 'nothing', takes one that has a bench: a_package"):
        benches(tmp_path, ["nothing"])
    with pytest.raises(FileNotFoundError, match="not inside a checkout"):
        checkout(Path("/"))


def test_the_environment_names_what_a_figure_depends_on(tmp_path):
    facts = describe_environment(tmp_path, ("torch", "a-distribution-that-is-not-there"))
    assert facts["threads"] >= 1
    assert facts["cores"] >= 1
    assert facts["commit"] == "unknown"
    assert facts["a-distribution-that-is-not-there"] == "not installed"


def test_a_plot_is_a_png(tmp_path):
    figures = {"forward": {"ratio_to_ours": {"ours": 1.0, SAME_ARM: 1.01, "peer": 2.0}}}
    plot_ratios(figures, tmp_path / "plots" / "ratios.png", "A package on the CPU")
    assert (tmp_path / "plots" / "ratios.png").read_bytes()[:4] == b"\x89PNG"
