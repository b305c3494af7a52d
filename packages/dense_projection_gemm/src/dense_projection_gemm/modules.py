"""Modules on these GEMMs."""

from cake_shared.gemm.check import check_flag
from cake_shared.gemm.modules import DenseProjectionBase, RouterGateBase
from dense_projection_gemm.api import projection_forward, router_forward


class DenseProjection(DenseProjectionBase):
    """A drop-in for `torch.nn.Linear` in BF16: `y = x @ weight.T + bias`.

    As `dense_projection_det_gemm.DenseProjection`, which describes `accumulate_main_grad`, plus the choice of form.

    Parameters
    ----------
    in_features, out_features : int
        Multiples of 8.
    bias : bool
        Whether there is a bias `[out_features]`.
    device : torch.device, optional
        Where parameters are made.
    dtype : torch.dtype, optional
        None or `torch.bfloat16`.
    accumulate_main_grad : bool
        Add the weight's gradient into the FP32 `weight.main_grad`; `weight.grad` then stays None.
    deterministic : bool
        As in `projection_forward`; kept as an attribute.
    """

    def __init__(
        self,
        in_features,
        out_features,
        bias=True,
        device=None,
        dtype=None,
        *,
        accumulate_main_grad=False,
        deterministic=True,
    ):
        check_flag("deterministic", deterministic)
        super().__init__(in_features, out_features, bias, device, dtype, accumulate_main_grad=accumulate_main_grad)
        self.deterministic = deterministic

    def _project(self, x, weight, main_grad):
        return projection_forward(x, weight, main_grad=main_grad, deterministic=self.deterministic)


class RouterGate(RouterGateBase):
    """The gate of a mixture of experts: `logits = x @ weight.T` to FP32 accuracy, by `router_forward`.

    x may be FP32 or BF16; weight `[num_experts, in_features]` and logits are FP32, and the weight's gradient too.

    Parameters
    ----------
    in_features, num_experts : int
        Multiples of 8.
    device : torch.device, optional
        Where the weight is made.
    dtype : torch.dtype, optional
        None or `torch.float32`.
    deterministic : bool
        As in `router_forward`; kept as an attribute.
    """

    def __init__(self, in_features, num_experts, device=None, dtype=None, *, deterministic=True):
        check_flag("deterministic", deterministic)
        super().__init__(in_features, num_experts, device, dtype)
        self.deterministic = deterministic

    def _route(self, x, weight):
        return router_forward(x, weight, deterministic=self.deterministic)
