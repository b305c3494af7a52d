"""Times `deterministic=False` beside its twin and cuBLAS on a GPU: python benchmarks/bench_gpu.py [--write]."""

import json
import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.bench import Result
from cake_shared.bench.gemm import LIBRARY, STEPS, cell, ours_arms, prepared, rows
from cake_shared.bench.gemm_tables import error_table, ratios_of, summary_table
from cake_shared.bench.gpu_suite import MODES, GpuSuite
from cake_shared.bench.result import Table
from dense_projection_gemm.cuda_plan import SplitPlan

TWIN = "deterministic=True"
FREE = {"deterministic": False}


def runs_split_program(row):
    """Whether a step of the row runs another program than the deterministic form."""
    return any(
        isinstance(prepared(free, row, step, FREE).plan, SplitPlan)
        for step in STEPS.get(row.operation, (row.operation,))
    )


def may_differ(row):
    """The weight gradients of projections and heads are all that a table can list."""
    return row.kind != "router" and any("wgrad" in step for step in STEPS.get(row.operation, (row.operation,)))


def cells():
    """The rows that run a split program, each beside the twin and the library."""
    if not torch.cuda.is_available():
        return []
    arms = [ours_arms(free, "deterministic=False", FREE), ours_arms(det, TWIN)]
    return [cell(row, arms) for row in rows() if may_differ(row) and runs_split_program(row)]


def twin_figures(gpu):
    """What the deterministic package's own bench found on such a GPU; none where there is no such result."""
    name = f"{gpu.split()[-1].lower()}.json"
    path = Path(__file__).resolve().parents[2] / "dense_projection_det_gemm" / "benchmarks" / "results" / name
    return Result.load(path).data["cells"] if path.is_file() else {}


def tables(figures):
    """What the README shows."""
    gpu = torch.cuda.get_device_name()
    twin = twin_figures(gpu)
    made = []
    body = []
    for name, found in figures.items():
        graph, eager = found["graph"], found["eager"]
        ours = graph["median_us"]["deterministic=False"]
        body.append(
            [
                name,
                f"{ours:.1f} us",
                *(f"{found[mode]['ratio_to_ours'][arm]:.3f}" for arm in (TWIN, LIBRARY) for mode in MODES),
                f"{100 * max(graph['same_arm_spread'], eager['same_arm_spread']):.1f} %",
            ]
        )
    columns = ["row", "split, graph", *(f"{arm}, {mode}" for arm in (TWIN, LIBRARY) for mode in MODES), "spread"]
    others = sum(row.name not in figures for row in rows())
    note = (
        f"Time of the others over ours. The other {others} rows run the deterministic program: no split program was "
        "measured to pay there (the rule is in benchmarks/choose.py)."
    )
    made.append(Table("Rows that run a split program", columns, body, note))
    if twin:
        ratios, verdicts = {}, {}
        for mode in MODES:
            ratios[mode] = {**ratios_of(twin, mode), **ratios_of(figures, mode)}
            cells = {**twin, **figures}
            verdicts[mode] = {name: found[mode]["verdict"][LIBRARY] for name, found in cells.items()}
        note = "Rows that run the deterministic program have its ratios, from the bench of its own package."
        made.append(summary_table(ratios, verdicts, f"{LIBRARY}'s time over that of deterministic=False", note))
    if figures:
        made.append(error_table(figures))
    return made


def facts():
    """Versions that decide the speed."""
    from cake_shared import jit
    from cake_shared.target import target_of

    entry = jit.build_module("dense_projection_gemm", target_of().name)
    return {
        "cuda": torch.version.cuda,
        "nvcc": json.loads((entry / "manifest.json").read_text())["compiler"],
        "package": free.__version__,
        "twin": det.__version__,
    }


if __name__ == "__main__":
    suite = GpuSuite("dense_projection_gemm", Path(__file__), cells(), tables, facts=facts)
    sys.exit(suite.main())
