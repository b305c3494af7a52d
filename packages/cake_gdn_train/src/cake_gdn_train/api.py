"""The public functions of cake_gdn_train: the gated delta rule with its gradients, and its two passes alone."""

import torch

from cake_shared.gdn.backward import Needs
from cake_shared.gdn.ops import Gradients, RuleOps, Saved
from cake_shared.gdn.options import make_call


def _cuda_backend(device: torch.device):
    from cake_gdn_train.cuda import rule_backend

    return rule_backend(device)


_ops = RuleOps("cake_gdn_train", _cuda_backend)


def check_served(device: torch.device, backend: str | None = None) -> None:
    """Raise what a call with tensors on `device` raises for that and its `backend`; builds the module where it must."""
    _ops.backend(device, backend)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule over packed or batched sequences, differentiably.

    For one sequence and value head, with the state `S` a K x V matrix:

        S_t = exp(g_t) (S_(t-1) - beta_t k_t^T (k_t S_(t-1))) + beta_t k_t^T v_t        o_t = scale q_t S_t

    computed in chunks of 64 tokens (Yang et al., *Gated Delta Networks*, arXiv 2412.06464). Promised is accuracy, not
    bits: on CUDA this package may use atomics and plan by load. For now it runs the programs of cake_gdn_det_train.

    Strided views are taken as they are. There are gradients for q, k, v, g, beta, initial_state, A_log and dt_bias, in
    their inputs' dtypes, and none of a second order.

    Parameters
    ----------
    q, k
        Queries and keys `[B, T, H, K]`, BF16, FP32 or FP64. The rule is stable for `beta |k|^2 <= 2`: normalise the
        keys or let `use_qk_l2norm_in_kernel` do it.
    v
        Values `[B, T, HV, V]`, dtype of q; HV is a multiple of H, value head `h` reads key head `h // (HV / H)`.
    g
        Log decays `[B, T, HV]`, `g <= 0`, FP32 or BF16 (FP64 beside FP64 data); under `use_gate_in_kernel` the raw
        gate.
    beta
        Write strengths `[B, T, HV]`, dtypes of g; under `use_beta_sigmoid_in_kernel` the logits.
    scale
        Multiplies the output; `K ** -0.5` by default.
    initial_state
        FP32 `[N, HV, K, V]` (FP64 too beside FP64 data), N the number of sequences (B without `cu_seqlens`); zeros by
        default.
    output_final_state
        Whether the final states are returned.
    use_qk_l2norm_in_kernel
        Replace each q and k row x by `x / sqrt(sum x^2 + 1e-6)`.
    use_gate_in_kernel
        Replace g by `-exp(A_log) * softplus(g + dt_bias)`.
    A_log, dt_bias
        `[HV]`, FP32 or BF16, only with `use_gate_in_kernel`; dt_bias may be None.
    use_beta_sigmoid_in_kernel
        Replace beta by `sigmoid(beta)`.
    allow_neg_eigval
        Double that sigmoid, so that beta lies in (0, 2); only with `use_beta_sigmoid_in_kernel`.
    state_v_first
        States are `[N, HV, V, K]`.
    cu_seqlens
        Offsets of packed sequences, int32 or int64 `[N + 1]` with B = 1: starts at 0, never decreases, ends at most
        at T. Empty sequences are allowed. Rows beyond the last offset give zeros, in the output and in every
        gradient.
    backend
        "cpu", "cuda", or None for the one of the tensors' device. Nothing falls back to another one.

    Returns
    -------
    tuple
        `o` `[B, T, HV, V]` in the dtype of v, and the final states (FP32, FP64 beside FP64 data, in the layout of
        `initial_state`), or None unless `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, shape, device or value; the message names it, what it got and takes.
    UnsupportedArchError
        For a CUDA device of an architecture that lacks a program; the message has the way out.
    """
    flags = (
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    return _ops.call(
        q, k, v, g, beta, scale, initial_state, A_log, dt_bias, cu_seqlens, flags, output_final_state, backend
    )


def chunk_gated_delta_rule_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    save_states: bool = True,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    """Compute the forward pass of `chunk_gated_delta_rule` alone, without a record for autograd.

    Parameters
    ----------
    q, k
        Queries and keys `[B, T, H, K]`, BF16, FP32 or FP64. The rule is stable for `beta |k|^2 <= 2`: normalise the
        keys or let `use_qk_l2norm_in_kernel` do it.
    v
        Values `[B, T, HV, V]`, dtype of q; HV is a multiple of H, value head `h` reads key head `h // (HV / H)`.
    g
        Log decays `[B, T, HV]`, `g <= 0`, FP32 or BF16 (FP64 beside FP64 data); under `use_gate_in_kernel` the raw
        gate.
    beta
        Write strengths `[B, T, HV]`, dtypes of g; under `use_beta_sigmoid_in_kernel` the logits.
    scale
        Multiplies the output; `K ** -0.5` by default.
    initial_state
        FP32 `[N, HV, K, V]` (FP64 too beside FP64 data), N the number of sequences (B without `cu_seqlens`); zeros by
        default.
    output_final_state
        Whether the final states are returned.
    use_qk_l2norm_in_kernel
        Replace each q and k row x by `x / sqrt(sum x^2 + 1e-6)`.
    use_gate_in_kernel
        Replace g by `-exp(A_log) * softplus(g + dt_bias)`.
    A_log, dt_bias
        `[HV]`, FP32 or BF16, only with `use_gate_in_kernel`; dt_bias may be None.
    use_beta_sigmoid_in_kernel
        Replace beta by `sigmoid(beta)`.
    allow_neg_eigval
        Double that sigmoid, so that beta lies in (0, 2); only with `use_beta_sigmoid_in_kernel`.
    state_v_first
        States are `[N, HV, V, K]`.
    cu_seqlens
        Offsets of packed sequences, int32 or int64 `[N + 1]` with B = 1: starts at 0, never decreases, ends at most
        at T. Empty sequences are allowed. Rows beyond the last offset give zeros, in the output and in every
        gradient.
    backend
        "cpu", "cuda", or None for the one of the tensors' device. Nothing falls back to another one.
    save_states
        Whether `saved` is filled; without it `chunk_gated_delta_rule_bwd` can give the gradients of v and
        initial_state only, where a sequence is longer than 8192 tokens.

    Returns
    -------
    tuple
        `(o, final_state or None, saved)`. Hand `saved` and the same arguments to `chunk_gated_delta_rule_bwd`.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, shape, device or value; the message names it, what it got and takes.
    UnsupportedArchError
        For a CUDA device of an architecture that lacks a program; the message has the way out.
    """
    inputs, options = make_call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        A_log,
        dt_bias,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    return _ops.fwd(inputs, options, output_final_state, save_states, backend)


def chunk_gated_delta_rule_bwd(
    d_o: torch.Tensor | None,
    d_final_state: torch.Tensor | None,
    saved: Saved,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    needs: Needs | None = None,
    backend: str | None = None,
) -> Gradients:
    """Compute the backward pass of `chunk_gated_delta_rule` alone.

    Parameters
    ----------
    d_o, d_final_state
        Gradients of the outputs, in their shapes and dtypes and any strides; None for zero.
    saved
        What `chunk_gated_delta_rule_fwd` returned for the same arguments.
    q, k
        Queries and keys `[B, T, H, K]`, BF16, FP32 or FP64. The rule is stable for `beta |k|^2 <= 2`: normalise the
        keys or let `use_qk_l2norm_in_kernel` do it.
    v
        Values `[B, T, HV, V]`, dtype of q; HV is a multiple of H, value head `h` reads key head `h // (HV / H)`.
    g
        Log decays `[B, T, HV]`, `g <= 0`, FP32 or BF16 (FP64 beside FP64 data); under `use_gate_in_kernel` the raw
        gate.
    beta
        Write strengths `[B, T, HV]`, dtypes of g; under `use_beta_sigmoid_in_kernel` the logits.
    scale
        Multiplies the output; `K ** -0.5` by default.
    initial_state
        FP32 `[N, HV, K, V]` (FP64 too beside FP64 data), N the number of sequences (B without `cu_seqlens`); zeros by
        default.
    use_qk_l2norm_in_kernel
        Replace each q and k row x by `x / sqrt(sum x^2 + 1e-6)`.
    use_gate_in_kernel
        Replace g by `-exp(A_log) * softplus(g + dt_bias)`.
    A_log, dt_bias
        `[HV]`, FP32 or BF16, only with `use_gate_in_kernel`; dt_bias may be None.
    use_beta_sigmoid_in_kernel
        Replace beta by `sigmoid(beta)`.
    allow_neg_eigval
        Double that sigmoid, so that beta lies in (0, 2); only with `use_beta_sigmoid_in_kernel`.
    state_v_first
        States are `[N, HV, V, K]`.
    cu_seqlens
        Offsets of packed sequences, int32 or int64 `[N + 1]` with B = 1: starts at 0, never decreases, ends at most
        at T. Empty sequences are allowed. Rows beyond the last offset give zeros, in the output and in every
        gradient.
    backend
        "cpu", "cuda", or None for the one of the tensors' device. Nothing falls back to another one.
    needs
        Which gradients are wanted, `Needs(q=True, ...)`; all that there are by default.

    Returns
    -------
    Gradients
        A named tuple of q, k, v, g, beta, initial_state, A_log, dt_bias, each like its input, None where not wanted.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, shape, device or value; the message names it, what it got and takes.
    UnsupportedArchError
        For a CUDA device of an architecture that lacks a program; the message has the way out.
    """
    inputs, options = make_call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        A_log,
        dt_bias,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    return _ops.bwd(d_o, d_final_state, saved, inputs, options, needs, backend)
