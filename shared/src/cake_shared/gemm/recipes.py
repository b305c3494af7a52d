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


def backward_signature(g, x, w, dw=None, dtype=None, accumulate=False):
    """The key of a call of both gradients."""
    aligned = w.data_ptr() & _MISALIGNED
    return signature("backward", g, x, dw, dtype, accumulate), w.shape, w.stride(), w.dtype, w.device, aligned


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


class BackwardRecipe:
    """One signature's call of both gradients, as `Recipe` is one product's; a given output is the weight gradient.

    Parameters
    ----------
    dx, dw : torch.Tensor
        The results of the first call.
    views : tuple of tuple of torch.Tensor
        a, b and out of both products of that call as the program was given them.
    spans : tuple of int
        Bytes from the first to the last of g, x, w and dw.
    launch : callable
        `(a, b, out, a, b, out)`, the backend's own for these problems.
    """

    __slots__ = ("_dw", "_dx", "_launch", "_spans", "_views")

    def __init__(self, dx, dw, views, spans, launch):
        self._dx, self._dw = ((x.shape, x.dtype, x.device) for x in (dx, dw))
        self._views = tuple(tuple((x.shape, x.stride()) for x in product) for product in views)
        self._spans = spans
        self._launch = launch

    def serves(self, g, x, w, dw):
        """Whether a given output lies apart from the operands."""
        to = dw.data_ptr()
        for operand, span in zip((g, x, w), self._spans):
            start = operand.data_ptr()
            if start < to + self._spans[3] and to < start + span:
                return False
        return True

    def __call__(self, g, x, w, dw=None):
        """Run on tensors of the signature, outside autograd; returns `(dx, dw)`."""
        shape, dtype, device = self._dx
        dx = torch.empty(shape, dtype=dtype, device=device)
        if dw is None:
            shape, dtype, device = self._dw
            dw = torch.empty(shape, dtype=dtype, device=device)
        tensors = ((g, w, dx), (g, x, dw))
        dgrad, wgrad = (
            [t.as_strided(*view) for t, view in zip(operands, views)] for operands, views in zip(tensors, self._views)
        )
        self._launch(*dgrad, *wgrad)
        return dx, dw


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
        if not _are_dense(left, right, out):
            return None
        recipe = self._known.get(signature(kind, left, right, out, dtype, accumulate))
        if recipe is None or (out is not None and not recipe.serves(left, right, out)):
            return None
        return recipe

    def find_backward(self, g, x, w, dw=None, dtype=None, accumulate=False):
        """The same for a call of both gradients."""
        if torch.compiler.is_compiling() or not isinstance(g, torch.Tensor) or not on_gpu(g):
            return None
        if not isinstance(x, torch.Tensor) or not isinstance(w, torch.Tensor):
            return None
        if as_operator(g, x, w, dw) or has_modes() or not _are_dense(g, x, w, dw):
            return None
        recipe = self._known.get(backward_signature(g, x, w, dw, dtype, accumulate))
        if recipe is None or (dw is not None and not recipe.serves(g, x, w, dw)):
            return None
        return recipe

    def learn(self, key, left, right, out, views, launch):
        """Keep what a call of the long way found out, unless it read copies of its operands."""
        given = left, right, out
        if not _reads_in_place(views, given):
            return
        spans = tuple(end - start for start, end in map(span_of, given))
        self._keep(key, Recipe(out.shape, out.dtype, out.device, views, spans, launch))

    def learn_backward(self, key, operands, results, views, launch):
        """The same of a call of both gradients: of g, x and w, and `(dx, dw)`."""
        (g, x, w), (dx, dw) = operands, results
        if not _reads_in_place((*views[0], *views[1]), (g, w, dx, g, x, dw)):
            return
        spans = tuple(end - start for start, end in map(span_of, (g, x, w, dw)))
        self._keep(key, BackwardRecipe(dx, dw, views, spans, launch))

    def _keep(self, key, recipe):
        if len(self._known) >= _CAPACITY:
            self._known.clear()
        self._known[key] = recipe

    def forget(self):
        """Drop all recipes: needed where a planner's choices change, as in measurements."""
        self._known.clear()


def _are_dense(*tensors):
    return all(t is None or t.layout is torch.strided for t in tensors)


def _reads_in_place(views, tensors):
    return all(t.numel() > 0 and view.data_ptr() == t.data_ptr() for view, t in zip(views, tensors))
