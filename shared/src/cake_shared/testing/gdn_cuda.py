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
    scale = None if case.options else gate_summands(case)[1]
    faults = []
    for name in names or [name for name, x in expected.items() if x is not None]:
        right, actual = expected[name], results[name]
        assert actual is not None, f"{name} is None"
        actual = actual.cpu().double()
        if not bool(torch.isfinite(actual).all()):
            faults.append(f"{name} is not finite")
            continue
        error = float((actual - right).norm())
        size = float(scale.norm()) if name == "dg" and scale is not None else float(right.norm())
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
