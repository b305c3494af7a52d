"""Calls of the CPU backend's passes without a package around them, for tests of the core."""

import torch
import torch.nn.functional as F

from cake_shared.gdn.backward import Needs, backward
from cake_shared.gdn.forward import forward
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def make_inputs(lengths, heads, ratio, key, value, *, seed=0, dtype=torch.float32, options=None, rest=0, batch=None):
    """Seeded inputs and cotangents of a pack; with `batch`, of that many rows of `lengths[0]` tokens, no offsets."""
    rng = torch.Generator().manual_seed(seed)
    options = options or Options(key**-0.5)
    value_heads = heads * ratio
    rows, tokens = (1, sum(lengths) + rest) if batch is None else (batch, lengths[0])
    count = len(lengths) if batch is None else batch

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k = normal(rows, tokens, heads, key), normal(rows, tokens, heads, key)
    if not options.qk_l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = normal(rows, tokens, value_heads)
    beta = normal(rows, tokens, value_heads)
    state = (count, value_heads, value, key) if options.state_v_first else (count, value_heads, key, value)
    inputs = Inputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=normal(rows, tokens, value_heads, value).to(dtype),
        g=(g if options.gate else F.logsigmoid(g) / 4).to(dtype),
        beta=(beta if options.beta_sigmoid else beta.sigmoid()).to(dtype),
        initial_state=normal(*state).to(dtype),
    )
    if options.gate:
        inputs.A_log = normal(value_heads).to(dtype)
        inputs.dt_bias = normal(value_heads).to(dtype)
    if batch is None:
        inputs.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    d_out = normal(rows, tokens, value_heads, value).to(dtype)
    return inputs, options, d_out, normal(*state).to(dtype)


def call(inputs, options, d_out, d_final, budget=None):
    """Run both passes and return outputs and gradients by name."""
    o, final, tape = forward(inputs, options, True, True, budget)
    needs = Needs(
        True, True, True, True, True, *(x is not None for x in (inputs.initial_state, inputs.A_log, inputs.dt_bias))
    )
    shape = tuple(inputs.v.shape[2:])
    grads = backward(inputs, options, d_out, d_final, tape, needs, shape, budget)
    return {
        "o": o,
        "final": final,
        **{name: getattr(grads, name) for name in NAMES if getattr(grads, name) is not None},
    }


def call_oracle(inputs, options, d_out, d_final):
    """Run the token recurrence on the same values and return the same names in float64."""
    leaves = {n: getattr(inputs, n) for n in NAMES if getattr(inputs, n) is not None}
    leaves = {n: x.double().requires_grad_() for n, x in leaves.items()}
    o, final = ref_chunk_gated_delta_rule(
        *(leaves[n] for n in NAMES[:5]),
        options.scale,
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=options.qk_l2norm,
        use_gate_in_kernel=options.gate,
        A_log=leaves.get("A_log"),
        dt_bias=leaves.get("dt_bias"),
        use_beta_sigmoid_in_kernel=options.beta_sigmoid,
        allow_neg_eigval=options.neg_eigval,
        state_v_first=options.state_v_first,
        cu_seqlens=inputs.cu_seqlens,
    )
    grads = torch.autograd.grad([o, final], list(leaves.values()), [d_out.double(), d_final.double()])
    return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads))}


def relative(a, b):
    """Relative L2 error of `a` against `b`; absolute where `b` is zero."""
    norm = float(b.double().norm())
    return float((a.double() - b.double()).norm()) / (norm or 1.0)
