"""What a GEMM is asked to do, as frozen values without torch: the input of every package's planner."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmProblem:
    """`out[l, m, n] (+)= sum_k a[l, m, k] * b[l, k, n]` on BF16 operands with FP32 accumulation.

    `batch`, `m`, `n`, `k` are extents in elements. `a_major`, `b_major` and `out_major` name the axis of unit stride:
    "k" or "m" for a, "k" or "n" for b, "n" or "m" for out. `out_dtype` is "bfloat16" or "float32".
    """

    batch: int
    m: int
    n: int
    k: int
    a_major: str
    b_major: str
    out_dtype: str
    out_major: str = "n"
    accumulate: bool = False
    target: str = "cpu"


@dataclass(frozen=True)
class RouterProblem:
    """`out[m, n] = sum_k a[m, k] * b[k, n]` to FP32 accuracy, operands split into BF16 terms.

    An FP32 operand has three terms, a BF16 operand is its own single term. Axes and extents as in `GemmProblem`.
    """

    m: int
    n: int
    k: int
    a_major: str
    b_major: str
    a_terms: int
    b_terms: int
    target: str = "cpu"


@dataclass(frozen=True)
class BackwardPlan:
    """The plans of both gradients of a projection, one after the other: what the CPU runs."""

    dgrad: object
    wgrad: object


@dataclass(frozen=True)
class Buffer:
    """One named part of a workspace: its element type (a torch dtype's name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self):
        """Bytes it takes in the workspace, rounded up so that the next buffer starts on 64 bytes."""
        count = _ITEM_BYTES[self.dtype]
        for extent in self.shape:
            count *= extent
        return -(-count // 64) * 64


_ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8, "int64": 8}


def round_up(value, multiple):
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
