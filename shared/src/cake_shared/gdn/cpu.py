"""The CPU backend as one object: what runs the rule for tensors in host memory."""

import torch

from cake_shared.check import check_offsets
from cake_shared.gdn import backward as _backward
from cake_shared.gdn import forward as _forward
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.isolation import isolated
from cake_shared.gdn.options import Inputs, Options


def _check_pack(inputs: Inputs) -> None:
    if inputs.cu_seqlens is not None:
        check_offsets("cu_seqlens", inputs.cu_seqlens.tolist(), inputs.k.shape[1])


@isolated
def forward(
    inputs: Inputs, options: Options, output_final_state: bool, save_states: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `o`, final states (no rows unless asked for), the tape of segment-entry states, and no groundwork.

    Raises
    ------
    ValueError
        For offsets that do not start at 0, decrease, or end beyond the buffer.
    """
    _check_pack(inputs)
    results = _forward.forward(inputs, options, output_final_state, save_states)
    return *results, inputs.k.new_empty(TAPE_HEAD, dtype=torch.uint8)


@isolated
def backward(
    inputs: Inputs,
    options: Options,
    d_out: torch.Tensor | None,
    d_final: torch.Tensor | None,
    tape: torch.Tensor | None,
    groundwork: torch.Tensor | None,
    needs: Needs,
    value_dim: int,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, g, beta, initial_state, A_log and dt_bias, None where not needed.

    There is no groundwork on the CPU: what it would hold is made again.
    """
    _check_pack(inputs)
    shape = inputs.g.shape[2], value_dim
    grads = _backward.backward(inputs, options, d_out, d_final, tape, needs, shape)
    return (
        grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, grads.A_log, grads.dt_bias
    )  # fmt: skip
