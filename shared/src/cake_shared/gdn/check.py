"""Checks of the arguments of the gated delta rule, the same for every package that offers it."""

from typing import Any

import torch

from cake_shared.check import check_device, check_dtype, check_finite, check_flag, check_shape, check_tensor
from cake_shared.gdn.options import Inputs, Options

_DATA = (torch.bfloat16, torch.float32, torch.float64)
_NARROW = (torch.float32, torch.bfloat16)
_FLAGS = (
    ("use_qk_l2norm_in_kernel", "qk_l2norm"),
    ("use_gate_in_kernel", "gate"),
    ("use_beta_sigmoid_in_kernel", "beta_sigmoid"),
    ("allow_neg_eigval", "neg_eigval"),
    ("state_v_first", "state_v_first"),
)


def _check_q(q: torch.Tensor) -> None:
    check_tensor("q", q)
    check_dtype("q", q, _DATA)
    if q.dim() != 4 or q.shape[2] < 1 or q.shape[3] < 1:
        raise ValueError(f"q: got shape {list(q.shape)}, takes [B, T, H, K] with at least one head and H, K >= 1")


def _check_v(v: torch.Tensor, q: torch.Tensor) -> None:
    check_tensor("v", v)
    check_dtype("v", v, (q.dtype,), ", the dtype of q")
    check_device("v", v, q.device, "q")
    batch, tokens, heads, _ = q.shape
    if v.dim() != 4 or v.shape[0] != batch or v.shape[1] != tokens or v.shape[3] < 1:
        raise ValueError(f"v: got shape {list(v.shape)}, takes [B, T, HV, V] with B = {batch}, T = {tokens}, V >= 1")
    if v.shape[2] < 1 or v.shape[2] % heads:
        raise ValueError(f"v: got {v.shape[2]} heads, takes HV = a multiple of the H = {heads} heads of q and k")


def _check_offsets_tensor(cu_seqlens: Any, q: torch.Tensor) -> None:
    check_tensor("cu_seqlens", cu_seqlens)
    check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, takes [N + 1] with N >= 0")
    if cu_seqlens.device.type != "cpu":
        check_device("cu_seqlens", cu_seqlens, q.device, "q")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: got B = {q.shape[0]} rows of q beside it, takes B = 1, all sequences in one row")


def check_call(inputs: Inputs, options: Options, output_final_state: Any = False) -> None:
    """Check dtypes, shapes and devices of a call; the values of the offsets are checked where they are read.

    Raises
    ------
    TypeError, ValueError
        That name the argument, what it got and what it takes.
    """
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    _check_q(q)
    check_tensor("k", k)
    check_dtype("k", k, (q.dtype,), ", the dtype of q")
    check_device("k", k, q.device, "q")
    check_shape("k", k, q.shape, "[B, T, H, K] of q")
    _check_v(v, q)
    wide = q.dtype is torch.float64
    narrow = (*_NARROW, torch.float64) if wide else _NARROW
    per_head = (q.shape[0], q.shape[1], v.shape[2])
    for name, x in (("g", g), ("beta", beta)):
        check_tensor(name, x)
        check_dtype(name, x, narrow)
        check_device(name, x, q.device, "q")
        check_shape(name, x, per_head, "[B, T, HV]")
    check_finite("scale", options.scale)
    for name, flag in _FLAGS:
        check_flag(name, getattr(options, flag))
    check_flag("output_final_state", output_final_state)
    sequences = q.shape[0]
    if inputs.cu_seqlens is not None:
        _check_offsets_tensor(inputs.cu_seqlens, q)
        sequences = inputs.cu_seqlens.shape[0] - 1
    if inputs.initial_state is not None:
        check_state("initial_state", inputs.initial_state, q, v, sequences, options)
    _check_gate(inputs, options, narrow)
    if options.neg_eigval and not options.beta_sigmoid:
        raise ValueError(
            "allow_neg_eigval: got True without use_beta_sigmoid_in_kernel, takes it only together, "
            "because a beta given directly may already lie in [0, 2]"
        )


def check_state(name: str, x: Any, q: torch.Tensor, v: torch.Tensor, sequences: int, options: Options) -> None:
    """Check an initial state, or the gradient of a final one."""
    check_tensor(name, x)
    check_dtype(name, x, (torch.float32, torch.float64) if q.dtype is torch.float64 else (torch.float32,))
    check_device(name, x, q.device, "q")
    heads, key, value = v.shape[2], q.shape[3], v.shape[3]
    if options.state_v_first:
        check_shape(name, x, (sequences, heads, value, key), "[N, HV, V, K] under state_v_first")
    else:
        check_shape(name, x, (sequences, heads, key, value), "[N, HV, K, V]")


def _check_gate(inputs: Inputs, options: Options, narrow: tuple[torch.dtype, ...]) -> None:
    if options.gate and inputs.A_log is None:
        raise ValueError("A_log: got None, takes a tensor [HV] under use_gate_in_kernel")
    for name, x in (("A_log", inputs.A_log), ("dt_bias", inputs.dt_bias)):
        if x is None:
            continue
        check_tensor(name, x)
        if not options.gate:
            raise ValueError(f"{name}: got a tensor without use_gate_in_kernel, takes None then")
        check_dtype(name, x, narrow)
        check_device(name, x, inputs.q.device, "q")
        check_shape(name, x, (inputs.v.shape[2],), "[HV]")
