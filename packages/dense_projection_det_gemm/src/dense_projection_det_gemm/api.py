"""The public functions of the deterministic projection and router GEMMs.

Common rules. BF16 means `torch.bfloat16`, FP32 `torch.float32`; mixed or other dtypes are refused by name, under
autocast too. Widths of results are multiples of 8. Operands of `dense_projection_det_gemm` and `prepare_*` must have
unit stride on one axis, other strides that are multiples of 8 elements and a start on 16 bytes; the other functions
copy an operand that breaks this rule (a misaligned slice, an expanded gradient) and read any other where it lies.
`backend` is None (by the tensors' device), "cpu" or "cuda"; nothing falls back. Errors: `TypeError` and `ValueError`
name the argument, what it got and what it takes; `UnsupportedArchError` names what the device lacks.
"""

from cake_shared.gemm.family import GemmFamily
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.plan import plan_gemm, plan_router

FAMILY = GemmFamily("dense_projection_det_gemm", plan_gemm, plan_router, cuda)


def dense_projection_det_gemm(a, b, out, transposed_out=False, *, accumulate=False, backend=None):
    """`out[l] = a[l] @ b[l]`, or `out[l] += a[l] @ b[l]`, on strided and batched views.

    Parameters
    ----------
    a : torch.Tensor
        `[L, M, K]` or `[M, K]` BF16, unit stride on m or k. A head view `[T, H, D]` seen as `[H, T, D]` is fine.
    b : torch.Tensor
        `[L, K, N]` or `[K, N]` BF16, unit stride on k or n; N a multiple of 8. A batch stride may be 0.
    out : torch.Tensor
        `[L, M, N]` or `[M, N]` BF16 or FP32, unit stride on n. Shares no memory with a or b.
    transposed_out : bool
        `out` has unit stride on m: given as that `[L, M, N]` view or as its `[L, N, M]` buffer.
    accumulate : bool
        Add to what `out` (FP32) holds.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `out`, every element written. Products are accumulated in FP32 and rounded once. `K == 0` gives zeros, or
        leaves an accumulating output as it is. Not recorded by autograd: raises if an argument requires grad.
    """
    return FAMILY.gemm(a, b, out, transposed_out, accumulate, backend)


def projection_forward(x, w, *, main_grad=None, backend=None):
    """`y = x @ w.T`, with gradients for x and w.

    Parameters
    ----------
    x : torch.Tensor
        `[..., K]` BF16.
    w : torch.Tensor
        `[N, K]` BF16, N a multiple of 8 (and K too, where a gradient is wanted).
    main_grad : torch.Tensor, optional
        `[N, K]` FP32. The backward adds the weight's gradient into it, in FP32, and w itself gets None.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[..., N]` BF16, contiguous. A row's bits do not depend on the other rows; neither do those of x's gradient.
        A double backward raises.
    """
    return FAMILY.forward(x, w, main_grad, backend)


def projection_dgrad(g, w, *, backend=None):
    """`g @ w`, the gradient of `projection_forward` with respect to x.

    Parameters
    ----------
    g : torch.Tensor
        `[..., N]` BF16.
    w : torch.Tensor
        `[N, K]` BF16, K a multiple of 8.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[..., K]` BF16, contiguous. Differentiating it raises.
    """
    return FAMILY.dgrad(g, w, backend)


def projection_wgrad(g, x, out=None, out_dtype=None, accumulate=False, *, backend=None):
    """`g.T @ x` summed over all rows, the gradient of `projection_forward` with respect to w.

    Parameters
    ----------
    g : torch.Tensor
        `[..., N]` BF16.
    x : torch.Tensor
        `[..., K]` BF16 with the leading extents of g; K a multiple of 8.
    out : torch.Tensor, optional
        `[N, K]` BF16 or FP32 to write into.
    out_dtype : torch.dtype, optional
        BF16 or FP32; defaults to that of `out`, else BF16.
    accumulate : bool
        Add to what `out` (FP32) holds instead of overwriting it.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[N, K]`, `out` where given. How the rows are cut into partial sums depends on the shape alone. Differentiating
        it raises; with `out`, arguments that require grad are refused.
    """
    return FAMILY.wgrad(g, x, out, out_dtype, accumulate, backend)


def projection_backward(g, x, w, dw=None, out_dtype=None, accumulate=False, *, backend=None):
    """Both gradients of `projection_forward`: `g @ w` and `g.T @ x`, which run side by side on sm_90a.

    The same bits as `projection_dgrad` and `projection_wgrad`.

    Parameters
    ----------
    g : torch.Tensor
        `[..., N]` BF16.
    x : torch.Tensor
        `[..., K]` BF16 with the leading extents of g; K a multiple of 8.
    w : torch.Tensor
        `[N, K]` BF16.
    dw : torch.Tensor, optional
        `[N, K]` BF16 or FP32 to write the weight's gradient into. Shares no memory with g, x or w.
    out_dtype : torch.dtype, optional
        Of the weight's gradient, BF16 or FP32; defaults to that of `dw`, else BF16.
    accumulate : bool
        Add the weight's gradient to what `dw` (FP32) holds instead of overwriting it.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    tuple of torch.Tensor
        `[..., K]` BF16, contiguous, and `[N, K]`, `dw` where given. Differentiating them raises; with `dw`, arguments
        that require grad are refused.
    """
    return FAMILY.backward(g, x, w, dw, out_dtype, accumulate, backend)


