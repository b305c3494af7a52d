"""The gated delta rule token by token in float64 under autograd: the second, independent implementation.

    S_t = exp(g_t) (S_{t-1} - beta_t k_t^T (k_t S_{t-1})) + beta_t k_t^T v_t        o_t = scale q_t S_t

Nothing here is shared with the chunked code.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F


def ref_chunk_gated_delta_rule(
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the rule by its recurrence, in float64, differentiable by autograd.

    The arguments mean what they mean in `cake_gdn_det_train.chunk_gated_delta_rule`, in any floating dtype. Leaves in
    float64 get float64 gradients.

    Returns
    -------
    tuple
        `o` `[B, T, HV, V]` in float64, zero for rows of no sequence, and the final states in float64 or None.
    """
    given = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    # Zero, and a dependence on every argument: what does not enter a result gets a zero gradient, not none.
    anchor = sum(x.flatten()[:0].double().sum() for x in given if x is not None)
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    batch, tokens, heads = q.shape[:3]
    value_heads = v.shape[2]
    if use_qk_l2norm_in_kernel:
        q = q / torch.sqrt((q**2).sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
    if use_gate_in_kernel:
        z = g if dt_bias is None else g + dt_bias.double()
        g = -A_log.double().exp() * F.softplus(z)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.repeat_interleave(value_heads // heads, dim=2) * scale
    k = k.repeat_interleave(value_heads // heads, dim=2)
    if cu_seqlens is None:
        runs = [(b, 0, tokens) for b in range(batch)]
    else:
        at = cu_seqlens.tolist()
        runs = [(0, first, last) for first, last in pairwise(at)]
    outputs: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    finals = []
    for n, (b, first, last) in enumerate(runs):
        state = q.new_zeros(value_heads, q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[n].double()
            state = state.transpose(-1, -2) if state_v_first else state
        for t in range(first, last):
            kt, vt, bt = k[b, t], v[b, t], beta[b, t, :, None]
            seen = torch.einsum("hk,hkv->hv", kt, state)
            decay = g[b, t, :, None, None].exp()
            state = decay * (state - torch.einsum("hk,hv->hkv", kt, bt * seen)) + torch.einsum(
                "hk,hv->hkv", kt, bt * vt
            )
            outputs[b].append(torch.einsum("hk,hkv->hv", q[b, t], state))
        finals.append(state.transpose(-1, -2) if state_v_first else state)
    rows = []
    for done in outputs:
        left = tokens - len(done)
        blank = v.new_zeros(left, value_heads, v.shape[-1])
        rows.append(torch.cat([torch.stack(done), blank]) if done else blank)
    final = None
    if output_final_state:
        shape = (0, *v.new_empty(value_heads, q.shape[-1], v.shape[-1]).shape)
        final = (torch.stack(finals) if finals else v.new_zeros(shape)) + anchor
    return torch.stack(rows) + anchor, final


ref_gated_delta_rule = ref_chunk_gated_delta_rule
