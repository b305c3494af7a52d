"""Where a run trains: on a GPU when one is there and the records serve it, else on the CPU, and why."""

import torch

from cake_shared.errors import UnsupportedArchError
from cake_shared.gdn.cuda.plan import HEAD_DIM
from cake_shared.program import require_programs
from cake_shared.target import target_of
from dense_projection_det_gemm.cuda import records_of


def choose_backend(asked: str, head_dim: int) -> tuple[str, str]:
    """Picks "cpu" or "cuda" for `asked` ("auto", "cpu" or "cuda") and heads of that size; returns it with the reason.

    Raises
    ------
    ValueError
        `asked` is "cuda" and torch sees no CUDA device, or no CUDA program takes heads of that size.
    UnsupportedArchError
        `asked` is "cuda" and a stage has no program for the device's architecture.
    """
    if asked == "cpu":
        return "cpu", "it was asked for"
    if not torch.cuda.is_available():
        if asked == "cuda":
            raise ValueError("backend: got cuda, takes cpu or auto here, torch sees no CUDA device")
        return "cpu", "torch sees no CUDA device"
    if head_dim != HEAD_DIM:
        if asked == "cuda":
            raise ValueError(f"head_dim: got {head_dim}, takes {HEAD_DIM} with --backend cuda")
        return "cpu", f"the CUDA programs take heads of {HEAD_DIM}, these have {head_dim}"
    try:
        name = require_gpu_programs()
    except UnsupportedArchError as problem:
        if asked == "cuda":
            raise
        return "cpu", f"there is {torch.cuda.get_device_name()}, but {problem}"
    reason = "it was asked for" if asked == "cuda" else f"the records serve every stage on {name}"
    return "cuda", f"{torch.cuda.get_device_name()}, {reason}"


def require_gpu_programs() -> str:
    """The current device's architecture; raises `UnsupportedArchError` unless every stage used here has a program."""
    name = target_of().name
    require_programs("cake_gdn_det_train", name)
    records_of(name)
    return name
