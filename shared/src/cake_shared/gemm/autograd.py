"""Autograd of the projection and router forward in eager mode: straight onto the launcher, no dispatcher in between.

Saved is only what a wanted gradient needs: x for the weight's, w for the input's. A second derivative raises.
"""

import functools

import torch

from cake_shared.dispatch import Undifferentiable, refuse_forward_ad


class Projection(torch.autograd.Function):
    """`projection_forward` with gradients for x and w, or with the weight's added into an FP32 `main_grad`."""

    @staticmethod
    def forward(ctx, launcher, x, w, main_grad):
        """Run the forward; saves x and w as far as gradients are wanted."""
        _, x_wanted, w_wanted, _ = ctx.needs_input_grad
        ctx.launcher = launcher
        # An attribute, not a saved tensor: the backward of another use of the same weight adds into it in between.
        ctx.main_grad = main_grad if w_wanted else None
        ctx.save_for_backward(x if w_wanted else None, w if x_wanted else None)
        return launcher.run("forward", x, w)

    @staticmethod
    def backward(ctx, g):
        """Gradients for x and w; None where unwanted and where the weight's went into `main_grad`."""
        refuse_forward_ad(gradient=g)
        x, w = ctx.saved_tensors
        if x is not None and w is not None and not torch.is_grad_enabled():
            adds = ctx.main_grad is not None
            dx, dw = ctx.launcher.run_backward(g, x, w, ctx.main_grad, None, adds)
            return None, dx, None if adds else dw, None
        dx = None if w is None else _gradient(ctx.launcher, "dgrad", g, w)
        dw = None
        if x is not None and ctx.main_grad is not None:
            with torch.no_grad():  # under create_graph the operands may want gradients
                ctx.launcher.run("wgrad", g, x, ctx.main_grad, None, True)
        elif x is not None:
            dw = _gradient(ctx.launcher, "wgrad", g, x)
        return None, dx, dw, None


class Router(torch.autograd.Function):
    """`router_forward` with gradients for x (in its own dtype) and w."""

    @staticmethod
    def forward(ctx, launcher, x, w):
        """Run the forward; saves x and w as far as gradients are wanted."""
        _, x_wanted, w_wanted = ctx.needs_input_grad
        ctx.launcher, ctx.x_dtype = launcher, x.dtype
        ctx.save_for_backward(x if w_wanted else None, w if x_wanted else None)
        return launcher.run("router_forward", x, w)

    @staticmethod
    def backward(ctx, g):
        """Gradients for x and w; None where unwanted."""
        refuse_forward_ad(gradient=g)
        x, w = ctx.saved_tensors
        dx = None if w is None else _gradient(ctx.launcher, "router_dgrad", g, w).to(ctx.x_dtype)
        dw = None if x is None else _gradient(ctx.launcher, "router_wgrad", g, x)
        return None, dx, dw


def _gradient(launcher, kind, g, operand):
    if not torch.is_grad_enabled():
        return launcher.run(kind, g, operand)
    name = kind if kind.startswith("router") else f"projection_{kind}"
    return undifferentiable(name, functools.partial(launcher.run, kind), g, operand)


def undifferentiable(name, run, *operands):
    """`run(*operands)`, a gradient GEMM; where autograd records, one that refuses to be differentiated."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return Undifferentiable.apply(no_second_derivative(name), run, *operands)
    return run(*operands)


def no_second_derivative(name):
    """What the error of differentiating a gradient GEMM says."""
    return (
        f"{name} has no derivative: gradients of the projection and router GEMMs cannot be differentiated again "
        "(no double backward); detach its operands, or use torch.matmul where second derivatives are needed"
    )
