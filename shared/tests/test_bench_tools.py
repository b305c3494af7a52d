"""The repository's own checks: what they object to, and what they let pass."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from cake_shared.program import parse_programs

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "tools").is_dir():
    pytest.skip("not a checkout", allow_module_level=True)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("see /" + "home/someone/file", "a path of one machine"),
        ('open("/' + 'root/x")', "a path of one machine"),
        ("from https://py" + "pi.org/simple", "a package registry's host"),
        ("<" * 7 + " HEAD", "an unresolved merge"),
    ],
)
def test_texts_that_name_a_machine_are_found(line, kind):
    assert [(number, found) for number, found, _ in load("check_text").problems_of(f"fine\n{line}\n")] == [(2, kind)]


@pytest.mark.parametrize(
    "line",
    [
        "packages/work/file.py",
        "/opt/" + "cuda/bin/nvcc",
        "the registry of Python packages",
        "include/cake/work/",
        "a/root/b",
    ],
)
def test_other_texts_pass(line):
    assert load("check_text").problems_of(line) == []


def test_a_stale_readme_is_found(monkeypatch):
    readme = load("readme")
    text = (ROOT / "README.md").read_text()
    monkeypatch.setattr(readme, "quickstart_text", lambda: "what a run found")
    fresh = readme.fresh(text)
    assert "what a run found" in fresh
    assert readme.fresh(fresh) == fresh
    assert readme.fresh(fresh.replace("what a run found", "what another found")) == fresh
    with pytest.raises(ValueError, match="packages:begin"):
        readme.fresh(text.replace("<!-- packages:begin -->", ""))


def a_run(backend, holds=True, commit="unknown"):
    environment = {"cores": 2, "processor": "P", "torch": "T", "load_average": 1.0, "commit": commit, "gpu": "a GPU"}
    proof = {"title": "weights", "why": "so", "hashes": {"this": "a" * 64, "again": "a" * 64}, "holds": holds}
    return {
        "backend": backend,
        "environment": environment,
        "config": {"tokens": 50},
        "loss_nats_per_byte": [5.5] * 20,
        "held_out": {"loss_nats_per_byte": 2.25},
        "training_seconds": 10.0,
        "proof_seconds": 4.0,
        "proofs": [proof],
    }


def test_a_run_on_a_gpu_is_told_with_its_hashes_and_speed():
    readme = load("readme")
    text = readme.run_text(a_run("cuda", commit="abc"), "docs/loss_gpu.png")
    assert "(100 tokens a second)" in text
    assert "on one a GPU (torch T, commit abc)" in text
    assert f"| weights | this, again | `{'a' * 16}` | yes |" in text
    assert "2 cores (P, torch T)" in readme.run_text(a_run("cpu"), "docs/loss.png")
    assert "NOT all" in readme.run_text(a_run("cuda", holds=False), "docs/loss_gpu.png")


def test_a_run_is_kept_by_where_it_was_made(tmp_path, monkeypatch):
    readme = load("readme")
    monkeypatch.setattr(
        readme, "RUNS", {name: (tmp_path / f"{name}.json", tmp_path / f"{name}.png") for name in ("cpu", "gpu")}
    )
    (tmp_path / "report.json").write_text(json.dumps(a_run("cuda")))
    readme.take_run(tmp_path, "0123")
    assert json.loads((tmp_path / "gpu.json").read_text())["environment"]["commit"] == "0123"
    assert (tmp_path / "gpu.png").exists()
    assert not (tmp_path / "cpu.json").exists()
    (tmp_path / "report.json").write_text(json.dumps(a_run("cpu", commit="4567")))
    with pytest.raises(ValueError, match="commit: got 0123, the run says 4567"):
        readme.take_run(tmp_path, "0123")


def test_the_readme_counts_stages_and_states_the_weakest_evidence(monkeypatch):
    readme = load("readme")
    budget = {"threads": 32, "registers": 32, "shared_bytes": 0, "tmem_columns": 0, "ctas_per_sm": 1}
    compiled = {"kind": "compiled", "compiler": "nvcc", "date": "2026-01-01"}
    emulated = {"kind": "emulated", "orders": ["eager"], "date": "2026-01-01"}
    common = {"architecture": "sm_90a", "program": "p", "kind": "portable", "sources": ["s"], "budget": budget}
    records = [{"stage": "a", "evidence": [compiled], **common}, {"stage": "b", "evidence": [emulated], **common}]
    text = json.dumps({"stages": {"a": "x", "b": "y", "c": "z"}, "records": records})
    monkeypatch.setattr(readme, "programs_of", lambda package: parse_programs(package, text))
    assert readme.architecture_cell("package", "sm_90a") == "2 of 3 stages, compiled"
    assert readme.architecture_cell("package", "sm_100a") == "0 of 3 stages"


def test_the_readme_gives_the_two_commands_that_ci_looks_for():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    prefix = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "
    assert commands == [prefix + "quickstart", prefix + "tests"]
    assert "nox -s tests$" in (ROOT / ".ci" / "run").read_text()


def test_a_new_wheel_replaces_those_of_its_version_for_other_platforms(tmp_path, monkeypatch):
    build_wheels = load("build_wheels")

    def build(command, **_):
        folder = Path(command[command.index("--outdir") + 1])
        folder.mkdir()
        (folder / "name-0.1.0-py3-none-any.whl").write_text("new")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build_wheels.subprocess, "run", build)
    kept = ["name-0.0.9-py3-none-any.whl", "name_more-0.1.0-py3-none-any.whl"]
    for wheel in [*kept, "name-0.1.0-py3-none-any.whl", "name-0.1.0-py3-none-linux_x86_64.whl"]:
        (tmp_path / wheel).write_text("old")
    wheel = build_wheels.build_wheel(Path("name"), tmp_path)
    assert wheel.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, wheel.name])
