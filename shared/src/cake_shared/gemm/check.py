"""Argument checks of the GEMM functions: every error names the argument, what it got and what it takes."""

import torch

WIDTH_MULTIPLE = 8  # elements; 16 bytes of BF16, the granule of a tensor map's strides
ALIGNMENT_BYTES = 16


def dtype_name(dtype):
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name, value, *dtypes):
    """Raise TypeError unless `value` is a dense tensor of one of `dtypes`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a torch.Tensor")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: got layout {value.layout}, takes a dense (strided) tensor")
    if value.dtype not in dtypes:
        takes = " or ".join(dtype_name(d) for d in dtypes)
        raise TypeError(f"{name}: got dtype {dtype_name(value.dtype)}, takes {takes} (convert it with .to())")


def check_same_device(**tensors):
    """Raise ValueError unless all tensors are on one device."""
    (first, reference), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != reference.device:
            raise ValueError(f"{name}: got device {tensor.device}, takes the device of {first}, {reference.device}")


def check_rank(name, tensor, what, *ranks):
    """Raise ValueError unless the tensor has one of these numbers of dimensions."""
    if tensor.dim() not in ranks:
        raise ValueError(f"{name}: got shape {_shape(tensor)}, takes {what}")


def check_extent(name, tensor, axis, expected, meaning):
    """Raise ValueError unless `tensor.shape[axis] == expected`."""
    if tensor.shape[axis] != expected:
        raise ValueError(f"{name}: got shape {_shape(tensor)}, takes {expected} in dimension {axis} ({meaning})")


def check_shape(name, tensor, expected, meaning):
    """Raise ValueError unless the tensor has exactly this shape."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name}: got shape {_shape(tensor)}, takes {list(expected)} ({meaning})")


def check_width(name, extent, meaning):
    """Raise ValueError unless an output width is a multiple of 8."""
    if extent % WIDTH_MULTIPLE:
        raise ValueError(f"{name}: got {extent} {meaning}, takes a multiple of {WIDTH_MULTIPLE}")


def check_flag(name, value):
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, takes True or False")


def check_backend(package, backend, tensor):
    """The backend that serves this tensor: "cpu" or "cuda" ("meta" for tensors without storage).

    `backend=None` takes the tensor's device; a name must agree with it. Raises ValueError otherwise: nothing is moved
    and nothing falls back.
    """
    device = tensor.device.type
    if backend is None:
        if device not in ("cpu", "cuda", "meta"):
            raise ValueError(f"{package}: got tensors on {tensor.device}, takes tensors on cpu or cuda")
        return device
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"backend: got {backend!r}, takes None, 'cpu' or 'cuda'")
    if backend != device:
        raise ValueError(
            f"backend: got {backend!r} with tensors on {tensor.device}, takes tensors on {backend} "
            f"(move them with .to({backend!r}), or leave backend=None)"
        )
    return device


def check_no_overlap(out_name, out, **inputs):
    """Raise ValueError if `out` may share memory with an input or with itself.

    Views of one buffer pass when their columns are provably apart: then all non-unit strides of the two are multiples
    of one pitch, and the columns they occupy in it do not meet.
    """
    if out.numel() == 0:
        return
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(out.stride(), out.shape) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{out_name}: got strides {list(out.stride())} for shape {_shape(out)}, where elements share memory; "
                "takes a tensor whose elements are apart"
            )
        extent = stride * (size - 1) + extent
    for name, tensor in inputs.items():
        if tensor.numel() and _may_overlap(out, tensor):
            raise ValueError(f"{out_name}: shares memory with {name}, takes a tensor of its own")


def _may_overlap(left, right):
    # By addresses, not by storage: two storages may be windows on one buffer (NumPy, DLPack).
    spans = []
    for t in (left, right):
        start = t.data_ptr()
        spans.append((start, start + (sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1) * t.element_size()))
    if spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]:
        return False
    return not _columns_apart(left, right, spans[0][0], spans[1][0])


def _columns_apart(left, right, left_start, right_start):
    pitch, widths = 0, []
    for t in (left, right):
        width = t.element_size()
        for size, stride in zip(t.shape, t.stride()):
            if size > 1 and stride == 1:
                width = size * t.element_size()
            elif size > 1:
                pitch = _gcd(pitch, stride * t.element_size())
        widths.append(width)
    if pitch == 0 or sum(widths) > pitch:
        return False
    gap = (right_start - left_start) % pitch
    return widths[0] <= gap and gap + widths[1] <= pitch


def _gcd(x, y):
    while y:
        x, y = y, x % y
    return x


def _shape(tensor):
    return [int(n) for n in tensor.shape]
