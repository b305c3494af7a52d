"""The published projections, heads and routers as cells of a GPU bench: operands, arms, checks against float64."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cake_shared.bench.gpu_suite import GpuCell
from cake_shared.testing.gemm_cuda import fp32_limit
from cake_shared.workloads import HEAD_PROJECTIONS, PROJECTIONS, ROUTERS

BF16, FP32 = torch.bfloat16, torch.float32
LIBRARY = "cuBLAS"

STEPS = {
    "forward": ("forward",),
    "dgrad": ("dgrad",),
    "wgrad BF16": ("wgrad BF16",),
    "wgrad FP32": ("wgrad FP32",),
    "bwd": ("dgrad", "wgrad FP32"),
    "2fwd+bwd": ("forward", "forward", "dgrad", "wgrad FP32"),
}
# What a package calls for a row's steps: both gradients at once where both are wanted.
CALLS = {**{name: (name,) for name in STEPS}, "2fwd+bwd": ("forward", "forward", "bwd")}
SINGLE = ("forward", "dgrad", "wgrad BF16", "wgrad FP32")
HEAD_OPERATIONS = ("forward", "dgrad", "wgrad FP32")
ROUTER_OPERATIONS = ("forward", "dgrad", "wgrad")

# One rounding to BF16 leaves 1.7e-3 in the L2 norm.
BF16_LIMIT = 2.5e-3


@dataclass(frozen=True)
class Row:
    """One workload under one operation."""

    workload: object
    operation: str

    @property
    def kind(self) -> str:
        """projection, heads or router."""
        if self.workload in PROJECTIONS:
            return "projection"
        return "heads" if self.workload in HEAD_PROJECTIONS else "router"

    @property
    def name(self) -> str:
        """Workload and operation, unique among all rows."""
        return f"{self.workload.name}, {self.operation}"


def rows() -> list[Row]:
    """Every row of the published table, the operations of a workload next to each other."""
    made = [Row(workload, operation) for workload in PROJECTIONS for operation in STEPS]
    made += [Row(workload, operation) for workload in HEAD_PROJECTIONS for operation in HEAD_OPERATIONS]
    return made + [Row(workload, operation) for workload in ROUTERS for operation in ROUTER_OPERATIONS]


@functools.lru_cache(maxsize=1)
def operands(workload):
    """x, w and g of a workload on the current device, normal and of fixed seed."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, dtype=BF16):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    if workload in PROJECTIONS:
        tokens, d_in, d_out = workload.tokens, workload.d_in, workload.d_out
        return normal(tokens, d_in), normal(d_out, d_in), normal(tokens, d_out)
    if workload in ROUTERS:
        tokens, d_in, d_out = workload.tokens, workload.d_in, workload.experts
        return tuple(normal(*shape, dtype=FP32) for shape in ((tokens, d_in), (d_out, d_in), (tokens, d_out)))
    tokens, heads, d_in, d_out = workload.tokens, workload.heads, workload.d_in, workload.d_out
    return normal(tokens, heads, d_in), normal(heads, d_in, d_out), normal(tokens, heads, d_out)


def exact(row: Row) -> torch.Tensor:
    """The value of a single-step row in float64, in the layout that `head_gemm` and the functions write."""
    x, w, g = (t.double() for t in operands(row.workload))
    step = row.operation.split()[0]
    if row.kind == "heads":
        x, g = x.transpose(0, 1), g.transpose(0, 1)
        return {
            "forward": lambda: (x @ w).transpose(0, 1),
            "dgrad": lambda: (g @ w.transpose(1, 2)).transpose(0, 1),
            "wgrad": lambda: x.transpose(1, 2) @ g,
        }[step]()
    return {"forward": lambda: x @ w.t(), "dgrad": lambda: g @ w, "wgrad": lambda: g.t() @ x}[step]()


def head_views(step: str, workload, x, w, g) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and a fresh out of a head projection as `[heads, ., .]` views; out is `[T, heads, .]` in memory."""
    tokens, heads = x.shape[:2]
    x, g = x.transpose(0, 1), g.transpose(0, 1)
    if step == "wgrad FP32":
        return x.transpose(1, 2), g, torch.empty_like(w, dtype=FP32)
    a, b = (x, w) if step == "forward" else (g, w.transpose(1, 2))
    return a, b, torch.empty(tokens, heads, b.shape[2], dtype=BF16, device=x.device).transpose(0, 1)


def prepared(module, row: Row, step: str, keywords: dict):
    """The package's prepared call of one step."""
    x, w, g = operands(row.workload)
    if row.kind == "heads":
        return module.prepare_gemm(*head_views(step, row.workload, x, w, g), **keywords)
    if row.kind == "router":
        return {
            "forward": lambda: module.prepare_router_forward(x, w, **keywords),
            "dgrad": lambda: module.prepare_router_dgrad(g, w, **keywords),
            "wgrad": lambda: module.prepare_router_wgrad(g, x, **keywords),
        }[step]()
    return {
        "forward": lambda: module.prepare_forward(x, w, **keywords),
        "dgrad": lambda: module.prepare_dgrad(g, w, **keywords),
        "wgrad BF16": lambda: module.prepare_wgrad(g, x, out_dtype=BF16, **keywords),
        "wgrad FP32": lambda: module.prepare_wgrad(g, x, out_dtype=FP32, **keywords),
        "bwd": lambda: module.prepare_backward(g, x, w, out_dtype=FP32, **keywords),
    }[step]()


