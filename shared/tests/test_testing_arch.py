"""What `test-sm_XXX` does and says: budgets against the compiler, only what ran, and a failure for every fault."""

import dataclasses
import json

import pytest

from cake_shared import cli
from cake_shared.errors import BuildError
from cake_shared.jit import compilers
from cake_shared.program import parse_programs, programs_of
from cake_shared.target import TARGETS
from cake_shared.testing import arch
from cake_shared.testing.tiny_package import PROGRAMS, TinyPackage, forget, without_compilers

NAME = "cake_tiny_arch"
USED = {"registers": 32, "shared_bytes": 512, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0}


def record(**budget):
    content = json.loads(json.dumps(PROGRAMS))
    content["records"][0]["budget"] = {
        "threads": 128,
        "registers": 32,
        "shared_bytes": 512,
        "tmem_columns": 0,
        "ctas_per_sm": 16,
        **budget,
    }
    return parse_programs("pkg", json.dumps(content)).records[0]


def test_a_program_within_its_budget_has_no_faults():
    assert arch.budget_faults(record(), {"fill_any": USED}, TARGETS["sm_90a"]) == []


@pytest.mark.parametrize(
    ("budget", "used", "fault"),
    [
        ({}, {"registers": 33}, "uses 33 registers, its budget is 32"),
        ({}, {"shared_bytes": 513}, "uses 513 shared bytes, its budget is 512"),
        ({}, {"spill_load_bytes": 4}, "spills 4 bytes, programs spill nothing"),
        ({}, {"registers": 40}, "12 CTAs fit on an SM, its budget says 16"),
    ],
)
def test_what_exceeds_the_budget_is_named(budget, used, fault):
    faults = arch.budget_faults(record(**budget), {"fill_any": {**USED, **used}}, TARGETS["sm_90a"])
    assert any(fault in text for text in faults)


def test_dynamic_shared_memory_counts_by_its_budget():
    small = dataclasses.replace(record(), budget=dataclasses.replace(record().budget, shared_bytes=20_000))
    (fault,) = arch.budget_faults(small, {"fill_any": USED}, TARGETS["sm_90a"])
    assert fault == "fill_any: 11 CTAs fit on an SM, its budget says 16"


