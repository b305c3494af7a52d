"""Records: the schema and its errors, lookups, and the status tables that READMEs are held to."""

import copy
import json
import shutil
import sys

import pytest

from cake_shared import program
from cake_shared.errors import BuildError, UnsupportedArchError
from cake_shared.program import parse_programs, program_for, programs_of, require_programs, status_table
from cake_shared.target import TARGETS

MEASURED = {"kind": "measured", "gpu": "NVIDIA H200", "date": "2026-11-30", "result": "benchmarks/results/r.json"}
RECORD = {
    "stage": "fill",
    "architecture": "sm_90a",
    "program": "fill_any",
    "kind": "portable",
    "sources": ["any/fill.cuh"],
    "budget": {"threads": 128, "registers": 64, "shared_bytes": 1024, "tmem_columns": 0, "ctas_per_sm": 8},
    "evidence": [
        {"kind": "compiled", "compiler": "nvcc 13.0.88", "date": "2026-11-30"},
        {"kind": "emulated", "orders": ["eager", "lazy", "random"], "date": "2026-11-30"},
        MEASURED,
    ],
}
CONTENT = {"stages": {"fill": "one number", "drain": "nothing"}, "records": [RECORD]}


def changed(**changes):
    """The content with fields of its record replaced: `budget_x=` replaces a number, None drops the field."""
    content = copy.deepcopy(CONTENT)
    record = content["records"][0]
    for name, value in changes.items():
        place, field = (record["budget"], name[7:]) if name.startswith("budget_") else (record, name)
        if value is None:
            del place[field]
        else:
            place[field] = value
    return content


def test_what_is_written_is_read():
    programs = parse_programs("pkg", json.dumps(CONTENT))
    (record,) = programs.records
    assert programs.stages == CONTENT["stages"]
    assert (record.program, record.kind, record.sources) == ("fill_any", "portable", ("any/fill.cuh",))
    assert record.budget.registers == 64
    assert [evidence.kind for evidence in record.evidence] == ["compiled", "emulated", "measured"]
    assert record.evidence[1].orders == ("eager", "lazy", "random")
    assert programs.records_for("sm_90a") == (record,)
    assert programs.records_for("sm_100a") == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object, got list"),
        ({"records": []}, r"expected the keys \['records', 'stages'\], got \['records'\]"),
        ({**CONTENT, "more": 1}, "got .*'more'"),
        ({"stages": [], "records": []}, "stages: expected an object of names and texts"),
        ({"stages": {}, "records": {}}, "records: expected a list"),
        (changed(stage="other"), "stage 'other' is not among the stages fill, drain"),
        (changed(architecture="sm_80"), "architecture 'sm_80' is not among sm_90a"),
        (changed(kind="fast"), "kind 'fast' is neither portable nor native"),
        (changed(program="Fill<float>"), "program 'Fill<float>'"),
        (changed(sources=[]), "sources: expected at least one file"),
        (changed(evidence=None), "expected the keys"),
        (changed(budget_registers=None), r"budget: expected the keys"),
        (changed(budget_registers="64"), "budget registers: expected a count, got '64'"),
        (changed(budget_registers=-1), "budget registers: expected a count, got -1"),
        (changed(budget_registers=True), "budget registers: expected a count, got True"),
        (changed(budget_registers=256), "registers 256 is beyond sm_90a's 255"),
        (changed(budget_shared_bytes=240_000), "shared_bytes 240000 is beyond sm_90a's 232448"),
        (changed(budget_tmem_columns=32), "tmem_columns 32 is beyond sm_90a's 0"),
        (changed(budget_ctas_per_sm=9), "ctas_per_sm 9, but 8 fit on an SM of sm_90a"),
        (changed(evidence=[{"kind": "guessed"}]), "expected the kind compiled or emulated or measured, got 'guessed'"),
        (changed(evidence=[{"kind": "compiled", "date": "2026-11-30"}]), r"expected the keys .*compiler"),
        (changed(evidence=[{**MEASURED, "date": "today"}]), "date 'today' is no date"),
        (
            changed(evidence=[{"kind": "emulated", "orders": [], "date": "2026-11-30"}]),
            "orders: expected the completion",
        ),
        ({**CONTENT, "records": [RECORD, RECORD]}, "two records for stage fill on sm_90a"),
    ],
)
def test_what_breaks_the_schema_is_named(content, message):
    with pytest.raises(ValueError, match=rf"^pkg/programs\.json.*{message}"):
        parse_programs("pkg", json.dumps(content))


def test_text_that_is_no_json_is_named():
    with pytest.raises(ValueError, match=r"pkg/programs\.json: Expecting value"):
        parse_programs("pkg", "")


