"""Runs a gated delta rule on a `GdnCase` and gathers outputs and gradients by name."""

import torch

GRADIENT_OF = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dg": "g",
    "dbeta": "beta",
    "d_initial_state": "initial_state",
    "dA_log": "A_log",
    "ddt_bias": "dt_bias",
}


def run(function, case, *, output_final_state=None, wrt=None, **keywords):
    """Call `function` on a case and differentiate.

    Parameters
    ----------
    function : callable
        With the signature of `chunk_gated_delta_rule`.
    case : GdnCase
        Its `do` goes into `o`, its `d_state` (where given) into the final state. The tensors are passed as they are,
        strides included.
    output_final_state : bool, optional
        True by default.
    wrt : iterable of str, optional
        Inputs to differentiate, by argument name; all that the case has by default.
    keywords
        Passed on, over the options of the case.

    Returns
    -------
    dict
        `o`, `final_state` and the gradients under the names of `GRADIENT_OF` (None where not asked for or unused).
    """
    named = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "initial_state")}
    options = {**case.options, **keywords}
    named.update({name: options.pop(name) for name in ("A_log", "dt_bias") if options.get(name) is not None})
    wanted = [name for name, x in named.items() if x is not None and (wrt is None or name in wrt)]
    inputs = {name: x.detach().requires_grad_() if name in wanted else x for name, x in named.items()}
    q, k, v, g, beta = (inputs.pop(name) for name in ("q", "k", "v", "g", "beta"))
    leaves = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **inputs}
    o, final_state = function(
        q,
        k,
        v,
        g,
        beta,
        case.scale,
        output_final_state=True if output_final_state is None else output_final_state,
        cu_seqlens=case.cu_seqlens,
        **inputs,
        **options,
    )
    results = dict.fromkeys(GRADIENT_OF)
    results.update(o=o.detach(), final_state=None if final_state is None else final_state.detach())
    outputs, cotangents = [], []
    for output, cotangent in ((o, case.do), (final_state, case.d_state)):
        if output is not None and output.requires_grad and cotangent is not None:
            outputs.append(output)
            cotangents.append(cotangent.to(output.dtype))
    if outputs:
        torch.autograd.backward(outputs, cotangents)
        results.update({name: leaves[GRADIENT_OF[name]].grad for name in GRADIENT_OF if GRADIENT_OF[name] in wanted})
    return results
