"""Runs cases of the gated delta rule in BF16 against float64, for CUDA programs on a GPU or in the emulator."""

import torch

from cake_shared.testing.gdn_gate_scale import gate_summands
from cake_shared.testing.gdn_reference import SMALLEST_NORMAL, reference
from cake_shared.testing.gdn_run import run

# Operands of every product are rounded to BF16 and sums are FP32: a relative L2 error of this under mild gates.
BF16_LIMIT = 4.5e-3

_TENSORS = ("q", "k", "v", "g", "beta", "do", "initial_state", "d_state", "cu_seqlens")


def moved(case, device):
    """The case with all of its tensors on a device, strides kept."""

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        if x.device == torch.device(device):
            return x
        if 0 in x.stride() or not x.numel():
            return x.to(device).expand(x.shape) if x.numel() else x.to(device)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    changes = {name: move(getattr(case, name)) for name in _TENSORS}
    return case.with_(options={name: move(x) for name, x in case.options.items()}, **changes)


def on_cpu(results):
    """Results by name, in host memory."""
    return {name: None if x is None else x.cpu() for name, x in results.items()}


def gate_gradient_scale(case, expected):
    """L2 norm of what dg is summed from, over all tokens and heads.

    Besides the terms of `gate_summands`, a chunk's share of the path from its entry state to its exit gradient is a sum
    of K * V products, which cancel: two independent matrices of norms a and b leave a number of about a b / sqrt(K V),
    with rounding errors of BF16 operands on that scale.

    Parameters
    ----------
    case : GdnCase
        Without options.
    expected : dict
        Its float64 results.
    """
    do = torch.zeros_like(case.v) if case.do is None else case.do
    scale = float(gate_summands(case.with_(do=do))[1].norm())
    if case.d_state is None or expected["final_state"] is None:
        return scale
    tokens, heads = case.g.shape[1:]
    states = [expected["final_state"], case.initial_state]
    size = max(float(x.double().norm(dim=(-2, -1)).max()) for x in states if x is not None)
    gradient = float(case.d_state.double().norm(dim=(-2, -1)).max())
    elements = case.d_state.shape[-2] * case.d_state.shape[-1]
    paths = size * gradient / elements**0.5 * (tokens * heads * case.g.shape[0]) ** 0.5
    return (scale**2 + paths**2) ** 0.5


def assert_accurate(results, case, accuracy=BF16_LIMIT, names=None):
    """Assert that results agree with the float64 token recurrence, each on its own, and are finite.

    Parameters
    ----------
    results : dict
        As `run` gives them, on any device.
    case : GdnCase
        In host memory.
    accuracy : float
        Relative L2 limit. Without options dg is judged against the scale of its summands: under strong decay, or with
        gates that cancel, it is far smaller than they are.
    names : iterable of str, optional
        Which results; all that float64 gives by default.
    """
    __tracebackhide__ = True
    expected = reference(case)
    faults = []
    for name in names or [name for name, x in expected.items() if x is not None]:
        right, actual = expected[name], results[name]
        assert actual is not None, f"{name} is None"
        actual = actual.cpu().double()
        if not bool(torch.isfinite(actual).all()):
            faults.append(f"{name} is not finite")
            continue
        error = float((actual - right).norm())
        judged_by_scale = name == "dg" and not case.options
        size = gate_gradient_scale(case, expected) if judged_by_scale else float(right.norm())
        bound = accuracy * size + SMALLEST_NORMAL * right.numel() ** 0.5
        if error > bound:
            faults.append(f"{name}: error {error:.3e} of {size:.3e}, limit {bound:.3e}")
    assert not faults, "; ".join(faults)


def check_accurate(rule, case, device, accuracy=BF16_LIMIT, **keywords):
    """Run a host case on a device and assert its accuracy; returns the results in host memory."""
    __tracebackhide__ = True
    results = on_cpu(run(rule, moved(case, device), **keywords))
    assert_accurate(results, case, accuracy)
    return results
