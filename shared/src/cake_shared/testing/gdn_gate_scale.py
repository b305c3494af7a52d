"""How large the summands of the gate's gradient are: the scale against which its error is judged."""

import itertools

import torch


def gate_summands(case):
    """Value and scale of dg, from the closed form of a whole sequence taken as one chunk, in float64.

    With `b` the cumulative gates of the sequence, gate t scales the pairs (i, j) with `i >= t > j`, the path from the
    initial state to every token `i >= t`, the path from every token `j < t` to the final state, and the path from the
    initial to the final state; dg_t is the sum of those terms (Yang et al., arXiv 2412.06464, written out). Under
    strong decay, or with gates that cancel, dg is far smaller than they are, and an error relative to dg alone says
    nothing about the arithmetic.

    Parameters
    ----------
    case : GdnCase
        Without options; any pack.

    Returns
    -------
    dg : torch.Tensor
        `[B, T, HV]` float64, zeros beyond the last sequence. Nothing of the recurrence's code is used, so it also
        checks the oracle.
    scale : torch.Tensor
        `[B, T, HV]` float64, the L2 norm of the summands of each dg.
    """
    batch, tokens, heads = case.g.shape
    dg = torch.zeros(batch, tokens, heads, dtype=torch.float64)
    scale = torch.zeros_like(dg)
    if case.cu_seqlens is None:
        spans = [(i, i, 0, tokens) for i in range(batch)]
    else:
        offsets = case.cu_seqlens.tolist()
        spans = [(n, 0, a, b) for n, (a, b) in enumerate(itertools.pairwise(offsets))]
    ratio = heads // case.q.shape[2]
    for n, row, start, stop in spans:
        if start == stop:
            continue
        for head in range(heads):
            q, k = (x[row, start:stop, head // ratio].double() for x in (case.q, case.k))
            v, do = (x[row, start:stop, head].double() for x in (case.v, case.do))
            g, beta = (x[row, start:stop, head].double() for x in (case.g, case.beta))
            zeros = torch.zeros(q.shape[1], v.shape[1], dtype=torch.float64)
            s0, ds1 = (zeros if x is None else x[n, head].double() for x in (case.initial_state, case.d_state))
            value, size = _one_sequence(q, k, v, g, beta, case.scale, do, s0, ds1)
            dg[row, start:stop, head] = value
            scale[row, start:stop, head] = size
    return dg, scale


def _one_sequence(q, k, v, g, beta, scale, do, s0, ds1):
    b = g.cumsum(0)
    gamma, end_decay = b.exp()[:, None], (b[-1] - b).exp()[:, None]
    decay = (b[:, None] - b[None, :]).tril().exp().tril()
    kk, qk = k @ k.T, q @ k.T
    a = (beta[:, None] * decay * kk).tril(-1)
    eye = torch.eye(len(g), dtype=torch.float64)
    v_new = torch.linalg.solve_triangular(
        eye + a, beta[:, None] * (v - gamma * (k @ s0)), upper=False, unitriangular=True
    )
    dv_new = scale * (decay * qk).T @ do + (end_decay * k) @ ds1
    dr = torch.linalg.solve_triangular((eye + a).T, dv_new, upper=True, unitriangular=True)
    # Each line is a summand with its own rounding; pairs by keys and by queries may cancel (identical keys, beta 1).
    summands = (
        ("pairs", (-(dr @ v_new.T) * beta[:, None] * decay * kk).tril(-1)),
        ("pairs", (scale * (do @ v_new.T) * decay * qk).tril(-1)),
        ("into", (q * (scale * gamma * (do @ s0.T))).sum(1)),
        ("into", -(k * (beta[:, None] * gamma * (dr @ s0.T))).sum(1)),
        ("out", (k * (end_decay * (v_new @ ds1.T))).sum(1)),
        ("through", gamma[-1, 0] * (ds1 * s0).sum()),
    )
    value = sum(_per_gate(kind, x) for kind, x in summands)
    size = sum(_per_gate(kind, x**2) for kind, x in summands).sqrt()
    return value.expand(len(g)), size.expand(len(g))


def _per_gate(kind, x):
    """Add, for every gate, the summands that it scales."""
    if kind == "pairs":
        # Pair (i, j) counts at every t with j < t <= i.
        crossing = x.flip(0).cumsum(0).flip(0).cumsum(1)
        return torch.cat([crossing.new_zeros(1), crossing.diagonal(-1)])
    if kind == "into":
        return x.flip(0).cumsum(0).flip(0)
    if kind == "out":
        return torch.cat([x.new_zeros(1), x.cumsum(0)[:-1]])
    return x
