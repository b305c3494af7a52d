"""The conformance programs in the emulator: against NumPy, in every completion order, and against the H200."""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest

from cake_shared.emulator import EmulatorError, Options
from cake_shared.emulator.conformance import compare, rounding
from cake_shared.emulator.conformance.emulate import run_case
from cake_shared.emulator.conformance.model import Check
from cake_shared.emulator.conformance.programs import PROGRAMS
from cake_shared.program import programs_of

RESULTS = pathlib.Path(compare.__file__).parent / "results_h200.json"
BY_NAME = {program.name: program for program in PROGRAMS}
REFUSED = [name for name in BY_NAME if "refused" in name]
RUNNING = [name for name in BY_NAME if name not in REFUSED]
ASYNCHRONOUS = [name for name in RUNNING if BY_NAME[name].family != "single instructions"]


@functools.cache
def built(name):
    return BY_NAME[name].build()


def failures(case, data):
    verdicts = (compare.against_reference(check, data[check.buffer]) for check in case.checks)
    return [f"{v.name}: {v.wrong} of {v.elements}: {v.examples}" for v in verdicts if v is not None and not v.passed]


@pytest.mark.parametrize("name", RUNNING)
def test_a_program_gives_what_numpy_and_the_gpu_give(name):
    case = built(name)
    data = run_case(case)
    assert failures(case, data) == []
    if RESULTS.exists():
        measured = json.loads(RESULTS.read_text())["programs"].get(name, {})
        want = measured.get("device_sha256")
        if want is not None:
            assert compare.fingerprint(case.checks, data) == want
        sums = measured.get("device_sums_sha256")
        if sums is not None:
            assert compare.fingerprint(case.checks, data, sums=True) == sums


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_program_is_right_under_every_order_of_completion(name, order):
    case = built(name)
    seeds = 1 if order == "lazy" or BY_NAME[name].family == "own programs" else 3
    for seed in range(seeds):
        assert failures(case, run_case(case, options=Options(order=order, seed=seed))) == [], seed


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_the_gpu_refuses_is_refused(name):
    case = built(name)
    with pytest.raises(EmulatorError) as caught:
        run_case(case)
    assert type(caught.value).__name__ == case.refusal.emulator


def test_results_do_not_depend_on_the_number_of_threads():
    case = built("fp32 arithmetic")
    one, four = (run_case(case, options=Options(threads=threads))["out"] for threads in (1, 4))
    np.testing.assert_array_equal(one, four)


def test_the_judge_sees_a_single_wrong_bit():
    case = built("shuffles")
    data = run_case(case)
    data["out"][777] ^= 4
    assert len(failures(case, data)) == 1
    assert compare.fingerprint(case.checks, data) != compare.fingerprint(case.checks, run_case(case))


# Behind every power of two: moves it by up to two units after its own bits, or cuts it to BF16.
MOVED = """{{ .reg .b32 bits, by;
mov.b32 bits, {0}; mul.lo.u32 by, bits, -1640531535; shr.u32 by, by, 30; min.u32 by, by, 2; add.u32 bits, bits, by;
mov.b32 {0}, bits; }}"""
CUT = "{{ .reg .b32 bits; mov.b32 bits, {0}; and.b32 bits, bits, 0xffff0000; mov.b32 {0}, bits; }}"


def with_powers(case, how):
    """The case with `how` behind every power."""
    power = re.compile(r"^(\s*ex2\.approx(?:\.ftz)?\.f32\s+(%\w+),.*)$", re.MULTILINE)
    texts = {unit: power.sub(lambda m: m[1] + how.format(m[2]), text) for unit, text in case.units().items()}
    assert any(how[:20].format("") in text for text in texts.values())
    return dataclasses.replace(case, ptx=lambda: texts)


@pytest.mark.skipif("gdn rule with every option" not in BY_NAME, reason="the package of the rule is not installed")
def test_the_rule_is_judged_by_what_inexact_powers_explain_and_no_more():
    case = built("gdn rule with every option")
    options = Options(detect="none", threads=2)
    runs = [run_case(c, options=options) for c in (case, with_powers(case, MOVED), with_powers(case, CUT))]
    moved, cut = (
        {c.name: compare.against_device(c, runs[0][c.buffer], run[c.buffer]) for c in case.checks} for run in runs[1:]
    )
    assert any(v.identical < v.elements for v in moved.values())
    assert [str(v) for v in moved.values() if not v.passed] == []
    assert {name for name, v in cut.items() if not v.passed} >= {"1 o", "2 dq", "2 dk", "2 dv"}


def test_an_error_that_no_element_shows_is_seen_in_all_of_them():
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    check = Check("x", "x", "f32", 4096, rule="bound", bound=np.float64(1.0), spread=2.0**-11)
    exact, rounded = values.view(np.uint8), rounding.bf16_round(values).astype(np.uint32) << 16
    assert compare.against_device(check, exact, exact).passed
    verdict = compare.against_device(check, rounded.view(np.uint8), exact)
    assert not verdict.passed
    assert "root mean square" in verdict.examples[0]
    assert compare.against_device(dataclasses.replace(check, spread=None), rounded.view(np.uint8), exact).passed


PACKAGES = ("cake_gdn_det_train", "cake_gdn_train", "dense_projection_det_gemm", "dense_projection_gemm")


def test_every_program_of_the_project_is_in_the_table():
    launched = {
        launch.kernel for name in RUNNING if BY_NAME[name].family == "own programs" for launch in built(name).launches
    }
    for package in PACKAGES:
        if importlib.util.find_spec(package):
            assert {record.program for record in programs_of(package).records_for("sm_90a")} <= launched