def router_forward(x, w, *, backend=None):
    """`logits = x @ w.T` to FP32 accuracy, with gradients for x and w.

    Operands are split into BF16 terms, `x = x1 + x2 + x3`, and six products of terms are added in a fixed order (three
    for BF16 x). Rows are first scaled by exact powers of two, so that values near the largest FP32 number and
    subnormal ones keep their digits; what no scale saves (inf, NaN, values too far apart) is computed in float64
    without splitting, chosen by its own row and column alone. The error is no larger than that of a plain FP32 product.

    Parameters
    ----------
    x : torch.Tensor
        `[..., K]` FP32 or BF16.
    w : torch.Tensor
        `[N, K]` FP32, N a multiple of 8 (and K too, where a gradient is wanted).
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[..., N]` FP32, contiguous. The gradient of x has the dtype of x. A double backward raises.
    """
    return FAMILY.router_forward(x, w, backend)


def router_dgrad(g, w, *, backend=None):
    """`g @ w` to FP32 accuracy, the gradient of `router_forward` with respect to x.

    Parameters
    ----------
    g : torch.Tensor
        `[..., N]` FP32.
    w : torch.Tensor
        `[N, K]` FP32, K a multiple of 8.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[..., K]` FP32, contiguous. Differentiating it raises.
    """
    return FAMILY.router_dgrad(g, w, backend)


def router_wgrad(g, x, *, backend=None):
    """`g.T @ x` to FP32 accuracy, the gradient of `router_forward` with respect to w.

    Parameters
    ----------
    g : torch.Tensor
        `[..., N]` FP32.
    x : torch.Tensor
        `[..., K]` FP32 or BF16 with the leading extents of g; K a multiple of 8.
    backend : str, optional
        None, "cpu" or "cuda".

    Returns
    -------
    torch.Tensor
        `[N, K]` FP32. Differentiating it raises.
    """
    return FAMILY.router_wgrad(g, x, backend)


def prepare_gemm(a, b, out, transposed_out=False, *, accumulate=False, backend=None):
    """Plan `dense_projection_det_gemm` once, to launch it many times.

    Arguments as there; operands that require grad are read, not recorded.

    Returns
    -------
    cake_shared.gemm.launch.Prepared
        `.launch()` runs on what the operands hold then, allocates nothing and returns `out`; `.plan` prints every
        choice.
    """
    return FAMILY.prepare_gemm(a, b, out, transposed_out, accumulate, backend)


def prepare_forward(x, w, out=None, *, backend=None):
    """Plan `projection_forward` once, without autograd; `out` `[..., N]` BF16 or FP32, allocated as BF16 if None.

    x and w keep the layout rule of `dense_projection_det_gemm`, and x's leading axes collapse into one without a copy.
    Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_forward(x, w, out, backend)


def prepare_dgrad(g, w, out=None, *, backend=None):
    """Plan `projection_dgrad` once; `out` `[..., K]` BF16 or FP32, allocated as BF16 if None.

    Operands as in `prepare_forward`. Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_dgrad(g, w, out, backend)


def prepare_wgrad(g, x, out=None, out_dtype=None, accumulate=False, *, backend=None):
    """Plan `projection_wgrad` once; every `launch()` adds to `out` under `accumulate`, and overwrites it otherwise.

    Arguments as there, operands as in `prepare_forward`. Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_wgrad(g, x, out, out_dtype, accumulate, backend)


def prepare_backward(g, x, w, dx=None, dw=None, out_dtype=None, accumulate=False, *, backend=None):
    """Plan `projection_backward` once; `dx` `[..., K]` BF16 or FP32, allocated as BF16 if None.

    Other arguments as there, operands as in `prepare_forward`; dx and dw share no memory with an operand or with each
    other. Every `launch()` adds to `dw` under `accumulate`, and returns `(dx, dw)`, which is also `.out`.
    """
    return FAMILY.prepare_backward(g, x, w, dx, dw, out_dtype, accumulate, backend)


def prepare_router_forward(x, w, out=None, *, backend=None):
    """Plan `router_forward` once, without autograd; `out` `[..., N]` FP32, allocated if None.

    Operands as in `prepare_forward`. Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_router_forward(x, w, out, backend)


def prepare_router_dgrad(g, w, out=None, *, backend=None):
    """Plan `router_dgrad` once; `out` `[..., K]` FP32, allocated if None.

    Operands as in `prepare_forward`. Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_router_dgrad(g, w, out, backend)


def prepare_router_wgrad(g, x, out=None, *, backend=None):
    """Plan `router_wgrad` once; `out` `[N, K]` FP32, allocated if None.

    Operands as in `prepare_forward`. Returns what `prepare_gemm` returns.
    """
    return FAMILY.prepare_router_wgrad(g, x, out, backend)
