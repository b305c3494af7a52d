"""Guard bands: a tensor inside a larger buffer whose other elements must stay as they were."""

import torch

from cake_shared.testing.bits import bits_of


class GuardBand:
    """A tensor with a band of sentinel elements before, after and, if asked, beside each of its rows.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor in the middle.
    dtype, device
        Of the tensor and its buffer.
    margin : int
        Sentinel elements before the first and after the last row.
    row_margin : int
        Sentinel elements after each row (the last dimension), which makes the tensor a strided view.
    sentinel : float
        What the bands hold: NaN by default, so that reading a band also shows in results.

    Attributes
    ----------
    tensor : torch.Tensor
        The view that the code under test gets; its own elements are NaN as well until written.
    """

    def __init__(self, shape, dtype=torch.float32, device="cpu", *, margin=256, row_margin=0, sentinel=float("nan")):
        shape = tuple(shape)
        width = shape[-1] + row_margin
        rows = 1
        for size in shape[:-1]:
            rows *= size
        self._buffer = torch.full((2 * margin + rows * width,), sentinel, dtype=dtype, device=device)
        strides, stride = [1], width
        for size in reversed(shape[:-1]):
            strides.append(stride)
            stride *= size
        self.tensor = self._buffer.as_strided(shape, tuple(reversed(strides)), margin)
        inside = torch.zeros(self._buffer.numel(), dtype=torch.bool, device=device)
        inside.as_strided(shape, tuple(reversed(strides)), margin).fill_(True)
        self._outside = ~inside
        self._before = bits_of(self._buffer)[self._outside].clone()
        self._margin = margin

    @classmethod
    def around(cls, tensor, **keywords):
        """A guarded copy of a tensor: same shape, dtype, device and values."""
        band = cls(tensor.shape, tensor.dtype, tensor.device, **keywords)
        with torch.no_grad():
            band.tensor.copy_(tensor)
        return band

    def check(self, name="tensor"):
        """Raise AssertionError if any element of the bands changed; offsets are in elements from the tensor's start."""
        __tracebackhide__ = True
        now = bits_of(self._buffer)[self._outside]
        changed = now != self._before
        if bool(changed.any()):
            offsets = self._outside.nonzero()[:, 0][changed] - self._margin
            raise AssertionError(
                f"{name}: {int(changed.sum())} elements of the guard bands were written, "
                f"first at element offset {int(offsets[0])}, last at {int(offsets[-1])}"
            )
