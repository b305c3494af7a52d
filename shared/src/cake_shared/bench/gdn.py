"""What the benches of the Gated DeltaNet packages share: errors against float64, the peer, timed passes."""

import functools
from collections.abc import Callable

import torch

from cake_shared.bench.result import Table
from cake_shared.bench.suite import MemoryCase
from cake_shared.bench.timing import Arm, Cell
from cake_shared.testing.gdn_gate_scale import gate_summands
from cake_shared.testing.gdn_inputs import BETAS, GATES, GdnCase, base, states
from cake_shared.testing.gdn_reference import SMALLEST_NORMAL, limit, reference
from cake_shared.testing.gdn_run import run

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
PASSES = ("forward", "forward+backward")
# Tokens of the check before a time is taken: what autograd keeps of the token recurrence fits in memory.
CHECK_TOKENS = 200
# The limit of a peer: what a user of FP32 or BF16 would call right.
PEER_LIMIT = {"FP32": 1e-4, "BF16": 4e-3}
RESULTS = {"o": "o", "final_state": "state", "dq": "dq", "dk": "dk", "dv": "dv", "dg": "dg", "dbeta": "dbeta"}
STATE_RESULT = {"d_initial_state": "d state"}


def relative_errors(results: dict, expected: dict, gate_scale: torch.Tensor) -> dict[str, float]:
    """L2 error of every result over the L2 norm of the float64 one; dg head by head over its summands' scale.

    Elements below FP32's normal numbers count as zero. A result that is not finite has the error infinity.
    """
    errors = {}
    for name, right in expected.items():
        got = results[name]
        if right is None or got is None:
            continue
        got = got.detach().double()
        if not bool(torch.isfinite(got).all()):
            errors[name] = float("inf")
            continue
        right = right.detach().double()
        if name == "dg":
            dims = tuple(range(right.dim() - 1))
            distance, norm = (got - right).norm(dim=dims), gate_scale.norm(dim=dims)
        else:
            right = torch.where(right.abs() < SMALLEST_NORMAL, 0.0, right)
            distance, norm = (got - right).norm(), right.norm()
        distance = (distance - SMALLEST_NORMAL * right.numel() ** 0.5).clamp_min(0.0)
        errors[name] = float((distance / norm.clamp_min(torch.finfo(torch.float64).tiny)).max())
    return errors


@functools.cache
def right_results(dtype: str, tokens: int, heads: int, value_heads: int):
    """The case of a check, its float64 results, and the scale of dg's summands."""
    case = base(tokens, heads, value_heads, dtype=DTYPES[dtype])
    return case, reference(case), gate_summands(case)[1]


def largest_error(function: Callable, dtype: str, heads: int, value_heads: int) -> float:
    """The largest relative error of `function` over o and all gradients, mild gates, 200 tokens of these heads."""
    case, expected, scale = right_results(dtype, CHECK_TOKENS, heads, value_heads)
    return max(relative_errors(run(function, case), expected, scale).values())


def error_table(function: Callable, dtype: str, tokens: int = 130, heads: int = 1) -> tuple[Table, dict]:
    """Errors of `function` against float64 in every gate regime, each the largest over all beta regimes.

    K = V = 128, two value heads a key head, initial and final states and their gradients included.
    """
    columns = {**RESULTS, **STATE_RESULT}
    figures: dict[str, dict[str, float]] = {}
    for gate in GATES:
        for beta in BETAS:
            case = base(tokens, heads, 2 * heads, gate=gate, beta=beta, dtype=DTYPES[dtype])
            initial_state, d_state = states(case, 1)
            case = case.with_(initial_state=initial_state, d_state=d_state)
            found = relative_errors(run(function, case), reference(case), gate_summands(case)[1])
            row = figures.setdefault(gate, {})
            for name in columns:
                row[name] = max(row.get(name, 0.0), found.get(name, 0.0))
    rows = [[gate, *(f"{row[name]:.1e}" for name in columns)] for gate, row in figures.items()]
    rows.append(["largest", *(f"{max(row[name] for row in figures.values()):.1e}" for name in columns)])
    note = (
        f"Relative L2 error against the float64 recurrence, {tokens} tokens, {heads} key and {2 * heads} value "
        f"heads of 128, the largest over {len(BETAS)} regimes of beta; dg over the scale of its summands by head. "
        f"Limit {limit(DTYPES[dtype]):.1e}."
    )
    return Table(f"Errors with {dtype} inputs", ["gates", *columns.values()], rows, note), figures


def leaves(case: GdnCase) -> list[torch.Tensor]:
    """Fresh tensors q, k, v, g, beta of a case that gather gradients."""
    return [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v, case.g, case.beta)]


def make_pass(function: Callable, kind: str, case: GdnCase) -> Callable[[], int]:
    """One pass over a case as a call: "forward" without autograd, or "forward+backward".

    The call returns the bytes of the gradients that it leaves.
    """
    if kind == "forward":
        inputs = [x.detach() for x in leaves(case)]

        def forward() -> int:
            with torch.no_grad():
                function(*inputs)
            return 0

        return forward
    inputs = leaves(case)

    def both() -> int:
        for x in inputs:
            x.grad = None
        o = function(*inputs)[0]
        o.backward(case.do)
        return sum(x.grad.numel() * x.grad.element_size() for x in inputs)

    return both


def cells(arms: dict[str, Callable], ours: tuple[str, ...], *, tokens: int, heads: int, value_heads: int) -> list[Cell]:
    """A cell for each dtype and pass; arms named in `ours` are held to our own limit, the others to a peer's."""
    made = []
    for dtype in DTYPES:

        def check(dtype=dtype):
            return {
                name: (
                    largest_error(function, dtype, heads, value_heads),
                    limit(DTYPES[dtype]) if name in ours else PEER_LIMIT[dtype],
                )
                for name, function in arms.items()
            }

        check = functools.cache(check)
        for kind in PASSES:
            timed = [
                Arm(name, functools.partial(timed_pass, function, kind, dtype, tokens, heads, value_heads))
                for name, function in arms.items()
            ]
            made.append(Cell(f"{dtype} {kind}", timed, check, groups=5))
    return made


def timed_pass(function, kind, dtype, tokens, heads, value_heads):
    """`make_pass` on a fresh case."""
    return make_pass(function, kind, base(tokens, heads, value_heads, dtype=DTYPES[dtype]))


def memory_cases(arms: dict[str, Callable], *, tokens: int, heads: int, value_heads: int) -> list[MemoryCase]:
    """Peak memory of every arm, dtype and pass."""

    def make(function, kind, dtype):
        make_pass(function, kind, base(64, heads, value_heads, dtype=DTYPES[dtype]))()
        return timed_pass(function, kind, dtype, tokens, heads, value_heads)

    return [
        MemoryCase(f"{dtype} {kind}", name, functools.partial(make, function, kind, dtype))
        for dtype in DTYPES
        for kind in PASSES
        for name, function in arms.items()
    ]


def transformers_rule() -> Callable | None:
    """The PyTorch fallback of Hugging Face transformers' Qwen3-Next, or None where transformers is not installed."""
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ModuleNotFoundError:
        return None

    def rule(q, k, v, g, beta, scale=None, *, output_final_state=False, initial_state=None, cu_seqlens=None):
        if scale not in (None, q.shape[-1] ** -0.5) or cu_seqlens is not None:
            raise ValueError("scale, cu_seqlens: the peer takes its defaults only")
        return torch_chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state
        )

    return rule
