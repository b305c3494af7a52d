"""GemmProblem -> SplitPlan: the split program of the CUDA path, and where it has been measured to pay.

Pure and printable, made without a GPU. The program is a choice of `deterministic=False` alone, and only for the
problems that `measured.json` lists for the device's architecture and SM count: every other problem runs the
deterministic program.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cake_shared.gemm.problem import GemmProblem

BLOCK_K = 64  # elements of the contraction that a program fetches at a time
CTAS_PER_CLUSTER = 2
# Stage: rows and columns of the tiles of a cluster's two CTAs, as cake/gemm/tiles.h pairs them.
STAGES = {"split_wide": (2 * 128, 256), "split_slim": (64, 2 * 128)}
GROUP_ROWS = 8  # tiles along m that are visited before the columns advance
KEY = ("batch", "m", "n", "k", "a_major", "b_major", "out_dtype", "out_major", "accumulate")
MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class SplitPlan:
    """How a `GemmProblem` is computed by a split program.

    Attributes
    ----------
    problem
        What is computed.
    stage
        Whose program runs.
    swapped
        The result has unit stride on m: its transpose is computed, `out.T = b.T @ a.T`.
    clusters
        Pairs of CTAs at work.
    whole_units
        Tiles of a pair that are computed whole, one after the other by each cluster.
    split_units
        The others: their contractions, end to end, are cut into `pieces` for as many clusters, which add what they have
        of a tile in the order of arrival.
    pieces
        A multiple of `split_units` where no piece is to have parts of two tiles.
    group_rows
        Order of the tiles.
    order
        How an element is summed.
    workspace_bytes
        FP32 sums of the split tiles of a BF16 result.
    """

    problem: GemmProblem
    stage: str
    swapped: bool
    clusters: int
    whole_units: int
    split_units: int
    pieces: int
    group_rows: int
    order: str
    workspace_bytes: int


@lru_cache(maxsize=1024)
def plan_split(
    problem: GemmProblem,
    multiprocessors: int,
    stage: str | None = None,
    whole_units: int | None = None,
    pieces: int | None = None,
) -> SplitPlan:
    """Return the plan of a problem on so many SMs; the other arguments override the planner for measurements."""
    swapped = problem.out_major == "m"
    m, n = (problem.n, problem.m) if swapped else (problem.m, problem.n)
    stage = stage or ("split_slim" if m <= STAGES["split_slim"][0] else "split_wide")
    unit_m, unit_n = STAGES[stage]
    units = problem.batch * math.ceil(m / unit_m) * math.ceil(n / unit_n)
    blocks = math.ceil(problem.k / BLOCK_K)
    clusters = max(1, min(multiprocessors // CTAS_PER_CLUSTER, units * blocks))
    if whole_units is None:
        whole_units = units // clusters * clusters
    split_units = units - whole_units
    if pieces is None:
        pieces = max(1, clusters // max(1, split_units)) * split_units if split_units <= clusters else clusters
    return SplitPlan(
        problem=problem,
        stage=stage,
        swapped=swapped,
        clusters=clusters,
        whole_units=whole_units,
        split_units=split_units,
        pieces=max(1, min(pieces, clusters)),
        group_rows=GROUP_ROWS,
        order="k ascending in FP32 within a part, parts as they come, then the output",
        workspace_bytes=0 if problem.out_dtype == "float32" else 4 * split_units * unit_m * unit_n,
    )


@functools.cache
def measured_rows() -> dict[tuple, dict]:
    """Return the rows of `measured.json` by architecture, SM count and the problem's `KEY`."""
    content = json.loads(MEASURED.read_text())
    rows = {}
    for device in content["devices"]:
        for row in device["rows"]:
            rows[(device["architecture"], device["multiprocessors"], *(row[name] for name in KEY))] = row
    return rows


@lru_cache(maxsize=1024)
def plan_measured(problem: GemmProblem, architecture: str, multiprocessors: int) -> SplitPlan | None:
    """Return the plan of a problem for which a split program has been measured to pay on such a device, else None."""
    row = measured_rows().get((architecture, multiprocessors, *(getattr(problem, name) for name in KEY)))
    if row is None:
        return None
    return plan_split(problem, multiprocessors, row["stage"], row["whole_units"], row["pieces"])
