"""Which calls go through torch's dispatcher as one operator, and which kinds of derivatives none of them has."""

from typing import Any

import torch
from torch.autograd import forward_ad

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(x: torch.Tensor) -> bool:
    """Return whether `x` is a tensor that torch itself makes, not one of a subclass (a fake, a sharded one)."""
    return type(x) in _PLAIN


def has_modes() -> bool:
    """Return whether a dispatch mode, a functorch transform or forward-mode differentiation is at work."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def as_operator(*tensors: Any) -> bool:
    """Return whether a call must be made through its registered operator.

    Under torch.compile it is part of a graph. A dispatch mode (selective checkpointing, FLOP counters, fake tensors,
    tracing) must see one operation, not the tiles and buffers inside it; a functorch transform and a tensor subclass
    have no memory of their own to read.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(x is not None and not is_plain(x) for x in tensors)
    )


def refuse_forward_ad(**tensors: Any) -> None:
    """Raise `RuntimeError` where an argument carries a forward-mode tangent, which no program here propagates."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"{name}: got a tensor with a forward-mode tangent, takes one without: there are gradients of the "
                "reverse mode only (backward, torch.autograd.grad)"
            )


class Undifferentiable(torch.autograd.Function):
    """`apply(message, run, *operands)`: `run(*operands)`, and asking for its derivative raises `RuntimeError(message)`.

    For what computes gradients under `create_graph=True`: without a node the results would be constants, and a penalty
    on them would train on another gradient in silence. Operands that want no gradients give results without a node.
    """

    @staticmethod
    def forward(ctx, message, run, *operands):
        """Return `run(*operands)`."""
        ctx.message = message
        return run(*operands)

    @staticmethod
    def backward(ctx, *gradients):
        """Raise: there is no derivative of a derivative here."""
        raise RuntimeError(ctx.message)
