"""Times the GEMMs beside torch's own on the CPU: `python -m cake_shared.bench run dense-projection-det-gemm`."""

import functools
import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
from cake_shared.bench import Arm, Cell, Suite, Table
from cake_shared.bench.host import import_table, least_microseconds
from cake_shared.gemm import oracle
from cake_shared.testing import relative_l2

BF16, FP32 = torch.bfloat16, torch.float32
BF16_LIMIT, FP32_LIMIT = 5e-3, 1e-6
TOKENS = 2048
PROJECTIONS = [(4096, 48), (4096, 512), (1024, 1024)]
ROUTER = (6144, 256)


def operands(d_in, d_out, dtype):
    """x `[TOKENS, d_in]`, w `[d_out, d_in]`, g `[TOKENS, d_out]`."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, d_in), (d_out, d_in), (TOKENS, d_out))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def ours(direction, x, w, g):
    """The package's function of one direction."""
    return {
        "forward": lambda: det.projection_forward(x, w),
        "dgrad": lambda: det.projection_dgrad(g, w),
        "wgrad": lambda: det.projection_wgrad(g, x),
        "wgrad FP32": lambda: det.projection_wgrad(g, x, out_dtype=FP32),
        "router forward": lambda: det.router_forward(x, w),
        "router dgrad": lambda: det.router_dgrad(g, w),
        "router wgrad": lambda: det.router_wgrad(g, x),
    }[direction]


def torchs(direction, x, w, g):
    """torch's product of one direction, in the dtype of the operands."""
    if direction.endswith("forward"):
        return lambda: x @ w.t()
    if direction.endswith("dgrad"):
        return lambda: g @ w
    return lambda: g.t() @ x


def exact(direction, x, w, g):
    """The value in float64."""
    kind = direction.removeprefix("router ").removesuffix(" FP32")
    if kind == "forward":
        return oracle.forward(x, w)
    return oracle.dgrad(g, w) if kind == "dgrad" else oracle.wgrad(g, x)


def cell(direction, d_in, d_out):
    """One comparison: ours, torch in BF16 (projections only) and torch in FP32."""
    router = direction.startswith("router")
    dtype = FP32 if router else BF16

    def make_ours():
        return ours(direction, *operands(d_in, d_out, dtype))

    def make_torch(dtype):
        # FP32 operands are the BF16 ones widened beforehand, so all arms compute the same product.
        inputs = operands(d_in, d_out, FP32 if router else BF16)
        return torchs(direction, *(t.to(dtype) for t in inputs))

    arms = [Arm("ours", make_ours)]
    if not router:
        arms.append(Arm("torch BF16", lambda: make_torch(BF16)))
    arms.append(Arm("torch FP32", lambda: make_torch(FP32)))

    def check():
        value = exact(direction, *operands(d_in, d_out, dtype))
        limits = {"torch BF16": BF16_LIMIT, "torch FP32": FP32_LIMIT}
        limits["ours"] = FP32_LIMIT if router or direction.endswith("FP32") else BF16_LIMIT
        return {arm.name: (relative_l2(arm.make()(), value), limits[arm.name]) for arm in arms}

    return Cell(f"{direction}, {TOKENS} x {d_in} -> {d_out}", arms, check, groups=5)


def host_time():
    """Python's and torch's own cost of a call, on a product too small to matter."""
    x, w = (torch.ones(64, 64, dtype=BF16) for _ in range(2))
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    plan = det.prepare_forward(x, w)
    operator = torch.ops.dense_projection_det_gemm.projection_forward
    calls = {
        "prepared launch()": plan.launch,
        "projection_forward": lambda: det.projection_forward(x, w),
        "projection_forward, gradients wanted": lambda: det.projection_forward(x_leaf, w_leaf),
        "its operator": lambda: operator(x, w),
        "its operator, gradients wanted": lambda: operator(x_leaf, w_leaf),
        "torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, w),
        "torch.nn.functional.linear, gradients wanted": lambda: torch.nn.functional.linear(x_leaf, w_leaf),
    }
    micros = {name: least_microseconds(call) for name, call in calls.items()}
    note = "Least mean of 200 calls over 20 tries, 64 x 64 x 64."
    rows = [[name, f"{value:.1f} us"] for name, value in micros.items()]
    return Table("Host time of a call", ["call", "time"], rows, note), micros


CELLS = [
    cell(direction, *widths) for widths in PROJECTIONS for direction in ("forward", "dgrad", "wgrad", "wgrad FP32")
]
CELLS += [cell(f"router {direction}", *ROUTER) for direction in ("forward", "dgrad", "wgrad")]

FINDINGS = [host_time, functools.partial(import_table, "dense_projection_det_gemm")]

if __name__ == "__main__":
    sys.exit(Suite("dense_projection_det_gemm", Path(__file__), CELLS, findings=FINDINGS).main())