def test_tensor_memory_limits_the_ctas_of_an_sm():
    over = changed(architecture="sm_100a", budget_tmem_columns=128, budget_ctas_per_sm=5)
    with pytest.raises(ValueError, match="ctas_per_sm 5, but 4 fit"):
        parse_programs("pkg", json.dumps(over))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one package with CUDA programs and one without, as the current directory."""
    for name in ("cake_probe_with", "cake_probe_without"):
        source = tmp_path / "packages" / name / "src" / name
        source.mkdir(parents=True)
        (source / "__init__.py").write_text("")
        readme = "# title\n\n<!-- status:begin -->\n<!-- status:end -->\n\ntail\n"
        (tmp_path / "packages" / name / "README.md").write_text(readme)
        monkeypatch.syspath_prepend(str(source.parent))
        programs_of.cache_clear()
    with_programs = tmp_path / "packages" / "cake_probe_with"
    (with_programs / "src" / "cake_probe_with" / "programs.json").write_text(json.dumps(CONTENT))
    results = with_programs / "benchmarks" / "results"
    results.mkdir(parents=True)
    result = {"gpu": "NVIDIA H200", "architecture": "sm_90a", "programs": ["fill_any"], "failed": 0}
    (results / "r.json").write_text(json.dumps(result))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    programs_of.cache_clear()
    for name in ("cake_probe_with", "cake_probe_without"):
        sys.modules.pop(name, None)


def test_lookups(checkout):
    assert program_for("cake_probe_with", "fill", "sm_90a").program == "fill_any"
    with pytest.raises(UnsupportedArchError) as caught:
        program_for("cake_probe_with", "fill", "sm_100a")
    for part in ("cake_probe_with", "'fill'", "sm_100a", "served on: sm_90a", "move the tensors to the CPU"):
        assert part in str(caught.value)
    with pytest.raises(UnsupportedArchError, match=r"'drain' on sm_90a .*no architecture yet"):
        require_programs("cake_probe_with", "sm_90a")
    with pytest.raises(UnsupportedArchError, match="cake_probe_without has no CUDA programs yet, so none for sm_90a"):
        require_programs("cake_probe_without", "sm_90a")
    with pytest.raises(BuildError, match="'cake_probe_nowhere' cannot be imported"):
        programs_of("cake_probe_nowhere")


def test_require_programs_returns_every_stage_in_order(checkout, monkeypatch):
    both = changed()
    both["records"].append({**both["records"][0], "stage": "drain", "program": "drain_any"})
    path = checkout / "packages" / "cake_probe_with" / "src" / "cake_probe_with" / "programs.json"
    path.write_text(json.dumps(both))
    programs_of.cache_clear()
    assert [r.program for r in require_programs("cake_probe_with", "sm_90a")] == ["fill_any", "drain_any"]


def test_status_says_no_more_than_the_records(checkout):
    table = status_table("cake_probe_with")
    assert (
        "| fill | one number | fill_any (portable) | measured (NVIDIA H200, 2026-11-30), emulated, compiled |" in table
    )
    assert "| drain | nothing | none | no program yet | no program yet | no program yet | no program yet |" in table
    assert table.splitlines()[2].count("no program yet") == len(TARGETS) - 1
    assert "emulated for several, it is one program emulated" in table
    assert status_table("cake_probe_without").startswith("No CUDA programs of its own")


def test_status_check_write_check(checkout, capsys):
    assert program.main(["status", "--check"]) == 1
    said = capsys.readouterr().err
    assert said.count("the status table is stale") == 2
    assert program.main(["status", "--write"]) == 0
    assert program.main(["status", "--check"]) == 0
    readme = (checkout / "packages" / "cake_probe_with" / "README.md").read_text()
    assert readme.startswith("# title\n")
    assert readme.endswith("<!-- status:end -->\n\ntail\n")
    assert status_table("cake_probe_with") in readme


def test_status_says_which_version_was_measured(checkout):
    path = checkout / "packages" / "cake_probe_with" / "benchmarks" / "results" / "r.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cake_probe_with": "0.1.0"}))
    assert program.main(["status", "--write"]) == 0
    readme = (path.parents[2] / "README.md").read_text()
    assert "measured (0.1.0, NVIDIA H200, 2026-11-30), emulated" in readme


def test_status_needs_its_marks(checkout, capsys):
    (checkout / "packages" / "cake_probe_with" / "README.md").write_text("# title\n")
    assert program.main(["status", "--write", "cake_probe_with"]) == 1
    assert "no lines <!-- status:begin --> and <!-- status:end -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "is not there"),
        ({"gpu": "other", "architecture": "sm_90a", "programs": ["fill_any"], "failed": 0}, "is of 'other'"),
        ({"gpu": "NVIDIA H200", "architecture": "sm_90a", "programs": [], "failed": 0}, "does not cover this program"),
        (
            {"gpu": "NVIDIA H200", "architecture": "sm_100a", "programs": ["fill_any"], "failed": 0},
            "does not cover this program",
        ),
        ({"gpu": "NVIDIA H200", "architecture": "sm_90a", "programs": ["fill_any"], "failed": 2}, "states 2 failures"),
        ({"gpu": "NVIDIA H200", "architecture": "sm_90a", "programs": ["fill_any"]}, "states None failures"),
    ],
)
def test_measured_evidence_is_held_to_its_result_file(checkout, capsys, result, message):
    assert program.main(["status", "--write"]) == 0
    path = checkout / "packages" / "cake_probe_with" / "benchmarks" / "results" / "r.json"
    path.unlink()
    if result is not None:
        path.write_text(json.dumps(result))
    assert program.main(["status", "--check"]) == 1
    assert message in capsys.readouterr().err


def test_the_command_line_refuses_other_places_and_packages(checkout, monkeypatch):
    with pytest.raises(SystemExit):
        program.main(["status", "--check", "cake_probe_nowhere"])
    shutil.rmtree(checkout / "packages")
    with pytest.raises(SystemExit, match="run this in the root of the checkout"):
        program.main(["status", "--check"])
