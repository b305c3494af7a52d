"""Compares a gated delta rule with the float64 token recurrence, every result on its own."""

import torch

from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule
from cake_shared.testing.gdn_gate_scale import gate_summands
from cake_shared.testing.gdn_run import GRADIENT_OF, run

# Below it FP32 has no full precision: gates of -100 make states and gradients of 1e-44, which are zero as well.
SMALLEST_NORMAL = 2.0**-126


def limit(dtype):
    """Relative L2 limit of a CPU result of that dtype against float64: FP32 arithmetic, one rounding to the dtype."""
    return 2.5e-3 if dtype.itemsize == 2 else 2e-6


def widened(case):
    """The case in float64, of the same values."""
    names = ("q", "k", "v", "g", "beta", "do", "initial_state", "d_state")
    changes = {name: getattr(case, name).double() for name in names if getattr(case, name) is not None}
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in case.options.items()}
    return case.with_(options=options, **changes)


def reference(case, wrt=None, **keywords):
    """`run` of the float64 token recurrence on the case's values; zeros for inputs that the loss does not depend on."""
    case = widened(case)
    results = run(ref_chunk_gated_delta_rule, case, wrt=wrt, **keywords)
    for name, argument in GRADIENT_OF.items():
        value = case.options.get(argument) if argument in ("A_log", "dt_bias") else getattr(case, argument)
        if results[name] is None and value is not None and (wrt is None or argument in wrt):
            results[name] = torch.zeros_like(value)
    return results


def assert_near_in_fp32(actual, right, accuracy, name):
    """Assert a relative L2 error of at most `accuracy`, where elements below FP32's normal numbers count as zero."""
    __tracebackhide__ = True
    assert actual is not None, f"{name} is None"
    assert bool(torch.isfinite(actual).all()), f"{name} is not finite"
    right = torch.where(right.abs() < SMALLEST_NORMAL, 0.0, right)
    error, norm = float((actual.double() - right).norm()), float(right.norm())
    bound = accuracy * norm + SMALLEST_NORMAL * right.numel() ** 0.5
    assert error <= bound, f"{name}: error {error:.3e} of {norm:.3e}, limit {bound:.3e}"


def check_near(results, expected, names=None, gate_scale=None):
    """Assert that results agree with float64 ones, each by its own relative L2 error.

    Parameters
    ----------
    results, expected : dict
        As `run` gives them.
    names : iterable of str, optional
        Which; by default all that `expected` has.
    gate_scale : torch.Tensor, optional
        Scale of the summands of dg, as `gate_summands` gives it: dg is then judged head by head against it.
    """
    __tracebackhide__ = True
    for name in names or [name for name, x in expected.items() if x is not None]:
        actual, right = results[name], expected[name]
        if name == "dg" and gate_scale is not None:
            assert actual is not None, "dg is None"
            for head in range(actual.shape[-1]):
                error = float((actual[..., head].double() - right[..., head]).norm())
                bound = (
                    limit(actual.dtype) * float(gate_scale[..., head].norm()) + SMALLEST_NORMAL * actual.numel() ** 0.5
                )
                assert error <= bound, f"dg of head {head}: error {error:.3e}, limit {bound:.3e}"
        else:
            assert_near_in_fp32(actual, right, 0.0 if actual is None else limit(actual.dtype), name)


def check_against_reference(function, case, **keywords):
    """Run both, compare o, final state and every gradient, and return the float64 results."""
    __tracebackhide__ = True
    expected = reference(case, **keywords)
    results = run(function, case, **keywords)
    for name, argument in GRADIENT_OF.items():
        if (results[name] is None) != (expected[name] is None):
            raise AssertionError(f"{name}, the gradient of {argument}: one side is None, the other is not")
    scale = None if case.options else gate_summands(case)[1]
    check_near(results, expected, gate_scale=scale)
    return expected
