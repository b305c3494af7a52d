"""Times `deterministic=False` beside its twin and cuBLAS on a GPU: python benchmarks/bench_gpu.py [--write]."""

import json
import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.bench import Result
from cake_shared.bench.gemm import CALLS, LIBRARY, cell, ours_arms, rows
from cake_shared.bench.gemm_tables import error_table, ratios_of, summary_table
from cake_shared.bench.gpu_suite import MODES, GpuSuite
from cake_shared.bench.result import Table
from cake_shared.target import target_of
from dense_projection_gemm.cuda_plan import measured_rows

TWIN = "deterministic=True"
FREE = {"deterministic": False}


def split_rows():
    """The rows with a step that runs a split program on this device."""
    measured = set(measured_problems())
    return [row for row in rows() if measured & set(problems(row))]


def measured_problems():
    """Extents and dtype of the weight gradients in measured.json for this device: batch, m, n, k, dtype."""
    device = (target_of().name, torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    for key, row in measured_rows().items():
        if key[:2] == device and not row["accumulate"] and (row["a_major"], row["b_major"]) == ("m", "n"):
            yield row["batch"], row["m"], row["n"], row["k"], row["out_dtype"]


def problems(row):
    """The weight gradients that a row computes in calls of their own, as `measured_problems` gives them."""
    workload = row.workload
    for step in CALLS.get(row.operation, (row.operation,)):
        dtype = {"wgrad FP32": "float32", "wgrad BF16": "bfloat16"}.get(step)
        if dtype and row.kind == "projection":
            yield 1, workload.d_out, workload.d_in, workload.tokens, dtype
        elif dtype and row.kind == "heads":
            yield workload.heads, workload.d_in, workload.d_out, workload.tokens, dtype


def cells():
    """The rows that run a split program, each beside the twin and the library."""
    if not torch.cuda.is_available():
        return []
    return [cell(row, [ours_arms(free, "deterministic=False", FREE), ours_arms(det, TWIN)]) for row in split_rows()]


def twin_figures(gpu):
    """What the bench of this version of the deterministic package found on such a GPU; empty where it did not run."""
    name = f"{gpu.split()[-1].lower()}.json"
    path = Path(__file__).resolve().parents[2] / "dense_projection_det_gemm" / "benchmarks" / "results" / name
    if not path.is_file():
        return {}
    result = Result.load(path)
    if result.environment["package"] != det.__version__:
        version = result.environment["package"]
        print(f"{path} is of version {version}, not {det.__version__}: no table of all rows", file=sys.stderr)
        return {}
    return result.data["cells"]


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
