"""What each GEMM function takes, as checks that raise before anything runs."""

import torch

from cake_shared.dispatch import is_plain
from cake_shared.gemm import check
from cake_shared.gemm.layout import is_aligned, major_axis

_BF16, _FP32 = torch.bfloat16, torch.float32


def check_gemm(a, b, out, transposed_out, accumulate):
    """Arguments of the plain GEMM; returns `out` as a `[..., M, N]` view with the asked-for unit stride."""
    check.check_tensor("a", a, _BF16)
    check.check_tensor("b", b, _BF16)
    check.check_tensor("out", out, _BF16, _FP32)
    check.check_flag("transposed_out", transposed_out)
    check.check_flag("accumulate", accumulate)
    check.check_same_device(a=a, b=b, out=out)
    check.check_rank("a", a, "[M, K] or [L, M, K]", 2, 3)
    check.check_rank("b", b, "as many dimensions as a", a.dim())
    check.check_rank("out", out, "as many dimensions as a", a.dim())
    if a.dim() == 3:
        check.check_extent("b", b, 0, a.shape[0], "the batch of a")
        check.check_extent("out", out, 0, a.shape[0], "the batch of a")
    check.check_extent("b", b, -2, a.shape[-1], "the contraction length K of a")
    check.check_width("b", b.shape[-1], "columns (N)")
    if accumulate:
        check_accumulating(out)
    return _oriented(out, (*a.shape[:-1], b.shape[-1]), transposed_out)


def _oriented(out, shape, transposed_out):
    turned = (*shape[:-2], shape[-1], shape[-2])
    m, n = shape[-2:]
    if not transposed_out:
        check.check_shape("out", out, shape, "M of a, N of b")
        if out.numel() and major_axis(out, "m", "n") != "n":
            raise ValueError(
                f"out: got strides {list(out.stride())} for shape {list(out.shape)}, takes unit stride on n and other "
                "strides that are multiples of 8 elements (unit stride on m needs transposed_out=True)"
            )
        return out
    if tuple(out.shape) not in (shape, turned):
        raise ValueError(
            f"out: got shape {list(out.shape)}, takes {list(shape)} with unit stride on m, or its buffer {list(turned)}"
        )
    is_buffer = out.stride(-1) == 1 if m == n else tuple(out.shape) == turned
    view = out.transpose(-1, -2) if is_buffer else out
    if out.numel() and major_axis(view.transpose(-1, -2), "n", "m") != "m":
        raise ValueError(
            f"out: got strides {list(out.stride())} for shape {list(out.shape)}, takes unit stride on m and other "
            "strides that are multiples of 8 elements under transposed_out=True"
        )
    return view


def check_accumulating(out, name="out"):
    """Only FP32 accumulates: a BF16 sum would lose what is added."""
    if out.dtype != _FP32:
        raise TypeError(f"{name}: got dtype {check.dtype_name(out.dtype)}, takes float32 under accumulate=True")


def _check_pair(left_name, left, left_dtypes, right_name, right, right_dtypes):
    check.check_tensor(left_name, left, *left_dtypes)
    check.check_tensor(right_name, right, *right_dtypes)
    check.check_same_device(**{left_name: left, right_name: right})
    if left.dim() == 0:
        raise ValueError(f"{left_name}: got a scalar, takes at least one dimension")


def check_forward(x, w, dtypes=((_BF16,), (_BF16,))):
    """x `[..., K]`, w `[N, K]`."""
    _check_pair("x", x, dtypes[0], "w", w, dtypes[1])
    check.check_rank("w", w, "[N, K]", 2)
    check.check_extent("x", x, -1, w.shape[1], "K of w")
    check.check_width("w", w.shape[0], "rows (N)")


def check_dgrad(g, w, dtypes=((_BF16,), (_BF16,))):
    """g `[..., N]`, w `[N, K]`."""
    _check_pair("g", g, dtypes[0], "w", w, dtypes[1])
    check.check_rank("w", w, "[N, K]", 2)
    check.check_extent("g", g, -1, w.shape[0], "N of w")
    check.check_width("w", w.shape[1], "columns (K)")


