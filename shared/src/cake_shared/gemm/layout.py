"""How a matrix lies in memory: which axis has unit stride, and whether a program can read it where it lies.

The rule is the same on every backend, so that what runs on a CPU runs on a GPU: one axis of unit stride, every other
stride a positive multiple of 8 elements (a batch stride may be 0), the first element on 16 bytes. An axis of extent 1
has no stride to speak of.
"""

import torch

from cake_shared.gemm.check import ALIGNMENT_BYTES, WIDTH_MULTIPLE


def major_axis(tensor, row_axis, col_axis):
    """Name of the unit-stride axis of `[..., rows, cols]`, or None where the strides break the rule."""
    rows, cols = tensor.shape[-2:]
    row_stride, col_stride = tensor.stride()[-2:]
    if tensor.dim() == 3 and tensor.shape[0] > 1 and tensor.stride(0) % WIDTH_MULTIPLE:
        return None
    if (col_stride == 1 or cols <= 1) and (rows <= 1 or _is_pitch(row_stride)):
        return col_axis
    if (row_stride == 1 or rows <= 1) and (cols <= 1 or _is_pitch(col_stride)):
        return row_axis
    return None


def _is_pitch(stride):
    return stride > 0 and stride % WIDTH_MULTIPLE == 0


def is_aligned(tensor):
    """Whether the first element lies on 16 bytes (an empty tensor does)."""
    return tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT_BYTES == 0


def require_major(name, tensor, row_axis, col_axis):
    """The unit-stride axis, or a ValueError that names the stride or the alignment that is in the way."""
    if tensor.numel() == 0:
        return col_axis
    major = major_axis(tensor, row_axis, col_axis)
    if major is None:
        raise ValueError(
            f"{name}: got strides {list(tensor.stride())} for shape {list(tensor.shape)}, takes unit stride on "
            f"{row_axis} or {col_axis} and other strides that are multiples of {WIDTH_MULTIPLE} elements "
            "(.contiguous() makes such a copy where the last extent is a multiple of 8)"
        )
    if not is_aligned(tensor):
        raise ValueError(
            f"{name}: got a start at address {tensor.data_ptr():#x}, takes a start aligned to {ALIGNMENT_BYTES} bytes "
            "(a view's offset must be a multiple of 8 BF16 elements; .clone() makes an aligned copy)"
        )
    return major


def readable(tensor):
    """`tensor` itself where its layout keeps the rule, else a copy with rows padded to a legal pitch."""
    if tensor.numel() == 0 or (major_axis(tensor, "r", "c") is not None and is_aligned(tensor)):
        return tensor
    rows, cols = tensor.shape
    pitch = -(-cols // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    copy = torch.empty(rows, pitch, dtype=tensor.dtype, device=tensor.device)[:, :cols]
    return copy.copy_(tensor)


def as_matrix(tensor):
    """`[..., C]` as `[rows, C]`: a view where the leading axes collapse, else a copy."""
    return tensor.reshape(row_count(tensor), tensor.shape[-1])


def view_matrix(name, tensor):
    """`[..., C]` as a view `[rows, C]`; ValueError where the leading axes do not collapse."""
    try:
        return tensor.view(row_count(tensor), tensor.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name}: got strides {list(tensor.stride())} for shape {list(tensor.shape)}, takes leading dimensions "
            "that collapse into one without a copy"
        ) from None


def row_count(tensor):
    """Product of the leading extents."""
    rows = 1
    for extent in tensor.shape[:-1]:
        rows *= extent
    return rows
