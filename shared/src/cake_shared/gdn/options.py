"""The arguments of one call of the gated delta rule as values that all stages read."""

from dataclasses import dataclass

import torch

L2NORM_EPS = 1e-6
_FLOAT_LIMIT = 2**1023


@dataclass(frozen=True)
class Options:
    """The switches of a call; see `chunk_gated_delta_rule` for their meaning."""

    scale: float
    qk_l2norm: bool = False
    gate: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    state_v_first: bool = False


@dataclass
class Inputs:
    """The tensors of a call, as the caller gave them; `q` or `v` are None where a backward pass does not need them."""

    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    q: torch.Tensor | None = None
    v: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None


def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> tuple[Inputs, Options]:
    """Sort the arguments of a public function into tensors and switches; nothing is checked yet."""
    if scale is None and isinstance(q, torch.Tensor) and q.dim() == 4:
        scale = max(q.shape[-1], 1) ** -0.5
    elif type(scale) is int and abs(scale) < _FLOAT_LIMIT:
        scale = float(scale)
    options = Options(
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    return Inputs(k, g, beta, q, v, initial_state, A_log, dt_bias, cu_seqlens), options
