"""Comparison of tensors: by bits, and by relative error in the L2 norm."""

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor):
    """The bit patterns of a tensor as signed integers of the same width (uint8 for one byte), contiguous.

    Shape is kept, except that a complex tensor gains a last dimension of two.
    """
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def same_bits(actual, expected):
    """Whether two tensors (or two Nones) have the same dtype, shape and bit patterns."""
    if actual is None or expected is None:
        return actual is expected
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and bool(torch.equal(bits_of(actual), bits_of(expected)))
    )


def assert_bitwise_equal(actual, expected, name="tensor"):
    """Raise AssertionError unless dtype, shape and every bit pattern agree.

    Bits decide, not values: -0.0 and +0.0 differ, and two NaNs are equal only with the same sign and payload. Strides
    and devices may differ. The message gives the first differing index (in row-major order), both values and patterns,
    how many elements differ and the largest absolute difference. Two Nones are equal; None and a tensor are not.
    """
    __tracebackhide__ = True
    if actual is None and expected is None:
        return
    if actual is None or expected is None:
        raise AssertionError(f"{name}: one side is None: {_describe(actual)} against {_describe(expected)}")
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(f"{name}: {_describe(actual)} against {_describe(expected)}")
    expected = expected.to(actual.device)
    left, right = bits_of(actual), bits_of(expected)
    differs = left != right
    count = int(differs.sum())
    if count == 0:
        return
    first = tuple(int(i) for i in differs.nonzero()[0])
    width = 2 * left.element_size()
    mask = (1 << (8 * left.element_size())) - 1
    values = [x.detach()[first[: x.dim()]].item() for x in (actual, expected)]
    patterns = [f"0x{int(x[first]) & mask:0{width}x}" for x in (left, right)]
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    largest = (actual.detach().to(wide) - expected.detach().to(wide)).abs().max().item()
    raise AssertionError(
        f"{name}: {count} of {differs.numel()} elements differ in bits; first at {list(first)}: "
        f"{values[0]!r} ({patterns[0]}) against {values[1]!r} ({patterns[1]}); largest difference {largest:.3e}"
    )


def _describe(tensor):
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def relative_l2(actual, expected):
    """Error of `actual` against `expected` in the L2 norm, relative to the norm of `expected`, computed in float64.

    Against an `expected` of zeros it is the norm of `actual` itself. Anything that is not finite in `actual` gives
    infinity. An empty pair gives 0.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {list(actual.shape)}, expected has {list(expected.shape)}")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    norm = float(expected.norm())
    return float((actual - expected).norm()) / (norm if norm > 0 else 1.0)


def assert_near(actual, expected, limit, name="tensor"):
    """Raise AssertionError unless `relative_l2(actual, expected) <= limit`; the message gives error and limit."""
    __tracebackhide__ = True
    if actual is None or expected is None:
        raise AssertionError(f"{name}: {_describe(actual)} against {_describe(expected)}")
    error = relative_l2(actual, expected)
    if not error <= limit:
        raise AssertionError(f"{name}: relative L2 error {error:.3e}, limit {limit:.3e}")
