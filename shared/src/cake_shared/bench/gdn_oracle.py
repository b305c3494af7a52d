"""The gated delta rule in float64 by chunks, differentiated by autograd, on any device: what long inputs are held to.

It shares no code with the packages. `tests/test_bench_gdn.py` of cake-shared holds it to the token recurrence.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

_CHUNK = 64


def float64_rule(
    q, k, v, g, beta, scale=None, *, initial_state=None, output_final_state=False, cu_seqlens=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rule in float64, with the arguments of `chunk_gated_delta_rule` and without its options.

    Returns
    -------
    tuple
        `o` `[B, T, HV, V]` and the final states `[N, HV, K, V]` or None, in float64; rows of no sequence are zero.
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    batch, tokens = q.shape[:2]
    ratio = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        spans = [(0, first, last) for first, last in pairwise(cu_seqlens.tolist())]
    rows: list[list[torch.Tensor]] = [[] for _ in range(batch)]
    finals = []
    for n, (b, first, last) in enumerate(spans):
        state = q.new_zeros(v.shape[2], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[n].double()
        if last > first:
            part = [x[b, first:last].transpose(0, 1) for x in (q, k, v, g, beta)]
            part[0], part[1] = (x.repeat_interleave(ratio, 0) for x in part[:2])
            o, state = _sequence(*part, scale, state)
            rows[b].append(o.transpose(0, 1))
        finals.append(state)
    out = []
    for done in rows:
        blank = v.new_zeros(tokens - sum(len(x) for x in done), *v.shape[2:])
        out.append(torch.cat([*done, blank]))
    return torch.stack(out), torch.stack(finals) if output_final_state else None


def _sequence(q, k, v, g, beta, scale, state):
    """One sequence: q, k, v `[HV, T, 128]`, g and beta `[HV, T]`; returns o and the final state."""
    tokens = q.shape[1]
    pad = -tokens % _CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, _CHUNK)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(1, (-1, _CHUNK)) for x in (g, beta))
    b = g.cumsum(-1)
    decay = (b[..., :, None] - b[..., None, :]).tril().exp().tril()
    a = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    right = torch.cat([v, b.exp()[..., None] * k], -1) * beta[..., None]
    eye = torch.eye(_CHUNK, dtype=q.dtype, device=q.device)
    u, w = torch.linalg.solve_triangular(eye + a, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    scores = scale * decay * (q @ k.mT)
    queries = scale * b.exp()[..., None] * q
    end = b[..., -1]
    keys = (end[..., None] - b).exp()[..., None] * k
    out = []
    for n in range(q.shape[1]):
        writes = u[:, n] - w[:, n] @ state
        out.append(queries[:, n] @ state + scores[:, n] @ writes)
        state = end[:, n, None, None].exp() * state + keys[:, n].mT @ writes
    return torch.cat(out, 1)[:, :tokens], state
