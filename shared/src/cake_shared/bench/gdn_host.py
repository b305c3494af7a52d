"""What a call of the gated delta rule costs the host: the call into the module alone, and the whole Python call."""

import importlib
from collections.abc import Callable

import torch

from cake_shared.bench.gdn_gpu import make_tensors
from cake_shared.bench.gpu import enqueue_microseconds
from cake_shared.bench.result import Table
from cake_shared.workloads import GdnWorkload

# Too little work to wait for: two sequences of one chunk, so that offsets are read and tables made.
_SMALL = GdnWorkload("2 x 64", 2, 4, (64, 64))
_CALLS = 30


def module_calls(package: str, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """The calls into the package's module that `run` makes, forward and backward, with the arguments it gave them."""
    backend = importlib.import_module(f"{package}.cuda").rule_backend(torch.device("cuda"))
    given: dict[str, tuple] = {}
    real = {name: getattr(backend, name) for name in ("run_forward", "run_backward")}

    def recorder(name):
        def record(*arguments):
            given[name] = arguments
            return real[name](*arguments)

        return record

    try:
        for name in real:
            setattr(backend, name, recorder(name))
        run()
    finally:
        for name, function in real.items():
            setattr(backend, name, function)
    return {name.removeprefix("run_"): lambda name=name: real[name](*given[name]) for name in given}


class _Nothing(torch.autograd.Function):
    """Six tensors in, one out, gradients of five: what torch itself takes for a function of this shape."""

    @staticmethod
    def forward(ctx, o, *inputs):
        ctx.save_for_backward(*inputs)
        return o.detach()

    @staticmethod
    def backward(ctx, d_o):
        return (None, *ctx.saved_tensors)


def host_table(package: str, rule: Callable) -> tuple[Table, dict[str, float]]:
    """Host microseconds of the calls into the module, and of whole Python calls."""
    tensors = make_tensors(_SMALL, torch.float32)
    offsets = tensors.offsets[torch.int32]

    def forward():
        with torch.no_grad():
            rule(*tensors.inputs, cu_seqlens=offsets)

    def both():
        o = rule(*tensors.inputs, cu_seqlens=offsets)[0]
        torch.autograd.grad(o, tensors.inputs, tensors.do)

    o = torch.empty_like(tensors.do)

    def nothing():
        torch.autograd.grad(_Nothing.apply(o, *tensors.inputs), tensors.inputs, tensors.do)

    both()
    inside = module_calls(package, both)
    calls = {
        "C++ call, forward": inside["forward"],
        "C++ call, backward": inside["backward"],
        "Python call, forward without gradients": forward,
        "Python call, forward and backward": both,
        "an autograd function that does nothing, forward and backward": nothing,
    }
    micros = {name: enqueue_microseconds(call, calls=_CALLS) for name, call in calls.items()}
    rows = [[name, f"{value:.1f} us"] for name, value in micros.items()]
    note = (
        f"Mean of {_CALLS} calls in the best of 20 tries, two sequences of 64 tokens, H/HV {_SMALL.h}/{_SMALL.hv}; the "
        "device idle before each try. The C++ call is the one call into the module: checks, parameters, launches."
    )
    return Table("Host time of a call", ["call", "time"], rows, note), micros
