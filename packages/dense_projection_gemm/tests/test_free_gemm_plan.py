"""The split program's plan, and the table that says where it runs."""

import dataclasses
import json

import pytest

from cake_shared.gemm.problem import GemmProblem
from cake_shared.program import programs_of
from dense_projection_gemm import cuda, cuda_plan
from dense_projection_gemm.cuda_plan import KEY, MEASURED, STAGES, plan_measured, plan_split

WGRAD = GemmProblem(1, 512, 4096, 16384, "m", "n", "float32", "n", False, "cuda")


def test_tiles_are_computed_whole_as_long_as_all_clusters_have_one():
    plan = plan_split(dataclasses.replace(WGRAD, m=5120, n=5120), 132)
    assert (plan.clusters, plan.whole_units, plan.split_units) == (66, 396, 4)
    assert plan.workspace_bytes == 0
    plan = plan_split(WGRAD, 132)
    assert (plan.stage, plan.whole_units, plan.split_units, plan.pieces) == ("split_wide", 0, 32, 64)
    plan = plan_split(dataclasses.replace(WGRAD, out_dtype="bfloat16"), 132)
    assert plan.workspace_bytes == 32 * 256 * 256 * 4


def test_the_number_of_multiprocessors_decides():
    assert plan_split(WGRAD, 64).whole_units == 32
    assert plan_split(WGRAD, 1).clusters == 1


def test_short_and_transposed_results_take_slim_tiles():
    for problem in (
        dataclasses.replace(WGRAD, m=48),
        dataclasses.replace(WGRAD, m=4096, n=48, out_major="m"),
    ):
        plan = plan_split(problem, 132)
        assert (plan.stage, plan.split_units) == ("split_slim", 16)
        assert plan.swapped == (problem.out_major == "m")


def test_pieces_hold_parts_of_one_tile_where_that_leaves_enough_of_them():
    for m, n in ((512, 4096), (512, 5120), (48, 4096), (1024, 5120)):
        plan = plan_split(dataclasses.replace(WGRAD, m=m, n=n), 132)
        assert plan.pieces % plan.split_units == 0
        assert plan.pieces <= plan.clusters
    assert plan_split(WGRAD, 132, pieces=66).pieces == 66


def test_no_more_clusters_than_blocks():
    assert plan_split(dataclasses.replace(WGRAD, m=8, n=8, k=100), 132).clusters == 2


def test_a_plan_prints_its_choices_and_is_frozen():
    plan = plan_split(WGRAD, 132)
    for part in ("split_wide", "clusters=66", "whole_units=0", "as they come"):
        assert part in repr(plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.clusters = 1


def test_the_table_names_stages_measurements_and_no_problem_twice():
    stages = set(programs_of("dense_projection_gemm").stages)
    assert set(STAGES) <= stages
    content = json.loads(MEASURED.read_text())
    seen = set()
    for device in content["devices"]:
        assert device["gpu"]
        assert device["date"]
        assert device["result"]
        for row in device["rows"]:
            key = (device["architecture"], device["multiprocessors"], *(row[name] for name in KEY))
            assert key not in seen
            seen.add(key)
            assert row["stage"] in STAGES
            assert row["ratio"] < 0.99


@pytest.fixture
def one_row(monkeypatch):
    row = {name: getattr(WGRAD, name) for name in KEY} | {
        "stage": "split_wide",
        "whole_units": 0,
        "pieces": 64,
        "ratio": 0.9,
    }
    monkeypatch.setattr(cuda_plan, "measured_rows", lambda: {("sm_90a", 132, *(row[name] for name in KEY)): row})
    plan_measured.cache_clear()
    yield
    plan_measured.cache_clear()


@pytest.mark.usefixtures("one_row")
def test_only_what_was_measured_runs_a_split_program():
    """Another architecture, SM count, token count, layout, dtype or accumulation runs the deterministic program."""
    assert plan_measured(WGRAD, "sm_90a", 132) == plan_split(WGRAD, 132, "split_wide", 0, 64)
    assert plan_measured(WGRAD, "sm_100a", 132) is None
    assert plan_measured(WGRAD, "sm_90a", 114) is None
    for change in (
        {"k": 16383},
        {"n": 4104},
        {"a_major": "k"},
        {"out_dtype": "bfloat16"},
        {"accumulate": True},
        {"batch": 2},
        {"out_major": "m"},
    ):
        assert plan_measured(dataclasses.replace(WGRAD, **change), "sm_90a", 132) is None


@pytest.mark.usefixtures("one_row")
def test_the_backend_follows_the_table(monkeypatch):
    """What the table lists goes to the split backend, everything else to the deterministic package."""
    went = []

    class Split:
        def prepare(self, plan, a, b, out):
            went.append(plan)
            return "split"

    class Out:
        class device:
            index = 0

    monkeypatch.setattr(cuda, "_facts_of", lambda index: ("sm_90a", 132))
    monkeypatch.setattr(cuda, "split_backend", lambda device: Split())
    monkeypatch.setattr(cuda.det, "prepare", lambda stage, problem, a, b, out: (stage, "deterministic"))
    plan, run = cuda.prepare("gemm_out", WGRAD, None, None, Out)
    assert (plan, run) == (went[0], "split")
    assert cuda.prepare("gemm_out", dataclasses.replace(WGRAD, k=16000), None, None, Out) == (
        "gemm_out",
        "deterministic",
    )
    assert cuda.prepare("router_out", WGRAD, None, None, Out) == ("router_out", "deterministic")
