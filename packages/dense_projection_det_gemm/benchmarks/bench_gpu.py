"""Times the GEMMs beside cuBLAS on a GPU: python benchmarks/bench_gpu.py [--write] [--only TEXT]."""

import csv
import json
import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
from cake_shared.bench.gemm import LIBRARY, cell, ours_arms, rows
from cake_shared.bench.gemm_tables import (
    error_table,
    published_table,
    ratio_grid,
    ratios_of,
    summary_table,
    workload_table,
)
from cake_shared.bench.gpu import enqueue_microseconds
from cake_shared.bench.gpu_suite import MODES, GpuSuite
from cake_shared.bench.result import Table

PUBLISHED = Path(__file__).parent / "results" / "published_sm107a.csv"
READING = (
    f"Our median time and {LIBRARY}'s over it (above 1: ours is faster; ~: the A/A arm does not tell them apart). bwd "
    "is dgrad and wgrad FP32, 2fwd+bwd two forwards before them. L2 cold, both orders, one process each."
)


def host_time():
    """Python's and torch's own cost of a call, on a product too small to matter."""
    x, w = (torch.ones(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    xf, wf = x.float(), w.float()
    operator = torch.ops.dense_projection_det_gemm.projection_forward
    weight_gradient = torch.zeros(64, 64, device="cuda")
    makers = {
        "prepare_forward(...).launch()": lambda: det.prepare_forward(x, w).launch,
        "prepare_dgrad(...).launch()": lambda: det.prepare_dgrad(x, w).launch,
        "prepare_wgrad(..., accumulate=True).launch()": lambda: (
            det.prepare_wgrad(x, x, weight_gradient, accumulate=True).launch
        ),
        "prepare_backward(...).launch()": lambda: det.prepare_backward(x, x, w).launch,
        "prepare_router_forward(...).launch()": lambda: det.prepare_router_forward(xf, wf).launch,
        "projection_forward": lambda: lambda: det.projection_forward(x, w),
        "projection_forward, gradients wanted": lambda: lambda: det.projection_forward(x_leaf, w_leaf),
        "projection_forward and backward": lambda: lambda: det.projection_forward(x_leaf, w_leaf).backward(x),
        "projection_wgrad into an FP32 out": lambda: lambda: det.projection_wgrad(x, x, weight_gradient),
        "projection_backward": lambda: lambda: det.projection_backward(x, x, w),
        "router_forward": lambda: lambda: det.router_forward(xf, wf),
        "its operator (projection_forward)": lambda: lambda: operator(x, w),
        "torch.nn.functional.linear": lambda: lambda: torch.nn.functional.linear(x, w),
        "torch.nn.functional.linear, gradients wanted": lambda: lambda: torch.nn.functional.linear(x_leaf, w_leaf),
        "torch.nn.functional.linear and backward": lambda: (
            lambda: torch.nn.functional.linear(x_leaf, w_leaf).backward(x)
        ),
    }
    micros = {}
    for name, make in makers.items():
        try:
            call = make()
            call()
            micros[name] = enqueue_microseconds(call)
        except RuntimeError as error:  # a figure less, not all of them
            print(f"{name}: {error}", file=sys.stderr)
    rows = [[name, f"{value:.1f} us"] for name, value in micros.items()]
    note = "Least mean of 50 calls over 20 tries, 64 x 64 x 64: the host's time until the call returns."
    return Table("Host time of a call", ["call", "time"], rows, note), micros


def tables(figures):
    """What the README shows."""
    gpu = torch.cuda.get_device_name()
    made = [
        summary_table(
            {mode: ratios_of(figures, mode) for mode in MODES},
            {mode: {name: found[mode]["verdict"][LIBRARY] for name, found in figures.items()} for mode in MODES},
            f"{LIBRARY}'s time over ours",
            "Verdicts by the spread of our own arm against itself.",
        ),
        workload_table(figures, "graph", "projection", "Projections, CUDA graph replay", READING),
        workload_table(figures, "eager", "projection", "Projections, eager"),
    ]
    for mode in MODES:
        made.append(workload_table(figures, mode, "heads", f"Heads, {mode}"))
        made.append(workload_table(figures, mode, "router", f"Router beside SGEMM without TF32, {mode}"))
    made.append(error_table(figures))
    if PUBLISHED.is_file():
        with PUBLISHED.open() as file:
            made.append(published_table(csv.DictReader(file), figures, gpu))
    return [table for table in made if table is not None]


def facts():
    """Versions that decide the speed."""
    from cake_shared import jit
    from cake_shared.target import target_of

    entry = jit.build_module("dense_projection_det_gemm", target_of().name)
    return {
        "cuda": torch.version.cuda,
        "nvcc": json.loads((entry / "manifest.json").read_text())["compiler"],
        "package": det.__version__,
    }


CELLS = [cell(row, [ours_arms(det)]) for row in rows()]

if __name__ == "__main__":
    suite = GpuSuite(
        "dense_projection_det_gemm", Path(__file__), CELLS, tables, findings=[host_time], facts=facts, grid=ratio_grid
    )
    sys.exit(suite.main())