def function(module, row: Row, step: str, keywords: dict) -> Callable[[], torch.Tensor]:
    """The package's eager call of one step."""
    x, w, g = operands(row.workload)
    if row.kind == "heads":
        gemm = getattr(module, module.__name__)
        return lambda: gemm(*head_views(step, row.workload, x, w, g), **keywords)
    if row.kind == "router":
        return {
            "forward": lambda: module.router_forward(x, w, **keywords),
            "dgrad": lambda: module.router_dgrad(g, w, **keywords),
            "wgrad": lambda: module.router_wgrad(g, x, **keywords),
        }[step]
    return {
        "forward": lambda: module.projection_forward(x, w, **keywords),
        "dgrad": lambda: module.projection_dgrad(g, w, **keywords),
        "wgrad BF16": lambda: module.projection_wgrad(g, x, out_dtype=BF16, **keywords),
        "wgrad FP32": lambda: module.projection_wgrad(g, x, out_dtype=FP32, **keywords),
        "bwd": lambda: module.projection_backward(g, x, w, out_dtype=FP32, **keywords),
    }[step]


def library(row: Row, step: str) -> Callable[[], torch.Tensor]:
    """torch's product of one step, which is cuBLAS's; FP32 operands without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x, w, g = operands(row.workload)
    if row.kind == "heads":
        x, g = x.transpose(0, 1), g.transpose(0, 1)
        return {
            "forward": lambda: torch.bmm(x, w),
            "dgrad": lambda: torch.bmm(g, w.transpose(1, 2)),
            "wgrad FP32": lambda: torch.bmm(x.transpose(1, 2), g, out_dtype=FP32),
        }[step]
    return {
        "forward": lambda: x @ w.t(),
        "dgrad": lambda: g @ w,
        "wgrad": lambda: g.t() @ x,
        "wgrad BF16": lambda: g.t() @ x,
        "wgrad FP32": lambda: torch.mm(g.t(), x, out_dtype=FP32),
    }[step]


def relative_error(actual: torch.Tensor, right: torch.Tensor) -> float:
    """L2 error relative to the L2 norm of `right`, taken on the device; infinity where `actual` is not finite."""
    difference = torch.linalg.vector_norm(actual.double() - right)
    error = float(difference / torch.linalg.vector_norm(right))
    return error if error == error else float("inf")


def ours_arms(module, name: str = "ours", keywords: dict | None = None):
    """An arm of a package: its name and what `cell` needs of it."""
    return name, module, keywords or {}


def cell(row: Row, arms) -> GpuCell:
    """The arms of packages (from `ours_arms`) beside the library on one row; composite rows are checked by steps."""
    steps = STEPS.get(row.operation, (row.operation,))
    ours = CALLS.get(row.operation, steps)

    def calls():
        made: dict[str, dict[str, Callable]] = {"graph": {}, "eager": {}}
        for name, module, keywords in arms:
            made["graph"][name] = in_turn([prepared(module, row, step, keywords).launch for step in ours])
            made["eager"][name] = in_turn([function(module, row, step, keywords) for step in ours])
        for mode in made.values():
            mode[LIBRARY] = in_turn([library(row, step) for step in steps])
        return made

    def check():
        if len(steps) > 1:
            return {}
        right = exact(row)
        theirs = library(row, steps[0])()
        if row.kind == "heads" and steps[0] != "wgrad FP32":
            theirs = theirs.transpose(0, 1)
        error = relative_error(theirs, right)
        found = {LIBRARY: (error, float("inf"))}
        for name, module, keywords in arms:
            plan = prepared(module, row, steps[0], keywords)
            results = [plan.launch(), function(module, row, steps[0], keywords)()]
            if row.kind == "heads" and steps[0] != "wgrad FP32":
                results = [result.transpose(0, 1) for result in results]
            if row.kind == "router":
                limit = error
            else:
                # FP32 results are weight gradients. The library's own error is no limit: where it cuts the contraction
                # it has half of what one sum on a tensor core leaves, elsewhere the same.
                limit = BF16_LIMIT if results[0].dtype == BF16 else fp32_limit(row.workload.tokens)
            found[name] = (max(relative_error(result, right) for result in results), limit)
        return found

    return GpuCell(row.name, calls, check)


def in_turn(parts: list[Callable]) -> Callable[[], object]:
    """One call that makes several."""
    if len(parts) == 1:
        return parts[0]

    def call():
        for part in parts:
            part()

    return call
