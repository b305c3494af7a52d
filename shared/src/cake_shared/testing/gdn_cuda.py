"""Runs cases of the gated delta rule in BF16 against float64, for CUDA programs on a GPU or in the emulator."""

import torch

from cake_shared.gdn.eager import KnownCalls
from cake_shared.gdn.ops import RuleOps
from cake_shared.testing.gdn_gate_scale import gate_summands
from cake_shared.testing.gdn_reference import SMALLEST_NORMAL, reference, widened
from cake_shared.testing.gdn_run import run

# Operands of every product are rounded to BF16 and sums are FP32: a relative L2 error of this under mild gates.
BF16_LIMIT = 4.5e-3

_TENSORS = ("q", "k", "v", "g", "beta", "do", "initial_state", "d_state", "cu_seqlens")


class _Through(RuleOps):
    """The core of the public functions on a backend given outright; no operators are registered."""

    def __init__(self, package, backend):
        self.package, self._backend, self._known = package, backend, KnownCalls()

    def backend(self, device, name=None):
        return self._backend


def rule_through(package, backend):
    """A `chunk_gated_delta_rule` of a package that runs through `backend`, whatever the tensors' device."""
    ops = _Through(package, backend)

    def rule(q, k, v, g, beta, scale=None, *, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
        switches = (
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "state_v_first",
        )
        per_head = (options.pop("A_log", None), options.pop("dt_bias", None))
        flags = [options.pop(name, False) for name in switches]
        if options:
            raise TypeError(f"not an option of the rule: {', '.join(options)}")
        return ops.call(q, k, v, g, beta, scale, initial_state, *per_head, cu_seqlens, flags, output_final_state, None)

    return rule


def portable_backend(package):
    """The package's portable programs on the current GPU, whatever native ones serve its architecture.

    With `rule_through` they run as the rule. Their module is built at the first call.
    """
    from cake_shared import jit
    from cake_shared.gdn.cuda.devices import error_word_of
    from cake_shared.gdn.cuda.rule import RuleBackend
    from cake_shared.target import target_of

    device = torch.device("cuda", torch.cuda.current_device())
    module = jit.load(package, target_of(device).name, portable=True)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    word = error_word_of(device)
    return RuleBackend(module, word, multiprocessors, lambda: torch.cuda.current_stream(device).cuda_stream)


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


def exit_paths(case, expected):
    """L2 norm, over all tokens and heads, of the summands on the paths from a chunk's entry state to its exit gradient.

    They are the K * V products of two matrices. Independent ones of norms a and b leave a sum of about a b / sqrt(K V),
    and BF16 operands leave rounding errors on that scale whatever the sum.

    Parameters
    ----------
    case : GdnCase
        Any.
    expected : dict
        Its float64 results.
    """
    if case.d_state is None or expected["final_state"] is None:
        return 0.0
    states = [x for x in (expected["final_state"], case.initial_state) if x is not None]
    size = max(float(x.double().norm(dim=(-2, -1)).max()) for x in states)
    gradient = float(case.d_state.double().norm(dim=(-2, -1)).max())
    elements = case.d_state.shape[-2] * case.d_state.shape[-1]
    return size * gradient / elements**0.5 * case.g.numel() ** 0.5


def gate_gradient_scale(case, expected):
    """L2 norm of what dg is summed from, over all tokens and heads; see `gate_summands` and `exit_paths`.

    Parameters
    ----------
    case : GdnCase
        Without options.
    expected : dict
        Its float64 results.
    """
    do = torch.zeros_like(case.v) if case.do is None else case.do
    scale = float(gate_summands(case.with_(do=do))[1].norm())
    return (scale**2 + exit_paths(case, expected) ** 2) ** 0.5


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


def assert_fading_is_accurate(rule, results, case, accuracy=BF16_LIMIT):
    """Assert that results of `gdn_inputs.fading` are right in each segment, where its neighbours are far larger.

    Parameters
    ----------
    rule : callable
        Gives float64's results of a widened case in host memory.
    results, case, accuracy
        As for `assert_accurate`.
    """
    __tracebackhide__ = True
    expected = run(rule, widened(case))
    for name in ("o", "dv"):
        for start in range(0, case.g.shape[1], 4096):
            tokens = slice(start, start + 4096)
            right, actual = expected[name][:, tokens], results[name][:, tokens].cpu().double()
            error = float((actual - right).norm() / right.norm())
            assert error <= accuracy, f"{name} of tokens from {start}: {error:.2e}"


def check_accurate(rule, case, device, accuracy=BF16_LIMIT, **keywords):
    """Run a host case on a device and assert its accuracy; returns the results in host memory."""
    __tracebackhide__ = True
    results = on_cpu(run(rule, moved(case, device), **keywords))
    assert_accurate(results, case, accuracy)
    return results
