"""The conformance programs in the emulator: against NumPy, in every completion order, and against the H200."""

import functools
import importlib.util
import json
import pathlib

import numpy as np
import pytest

from cake_shared.emulator import EmulatorError, Options
from cake_shared.emulator.conformance import compare
from cake_shared.emulator.conformance.emulate import run_case
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


PACKAGES = ("cake_gdn_det_train", "cake_gdn_train", "dense_projection_det_gemm", "dense_projection_gemm")


def test_every_program_of_the_project_is_in_the_table():
    launched = {
        launch.kernel for name in RUNNING if BY_NAME[name].family == "own programs" for launch in built(name).launches
    }
    for package in PACKAGES:
        if importlib.util.find_spec(package):
            assert {record.program for record in programs_of(package).records_for("sm_90a")} <= launched
