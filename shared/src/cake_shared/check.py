"""Argument errors that name the argument, what it got and what it takes. Each `check_` raises or returns nothing.

Errors are raised before anything runs: `TypeError` for a wrong kind or dtype, `ValueError` for a wrong shape, device
or value.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


def kind_of(x: Any) -> str:
    """Return how a message names the kind of `x`: `None`, or its type's name."""
    return "None" if x is None else type(x).__name__


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, x: Any) -> None:
    """Raise `TypeError` unless `x` is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {kind_of(x)}, takes a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, takes a dense (strided) tensor")


def check_dtype(name: str, x: torch.Tensor, takes: Sequence[torch.dtype], why: str = "") -> None:
    """Raise `TypeError` unless the dtype of `x` is one of `takes`; `why` says where that list comes from."""
    if x.dtype not in takes:
        listed = " or ".join(dtype_name(d) for d in takes)
        raise TypeError(f"{name}: got {dtype_name(x.dtype)}, takes {listed}{why}")


def check_shape(name: str, x: torch.Tensor, takes: Sequence[int], axes: str) -> None:
    """Raise `ValueError` unless `x` has the shape `takes`; `axes` names its axes, `[B, T, H, K]`."""
    if x.dim() != len(takes) or any(a != b for a, b in zip(x.shape, takes)):
        raise ValueError(f"{name}: got shape {list(x.shape)}, takes {axes} = {list(takes)}")


def check_device(name: str, x: torch.Tensor, takes: torch.device, of: str) -> None:
    """Raise `ValueError` unless `x` is on the device `takes`, which is that of the argument `of`."""
    if x.device != takes:
        raise ValueError(f"{name}: got a tensor on {x.device}, takes one on {takes}, where {of} is")


def check_flag(name: str, x: Any) -> None:
    """Raise `TypeError` unless `x` is a bool: text such as "False", or a tensor, would be taken for something else."""
    if not isinstance(x, bool):
        raise TypeError(f"{name}: got {kind_of(x)}, takes True or False")


def check_finite(name: str, x: Any) -> None:
    """Raise unless `x` is a finite real number (`TypeError` for another kind, `ValueError` for inf and NaN)."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: got {kind_of(x)}, takes a number")
    if not -sys.float_info.max <= x <= sys.float_info.max:
        raise ValueError(f"{name}: got {x}, takes a finite number")


def check_offsets(name: str, offsets: Sequence[int], tokens: int) -> None:
    """Raise `ValueError` unless `offsets` start at 0, never decrease and end at most at `tokens`."""
    if offsets[0] != 0:
        raise ValueError(f"{name}: got {offsets[0]} as its first offset, takes 0 there")
    for place, (a, b) in enumerate(pairwise(offsets), 1):
        if b < a:
            raise ValueError(f"{name}: got {b} after {a} at place {place}, takes offsets that never decrease")
    if offsets[-1] > tokens:
        raise ValueError(f"{name}: got {offsets[-1]} as its last offset, takes at most T = {tokens}")


def check_backend(backend: Any) -> None:
    """Raise unless `backend` is None, "cpu" or "cuda"."""
    if backend is not None and backend not in ("cpu", "cuda"):
        kind = ValueError if isinstance(backend, str) else TypeError
        raise kind(f"backend: got {backend!r}, takes None, 'cpu' or 'cuda'")
