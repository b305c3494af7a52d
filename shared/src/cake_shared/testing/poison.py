"""NaN in every allocation that nobody has written yet: what is read before it is written shows at once."""

import contextlib
import functools

import torch

_FACTORIES = ("empty", "empty_like", "empty_strided", "empty_permuted")
_METHODS = ("new_empty", "new_empty_strided", "resize_")


def poison_(tensor):
    """Fill a tensor with what no correct result holds, in place, and return it.

    NaN for floating and complex types (both parts), the largest value for integers, True for booleans. Complex and
    floating tensors of any stride work; a tensor that requires gradients is filled outside autograd.
    """
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.detach().fill_(float("nan")) if tensor.requires_grad else tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max)


def _poisoned_factory(original):
    @functools.wraps(original)
    def factory(*args, **kwargs):
        result = original(*args, **kwargs)
        if kwargs.get("out") is None:
            poison_(result)
        return result

    return factory


def _poisoned_method(original, name):
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        old = self.numel()
        result = original(self, *args, **kwargs)
        if name != "resize_":
            poison_(result)
        elif result.numel() > old and result.is_contiguous():
            poison_(result.view(-1)[old:])
        return result

    return method


# One wrapper for each function and for good: torch.compile's tables remember functions by identity.
_ORIGINALS = {(torch, name): getattr(torch, name) for name in _FACTORIES}
_ORIGINALS.update({(torch.Tensor, name): getattr(torch.Tensor, name) for name in _METHODS})
_POISONED = {
    (owner, name): _poisoned_factory(original) if owner is torch else _poisoned_method(original, name)
    for (owner, name), original in _ORIGINALS.items()
}


@contextlib.contextmanager
def poisoned_allocations():
    """While this holds, what Python code allocates without writing is full of NaN.

    Covered are `torch.empty`, `empty_like`, `empty_strided`, `empty_permuted`, `Tensor.new_empty`, `new_empty_strided`
    and what `Tensor.resize_` adds, on every device and also while torch.compile traces. It replaces the Python
    functions, so that it changes nothing about which algorithms torch chooses (a deterministic switch would, and could
    hide a race); allocations inside torch's own operators and names bound before (`from torch import empty`) are left
    to `deterministic_fill`. Inside itself it does nothing more.
    """
    if torch.empty is _POISONED[torch, "empty"]:
        yield
        return
    for (owner, name), wrapper in _POISONED.items():
        setattr(owner, name, wrapper)
    try:
        yield
    finally:
        for (owner, name), original in _ORIGINALS.items():
            if owner is torch:
                setattr(owner, name, original)
            else:
                # The original lives on the C base class: removing the override brings it back.
                delattr(owner, name)


@contextlib.contextmanager
def deterministic_fill():
    """Torch's own poison: `use_deterministic_algorithms(True)` fills every allocation, also those inside operators."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling


def leave_nan_blocks(shapes, dtypes=(torch.float32, torch.bfloat16), device="cpu", copies=2):
    """Allocate tensors full of NaN of every shape and dtype and free them, so that the allocator hands such blocks on.

    Parameters
    ----------
    shapes : iterable of tuple of int
        Sizes in elements; those of the outputs under test are the interesting ones.
    dtypes : iterable of torch.dtype
        Floating types only.
    device : str or torch.device
        Where the blocks live.
    copies : int
        Blocks per shape and dtype, all alive at once before they are freed together.
    """
    blocks = [
        torch.full(shape, float("nan"), dtype=dtype, device=device)
        for shape in shapes
        for dtype in dtypes
        for _ in range(copies)
    ]
    del blocks
