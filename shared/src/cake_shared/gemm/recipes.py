"""Repeated eager calls on a GPU: what the first of a signature found out, so that the next only allocate and launch.

A signature is everything that checks, layout and plan depend on: shapes, strides, dtypes, devices, alignment. What
depends on more than that (addresses that may overlap, autograd, dispatch modes) is looked at in every call.
"""

import torch

from cake_shared.dispatch import as_operator, has_modes
from cake_shared.gemm.check import ALIGNMENT_BYTES

_CAPACITY = 4096
_MISALIGNED = ALIGNMENT_BYTES - 1


def signature(kind, left, right, out=None, dtype=None, accumulate=False):
    """The key of a call on two operands and, where given, an output."""
    return (
        kind,
        left.shape,
        left.stride(),
        left.dtype,
        left.device,
        left.data_ptr() & _MISALIGNED,
        right.shape,
        right.stride(),
        right.dtype,
        right.device,
        right.data_ptr() & _MISALIGNED,
        dtype,
        accumulate,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & _MISALIGNED),
    )


def on_gpu(tensor):
    """Whether the tensor lies on a CUDA device."""
    return tensor.is_cuda


def span_of(tensor):
    """First and last byte of a tensor that is not empty, the latter exclusive."""
    start = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


class Recipe:
    """One signature's call: allocates the output where none is given, views all three as the program does, launches.

    Parameters
    ----------
    shape, dtype, device
        Of the output.
    views : tuple of torch.Tensor
        a, b and out of the first call as the program was given them.
    spans : tuple of int
        Bytes from the first to the last of the left operand, the right one and the output.
    launch : callable
        `(a, b, out)`, the backend's own for this problem.
    """

    __slots__ = ("_device", "_dtype", "_launch", "_shape", "_spans", "_views")

    def __init__(self, shape, dtype, device, views, spans, launch):
        self._shape, self._dtype, self._device = shape, dtype, device
        self._views = tuple((x.shape, x.stride()) for x in views)
        self._spans = spans
        self._launch = launch

    def serves(self, left, right, out):
        """Whether a given output lies apart from the operands; one between their rows takes the long way."""
        to = out.data_ptr()
        for operand, span in zip((left, right), self._spans):
            start = operand.data_ptr()
            if start < to + self._spans[2] and to < start + span:
                return False
        return True

    def __call__(self, left, right, out=None):
        """Run on tensors of the signature, outside autograd; returns the output."""
        if out is None:
            out = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        (a_size, a_stride), (b_size, b_stride), (out_size, out_stride) = self._views
        a, b = left.as_strided(a_size, a_stride), right.as_strided(b_size, b_stride)
        self._launch(a, b, out.as_strided(out_size, out_stride))
        return out


class Recipes:
    """The recipes of one package's eager calls."""

    def __init__(self):
        self._known = {}

    def find(self, kind, left, right, out=None, dtype=None, accumulate=False):
        """The recipe of a call on plain CUDA tensors that nothing watches, or None: the long way then."""
        if torch.compiler.is_compiling() or not isinstance(left, torch.Tensor) or not on_gpu(left):
            return None
        if not isinstance(right, torch.Tensor) or as_operator(left, right, out) or has_modes():
            return None
        recipe = self._known.get(signature(kind, left, right, out, dtype, accumulate))
        if recipe is None or (out is not None and not recipe.serves(left, right, out)):
            return None
        return recipe

    def learn(self, key, left, right, out, views, launch):
        """Keep what a call of the long way found out, unless it read copies of its operands."""
        if out.numel() == 0 or left.numel() == 0 or right.numel() == 0:
            return
        if any(view.data_ptr() != x.data_ptr() for view, x in zip(views, (left, right, out))):
            return
        spans = tuple(end - start for start, end in map(span_of, (left, right, out)))
        if len(self._known) >= _CAPACITY:
            self._known.clear()
        self._known[key] = Recipe(out.shape, out.dtype, out.device, views, spans, launch)

    def forget(self):
        """Drop all recipes: needed where a planner's choices change, as in measurements."""
        self._known.clear()
