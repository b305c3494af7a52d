"""Modules on the deterministic GEMMs."""

from cake_shared.gemm.modules import DenseProjectionBase, RouterGateBase
from dense_projection_det_gemm.api import projection_forward, router_forward


class DenseProjection(DenseProjectionBase):
    """A drop-in for `torch.nn.Linear` in BF16: `y = x @ weight.T + bias`.

    Same parameters, names in the state dict and initialisation as `nn.Linear`. Differences: the dtype is BF16, both
    widths are multiples of 8, input of another dtype is refused (under autocast too), and a double backward raises.
    The product is rounded to BF16 once, then the bias is added in BF16.

    With `accumulate_main_grad=True` the backward adds the weight's gradient straight into `weight.main_grad`, an FP32
    tensor of the weight's shape: it is never rounded to BF16, and no BF16 gradient is allocated. Then:

    - `weight.grad` stays None, and `torch.autograd.grad` gives None for the weight; gradient hooks of the weight do
      not run, so wrappers that reduce gradients in such hooks must reduce `main_grad` instead;
    - the tensor already in `weight.main_grad` is used, else zeros are allocated at the first forward that records a
      gradient (`allocate_main_grad()` does it by hand, and must have been called under torch.compile);
    - it always adds: over micro-batches, several uses of the layer in one forward, several backwards of one graph.
      `zero_main_grad()` starts over. Recomputation under activation checkpointing adds nothing by itself;
    - it is no part of the state dict, does not follow `.to(device)`, and `copy.deepcopy` leaves it behind; the bias has
      an ordinary `.grad`.

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
        See above.
    """

    def _project(self, x, weight, main_grad):
        return projection_forward(x, weight, main_grad=main_grad)


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
    """

    def _route(self, x, weight):
        return router_forward(x, weight)
