"""The same GEMMs as `torch.library` operators, for torch.compile, export and tensor subclasses.

Registered once a package, under its name. An operator that writes into a given tensor mutates it and returns nothing.
Every operator runs the launcher that eager mode runs, so both give the same bits.
"""

import torch

from cake_shared.gemm import contract
from cake_shared.gemm.autograd import no_second_derivative

SCHEMAS = {
    "gemm": "(Tensor a, Tensor b, Tensor(a!) out, bool transposed_out, bool accumulate) -> ()",
    "projection_forward": "(Tensor x, Tensor w) -> Tensor",
    "projection_forward_main_grad": "(Tensor x, Tensor w, Tensor main_grad) -> Tensor",
    "projection_dgrad": "(Tensor g, Tensor w) -> Tensor",
    "projection_wgrad": "(Tensor g, Tensor x, ScalarType out_dtype) -> Tensor",
    "projection_wgrad_out": "(Tensor g, Tensor x, Tensor(a!) out, bool accumulate) -> ()",
    "projection_backward": "(Tensor g, Tensor x, Tensor w, ScalarType out_dtype) -> (Tensor, Tensor)",
    "projection_backward_out": "(Tensor g, Tensor x, Tensor w, Tensor(a!) dw, bool accumulate) -> Tensor",
    "router_forward": "(Tensor x, Tensor w) -> Tensor",
    "router_dgrad": "(Tensor g, Tensor w, ScalarType? out_dtype=None) -> Tensor",
    "router_wgrad": "(Tensor g, Tensor x) -> Tensor",
}