def test_a_program_that_is_not_in_the_module_is_a_fault():
    assert arch.budget_faults(record(), {"other": USED}, TARGETS["sm_90a"]) == [
        "fill_any is not in the module, which has other"
    ]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one package with a program for sm_90a, as the current directory."""
    root = tmp_path / "packages" / NAME
    package = TinyPackage(root / "src", NAME)
    (root / "tests").mkdir()
    monkeypatch.syspath_prepend(str(root / "src"))
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    programs_of.cache_clear()
    yield package
    forget(NAME)


@pytest.fixture
def nvcc():
    try:
        return compilers.find_nvcc(TARGETS["sm_90a"])
    except BuildError as error:
        pytest.skip(f"a compiler is what this tests: {error}")


def test_compiles_and_says_only_what_ran(checkout, nvcc, capsys):
    assert arch.main(["sm_90a"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "sm_90a, what was shown here:"
    assert said[-1].startswith(f"{NAME}: compiled: 1 program, ")
    assert "budgets hold" in said[-1]
    assert "emulated: not run" in said[-1]
    assert "on a GPU: not run" in said[-1]
    assert arch.main(["sm_100a", NAME]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{NAME}: no CUDA programs for sm_100a, nothing to show"


@pytest.mark.parametrize(
    ("name", "old", "new", "failure"),
    [
        ("any/fill.cuh", "kAnswer;", "no_such_name;", 'identifier "no_such_name" is undefined'),
        ("any/fill.cuh", "fill_any(", "drain_any(", "fill_any is not in the module, which has drain_any"),
        ("any/fill.cuh", "fill_any(", "drain_any(", "kernel drain_any is in the module without a record"),
        ("any/fill.cuh", "p.out[", "__shared__ int s[9]; s[threadIdx.x % 9] = 1; p.out[s[0]] = s[p.out[1]]; p.out[",
         "fill_any uses 36 shared bytes, its budget is 0"),
    ],
)  # fmt: skip
def test_every_fault_fails(checkout, nvcc, capfd, name, old, new, failure):
    path = checkout.csrc / name
    path.write_text(path.read_text().replace(old, new))
    if "drain" in new:
        bind = checkout.csrc / "bind.cu"
        bind.write_text(bind.read_text().replace("CAKE_KERNEL_REF(fill_any).name", "result"))
    assert arch.main(["sm_90a", NAME]) == 1
    said = capfd.readouterr().out
    assert f"{NAME}: FAILED: " in said
    assert failure in said


def test_a_slow_cold_compilation_fails(checkout, nvcc, capsys, monkeypatch):
    monkeypatch.setattr(arch, "CORE_SECONDS_LIMIT", 0.01)
    assert arch.main(["sm_90a", NAME]) == 1
    assert "FAILED: cold compilation took " in capsys.readouterr().out


def test_no_compiler_fails_with_the_four_places(checkout, capsys, monkeypatch):
    without_compilers(monkeypatch)
    assert arch.main(["sm_90a", NAME]) == 1
    said = capsys.readouterr().out
    assert "FAILED: no nvcc for sm_90a" in said
    assert "compiled: failed; emulated: not run; on a GPU: not run" in said


def test_emulation_tests_are_those_of_the_architecture(checkout, monkeypatch, capfd):
    tests = arch.checkout_packages(arch.Path.cwd())[NAME] / "tests"
    (tests / "test_tiny_emulated.py").write_text(
        "import pytest\n"
        '@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])\n'
        'def test_it(architecture):\n    assert architecture == "sm_90a"\n'
    )
    (tests / "test_tiny_other.py").write_text("def test_it():\n    assert False\n")
    outcome = arch.Outcome(NAME)
    assert arch.run_emulated(outcome, tests.parent, TARGETS["sm_90a"]) == "passed"
    assert (
        arch.run_emulated(outcome, tests.parent, TARGETS["sm_103a"]) == "not run (the package has no emulation tests)"
    )
    assert outcome.failures == []
    assert arch.run_emulated(outcome, tests.parent, TARGETS["sm_100a"]) == "failed"
    assert outcome.failures == ["the emulation tests failed"]


def test_unknown_names_are_refused(checkout, capsys):
    for command in (["sm_80"], ["sm_90a", "cake_nowhere"]):
        with pytest.raises(SystemExit):
            arch.main(command)


def test_build_command_fills_the_cache_and_folders(checkout, nvcc, capsys, tmp_path):
    assert cli.main(NAME, ["build", "--arch", "sm_90a"]) == 0
    where = capsys.readouterr().out.split(": ")[-1].strip()
    assert where.startswith(str(tmp_path / "cache"))
    assert cli.main(NAME, ["build", "--arch", "sm_90a", "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out" / "sm_90a").iterdir()) == ["manifest.json", "module.so"]


def test_build_command_says_what_is_missing(checkout, capsys, monkeypatch):
    assert cli.main(NAME, ["build", "--arch", "sm_100a"]) == 1
    assert f"{NAME}: {NAME} has no CUDA program for sm_100a" in capsys.readouterr().err
    assert cli.main(NAME, ["build", "--arch", "sm_1"]) == 1
    assert "'sm_1' is not known" in capsys.readouterr().err
    assert cli.main(NAME, ["build", "--arch", "sm_90a", "--arch", "sm_1"]) == 1
    output = capsys.readouterr()
    assert "'sm_1' is not known" in output.err
    assert not output.out, "a wrong name is refused before anything is compiled"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(NAME, ["build"]) == 1
    assert "no CUDA device here: name what to build for, --arch sm_90a" in capsys.readouterr().err
    (checkout.directory / "programs.json").unlink()
    programs_of.cache_clear()
    assert cli.main(NAME, ["build", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out == f"{NAME}: no CUDA programs, nothing to compile\n"
    assert cli.main(NAME, ["build", "--arch", "sm_1"]) == 1
    with pytest.raises(SystemExit):
        cli.main(NAME, [])


def test_build_command_keeps_what_it_builds_or_fails(checkout, nvcc, capsys, monkeypatch, tmp_path):
    """Neither a folder that cannot be made nor a cache that cannot be written passes for success."""
    file = tmp_path / "file"
    file.touch()
    assert cli.main(NAME, ["build", "--arch", "sm_90a", "--out", str(file)]) == 1
    assert f"{NAME}: --out: got {file}, takes a folder that can be written" in capsys.readouterr().err
    monkeypatch.setenv("CAKE_CACHE_DIR", str(file / "cache"))
    assert cli.main(NAME, ["build", "--arch", "sm_90a"]) == 1
    output = capsys.readouterr()
    assert "cannot be written" in output.err
    assert "remedy: set CAKE_CACHE_DIR" in output.err
    assert not output.out