def check_wgrad(g, x, dtypes=((_BF16,), (_BF16,))):
    """g `[..., N]`, x `[..., K]` with the same leading extents."""
    _check_pair("g", g, dtypes[0], "x", x, dtypes[1])
    if x.dim() == 0:
        raise ValueError("x: got a scalar, takes at least one dimension")
    check.check_shape("x", x, (*g.shape[:-1], x.shape[-1]), "the leading dimensions of g, then K")
    check.check_width("x", x.shape[-1], "columns (K)")


def check_backward(g, x, w):
    """g `[..., N]`, x `[..., K]` with the same leading extents, w `[N, K]`."""
    check_dgrad(g, w)
    check_wgrad(g, x)
    check.check_extent("x", x, -1, w.shape[1], "K of w")


def check_out_dtype(out_dtype):
    """The dtype of a result where one may be asked for; returns it."""
    if out_dtype not in (None, _BF16, _FP32):
        got = check.dtype_name(out_dtype) if isinstance(out_dtype, torch.dtype) else repr(out_dtype)
        raise TypeError(f"out_dtype: got {got}, takes None, torch.bfloat16 or torch.float32")
    return out_dtype


def check_wgrad_out(g, x, out, out_dtype, accumulate, name="out"):
    """The output side of a weight gradient, an argument of that name; returns the dtype of the result."""
    check.check_flag("accumulate", accumulate)
    check_out_dtype(out_dtype)
    if out is None:
        if accumulate:
            raise ValueError(f"accumulate: got True without {name}, takes a float32 {name} to add to")
        return out_dtype or _BF16
    check.check_tensor(name, out, _BF16, _FP32)
    check.check_same_device(**{"g": g, name: out})
    check.check_shape(name, out, (g.shape[-1], x.shape[-1]), "[N, K] of g and x")
    if out_dtype not in (None, out.dtype):
        got, takes = check.dtype_name(out_dtype), check.dtype_name(out.dtype)
        raise TypeError(f"out_dtype: got {got}, takes None or the dtype of {name}, {takes}")
    if accumulate:
        check_accumulating(out, name)
    return out.dtype


def check_out(out, shape, device, *dtypes, name="out"):
    """The optional output of a `prepare_*` function, an argument of that name."""
    if out is None:
        return
    check.check_tensor(name, out, *dtypes)
    if out.device != device:
        raise ValueError(f"{name}: got device {out.device}, takes the device of the operands, {device}")
    check.check_shape(name, out, shape, "the shape of the result")


def check_main_grad(main_grad, w):
    """The FP32 tensor that a weight's gradient is added into."""
    check.check_tensor("main_grad", main_grad, _FP32)
    check.check_shape("main_grad", main_grad, w.shape, "the shape of w")
    check.check_same_device(w=w, main_grad=main_grad)
    if main_grad.numel() and major_axis(main_grad, "n", "k") is None:
        raise ValueError(
            f"main_grad: got strides {list(main_grad.stride())} for shape {list(main_grad.shape)}, takes unit stride "
            "on one axis and a multiple of 8 elements on the other"
        )
    if is_plain(main_grad) and not torch.compiler.is_compiling() and not is_aligned(main_grad):
        raise ValueError(
            f"main_grad: got a start at address {main_grad.data_ptr():#x}, takes a start aligned to "
            f"{check.ALIGNMENT_BYTES} bytes (in a flat buffer, an offset that is a multiple of 4 FP32 elements)"
        )
    if main_grad.requires_grad:
        raise ValueError("main_grad: got a tensor that requires grad, takes one that does not")


ROUTER_FORWARD = ((_FP32, _BF16), (_FP32,))  # x, w
ROUTER_DGRAD = ((_FP32,), (_FP32,))  # g, w
ROUTER_WGRAD = ((_FP32,), (_FP32, _BF16))  # g, x


def refuse_autograd(name, *tensors):
    """RuntimeError where autograd would have to record a write into a given tensor, as torch's own out= does."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name}: an argument requires grad, but a write into it is not recorded by autograd; call it under "
            "torch.no_grad() or detach the argument (projection_forward and DenseProjection record autograd)"
        )