def register_ops(package, launcher, run_gemm):
    """Register the operators of a package and return `(library, namespace)`; keep the library alive.

    `run_gemm(a, b, out, transposed_out, accumulate)` is the package's strict GEMM on real tensors.
    """
    library = torch.library.Library(package, "DEF")
    forward = _checked(contract.check_forward, launcher.forward)
    implementations = {
        "gemm": run_gemm,
        "projection_forward": forward,
        "projection_forward_main_grad": lambda x, w, main_grad: forward(x, w),
        "projection_dgrad": _checked(contract.check_dgrad, launcher.dgrad),
        "projection_wgrad": lambda g, x, out_dtype: _wgrad(launcher, g, x, None, out_dtype, False),
        "projection_wgrad_out": lambda g, x, out, accumulate: _nothing(_wgrad(launcher, g, x, out, None, accumulate)),
        "projection_backward": lambda g, x, w, out_dtype: _backward(launcher, g, x, w, None, out_dtype, False),
        "projection_backward_out": lambda g, x, w, dw, adds: _backward(launcher, g, x, w, dw, None, adds)[0],
        "router_forward": _checked(contract.check_forward, launcher.router_forward, contract.ROUTER_FORWARD),
        "router_dgrad": lambda g, w, out_dtype=None: _router_dgrad(launcher, g, w, out_dtype),
        "router_wgrad": _checked(contract.check_wgrad, launcher.router_wgrad, contract.ROUTER_WGRAD),
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementations[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{package}::{name}", _FAKES[name], lib=library)
    namespace = getattr(torch.ops, package)
    _register_autograd(package, library, namespace)
    return library, namespace


def _checked(check, prepare, *dtypes):
    """The operator may be called without the package's function before it, so it checks for itself."""

    def run(left, right):
        check(left, right, *dtypes)
        return prepare(left, right).launch()

    return run


def _wgrad(launcher, g, x, out, out_dtype, accumulate):
    contract.check_wgrad(g, x)
    dtype = contract.check_wgrad_out(g, x, out, out_dtype, accumulate)
    return launcher.wgrad(g, x, out, dtype, accumulate).launch()


def _backward(launcher, g, x, w, dw, out_dtype, accumulate):
    contract.check_backward(g, x, w)
    dtype = contract.check_wgrad_out(g, x, dw, out_dtype, accumulate, "dw")
    return launcher.backward(g, x, w, None, dw, dtype, accumulate).launch()


def _router_dgrad(launcher, g, w, out_dtype):
    contract.check_dgrad(g, w, contract.ROUTER_DGRAD)
    dtype = contract.check_out_dtype(out_dtype) or torch.float32
    # Rounded in here: a compiler that sees the rounding of a graph may fuse it with what follows and drop it.
    return launcher.router_dgrad(g, w).launch().to(dtype)


def _nothing(_):
    return None


def _empty(like, shape, dtype):
    return torch.empty(shape, dtype=dtype, device=like.device)


_FAKES = {
    "gemm": lambda a, b, out, transposed_out, accumulate: None,
    "projection_forward": lambda x, w: _empty(x, (*x.shape[:-1], w.shape[0]), torch.bfloat16),
    "projection_forward_main_grad": lambda x, w, main_grad: _empty(x, (*x.shape[:-1], w.shape[0]), torch.bfloat16),
    "projection_dgrad": lambda g, w: _empty(g, (*g.shape[:-1], w.shape[1]), torch.bfloat16),
    "projection_wgrad": lambda g, x, out_dtype: _empty(g, (g.shape[-1], x.shape[-1]), out_dtype),
    "projection_wgrad_out": lambda g, x, out, accumulate: None,
    "projection_backward": lambda g, x, w, out_dtype: (
        _empty(g, (*g.shape[:-1], w.shape[1]), torch.bfloat16),
        _empty(g, (g.shape[-1], x.shape[-1]), out_dtype),
    ),
    "projection_backward_out": lambda g, x, w, dw, accumulate: _empty(g, (*g.shape[:-1], w.shape[1]), torch.bfloat16),
    "router_forward": lambda x, w: _empty(x, (*x.shape[:-1], w.shape[0]), torch.float32),
    "router_dgrad": lambda g, w, out_dtype=None: _empty(g, (*g.shape[:-1], w.shape[1]), out_dtype or torch.float32),
    "router_wgrad": lambda g, x: _empty(g, (g.shape[-1], x.shape[-1]), torch.float32),
}


def _register_autograd(package, library, namespace):
    def save(ctx, inputs, output):
        x, w = inputs[:2]
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)

    def save_with_main_grad(ctx, inputs, output):
        save(ctx, inputs, output)
        ctx.main_grad = inputs[2]

    def projection_backward(ctx, g):
        x, w = ctx.saved_tensors
        if x is not None and w is not None:
            return namespace.projection_backward(g, x, w, torch.bfloat16)
        dx = None if w is None else namespace.projection_dgrad(g, w)
        dw = None if x is None else namespace.projection_wgrad(g, x, torch.bfloat16)
        return dx, dw

    def main_grad_backward(ctx, g):
        x, w = ctx.saved_tensors
        # An operator that writes has no derivative to raise with: where one may be asked for, the input's comes apart.
        if x is not None and w is not None and not torch.is_grad_enabled():
            return namespace.projection_backward_out(g, x, w, ctx.main_grad, True), None, None
        dx = None if w is None else namespace.projection_dgrad(g, w)
        if x is not None:
            namespace.projection_wgrad_out(g, x, ctx.main_grad, True)
        return dx, None, None

    def router_backward(ctx, g):
        x, w = ctx.saved_tensors
        dx = None if w is None else namespace.router_dgrad(g, w, ctx.x_dtype)
        dw = None if x is None else namespace.router_wgrad(g, x)
        return dx, dw

    def register(name, backward, setup=None):
        torch.library.register_autograd(f"{package}::{name}", backward, setup_context=setup, lib=library)

    register("projection_forward", projection_backward, save)
    register("projection_forward_main_grad", main_grad_backward, save_with_main_grad)
    register("router_forward", router_backward, save)
    for name in ("projection_dgrad", "projection_wgrad", "projection_backward", "router_dgrad", "router_wgrad"):
        register(name, _raise_at_backward(name))


def _raise_at_backward(name):
    def backward(ctx, *grads):
        raise RuntimeError(no_second_derivative(name))

    return backward
