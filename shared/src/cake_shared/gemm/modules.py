"""The modules of both GEMM packages; a package fills in which functions they call."""

import math

import torch
from torch import nn

from cake_shared.gemm.check import WIDTH_MULTIPLE, dtype_name


class DenseProjectionBase(nn.Module):
    """`y = x @ weight.T + bias` in BF16; see the package's `DenseProjection`."""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, accumulate_main_grad=False):
        super().__init__()
        _check_width("in_features", in_features)
        _check_width("out_features", out_features)
        if dtype not in (None, torch.bfloat16):
            raise TypeError(f"dtype: got {_name(dtype)}, takes None or torch.bfloat16")
        if not isinstance(accumulate_main_grad, bool):
            raise TypeError(f"accumulate_main_grad: got {accumulate_main_grad!r}, takes True or False")
        self.in_features, self.out_features = in_features, out_features
        self.accumulate_main_grad = accumulate_main_grad
        options = {"device": device, "dtype": torch.bfloat16}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw weight and bias as `nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            nn.init.uniform_(self.bias, -bound, bound)

    def allocate_main_grad(self):
        """Give the weight an FP32 `main_grad` of zeros, in place of any it has; returns it."""
        self.weight.main_grad = torch.zeros_like(
            self.weight, dtype=torch.float32, memory_format=torch.contiguous_format, requires_grad=False
        )
        return self.weight.main_grad

    def zero_main_grad(self):
        """Fill the weight's `main_grad` with zeros, if it has one."""
        grad = getattr(self.weight, "main_grad", None)
        if grad is not None:
            grad.zero_()

    def forward(self, x):
        """x `[..., in_features]` BF16 -> `[..., out_features]` BF16."""
        y = self._project(x, self.weight, self._main_grad_of_weight())
        return y if self.bias is None else y + self.bias

    def _main_grad_of_weight(self):
        weight = self.weight
        if not (self.accumulate_main_grad and torch.is_grad_enabled() and weight.requires_grad):
            return None
        if not torch.compiler.is_compiling() and not weight.is_leaf:
            raise RuntimeError(
                "weight: got a tensor computed from others (a parametrization, a view of a flat parameter), takes a "
                "parameter of its own under accumulate_main_grad=True: the gradient would never reach the others"
            )
        grad = getattr(weight, "main_grad", None)
        if grad is None and torch.compiler.is_compiling():
            raise RuntimeError("weight.main_grad: got None under torch.compile; call allocate_main_grad() beforehand")
        return self.allocate_main_grad() if grad is None else grad

    def _project(self, x, weight, main_grad):
        raise NotImplementedError

    def extra_repr(self):
        """As `nn.Linear` prints, with `accumulate_main_grad` where it is on."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + (", accumulate_main_grad=True" if self.accumulate_main_grad else "")


class RouterGateBase(nn.Module):
    """`logits = x @ weight.T` to FP32 accuracy; see the package's `RouterGate`."""

    def __init__(self, in_features, num_experts, device=None, dtype=None):
        super().__init__()
        _check_width("in_features", in_features)
        _check_width("num_experts", num_experts)
        if dtype not in (None, torch.float32):
            raise TypeError(f"dtype: got {_name(dtype)}, takes None or torch.float32")
        self.in_features, self.num_experts = in_features, num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the weight as `nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x):
        """x `[..., in_features]` FP32 or BF16 -> logits `[..., num_experts]` FP32."""
        return self._route(x, self.weight)

    def _route(self, x, weight):
        raise NotImplementedError

    def extra_repr(self):
        """In and out widths."""
        return f"in_features={self.in_features}, num_experts={self.num_experts}"


def _check_width(name, value):
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, takes an int")
    if value < 0 or value % WIDTH_MULTIPLE:
        raise ValueError(f"{name}: got {value}, takes a multiple of {WIDTH_MULTIPLE}")


def _name(dtype):
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
