"""The functions that both GEMM packages offer, on one package's planner: checks, then eager or operator."""

import torch

from cake_shared.dispatch import as_operator, is_plain, refuse_forward_ad
from cake_shared.gemm import autograd, contract
from cake_shared.gemm.check import check_backend
from cake_shared.gemm.launch import Launcher
from cake_shared.gemm.ops import register_ops

_BF16, _FP32 = torch.bfloat16, torch.float32


class GemmFamily:
    """One package's GEMMs. The package's `api.py` documents what each takes; arguments here are the same.

    Parameters
    ----------
    package : str
        Name of the package, and of its operators' namespace.
    plan_gemm, plan_router, cuda
        As in `Launcher`.
    """

    def __init__(self, package, plan_gemm, plan_router, cuda):
        self.package = package
        self.launcher = Launcher(plan_gemm, plan_router, cuda)
        self._library, self.ops = register_ops(package, self.launcher, self._run_gemm)

    def _as_operator(self, backend, **tensors):
        """Whether the call goes through the operator: where `as_operator` says so, and on meta tensors."""
        served = check_backend(self.package, backend, next(iter(tensors.values())))
        refuse_forward_ad(**tensors)
        return served == "meta" or as_operator(*tensors.values())

    def _check_strict_backend(self, backend, **tensors):
        """A plan runs on memory: ValueError for tensors without any."""
        first, tensor = next(iter(tensors.items()))
        served = check_backend(self.package, backend, tensor)
        if served == "meta" or not all(is_plain(t) for t in tensors.values()):
            raise ValueError(
                f"{first}: got a {type(tensor).__name__} on {tensor.device}, takes a plain tensor in memory (the "
                "functions without prepare_ serve meta tensors and subclasses)"
            )

    def _prepare_gemm(self, a, b, out, transposed_out, accumulate):
        view = contract.check_gemm(a, b, out, transposed_out, accumulate)
        prepared = self.launcher.gemm(("a", "b", "out"), a, b, view, accumulate)
        prepared.out = out
        return prepared

    def _run_gemm(self, a, b, out, transposed_out, accumulate):
        self._prepare_gemm(a, b, out, transposed_out, accumulate).launch()

    def gemm(self, a, b, out, transposed_out, accumulate, backend):
        """`out (+)= a @ b`; returns out."""
        contract.check_gemm(a, b, out, transposed_out, accumulate)
        contract.refuse_autograd("out", a, b, out)
        run = self.ops.gemm if self._as_operator(backend, a=a, b=b, out=out) else self._run_gemm
        run(a, b, out, transposed_out, accumulate)
        return out

    def forward(self, x, w, main_grad, backend):
        """`x @ w.T` with autograd."""
        contract.check_forward(x, w)
        if main_grad is not None:
            contract.check_main_grad(main_grad, w)
        if self._as_operator(backend, x=x, w=w):
            if main_grad is None:
                return self.ops.projection_forward(x, w)
            return self.ops.projection_forward_main_grad(x, w, main_grad)
        if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
            return autograd.Projection.apply(self.launcher, x, w, main_grad)
        return self.launcher.forward(x, w).launch()

    def dgrad(self, g, w, backend):
        """`g @ w`."""
        contract.check_dgrad(g, w)
        if self._as_operator(backend, g=g, w=w):
            return self.ops.projection_dgrad(g, w)
        return _undifferentiable("projection_dgrad", lambda: self.launcher.dgrad(g, w).launch(), g, w)

    def wgrad(self, g, x, out, out_dtype, accumulate, backend):
        """`g.T @ x`, into `out` where given."""
        contract.check_wgrad(g, x)
        dtype = contract.check_wgrad_out(g, x, out, out_dtype, accumulate)
        through_operator = self._as_operator(backend, g=g, x=x)
        if out is None:
            if through_operator:
                return self.ops.projection_wgrad(g, x, dtype)
            return _undifferentiable("projection_wgrad", lambda: self.launcher.wgrad(g, x, None, dtype).launch(), g, x)
        contract.refuse_autograd("out", g, x, out)
        if through_operator:
            self.ops.projection_wgrad_out(g, x, out, accumulate)
            return out
        return self.launcher.wgrad(g, x, out, None, accumulate).launch()

    def router_forward(self, x, w, backend):
        """`x @ w.T` to FP32 accuracy, with autograd."""
        contract.check_forward(x, w, contract.ROUTER_FORWARD)
        if self._as_operator(backend, x=x, w=w):
            return self.ops.router_forward(x, w)
        if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
            return autograd.Router.apply(self.launcher, x, w)
        return self.launcher.router_forward(x, w).launch()

    def router_dgrad(self, g, w, backend):
        """`g @ w` to FP32 accuracy."""
        contract.check_dgrad(g, w, contract.ROUTER_DGRAD)
        if self._as_operator(backend, g=g, w=w):
            return self.ops.router_dgrad(g, w)
        return _undifferentiable("router_dgrad", lambda: self.launcher.router_dgrad(g, w).launch(), g, w)

    def router_wgrad(self, g, x, backend):
        """`g.T @ x` to FP32 accuracy."""
        contract.check_wgrad(g, x, contract.ROUTER_WGRAD)
        if self._as_operator(backend, g=g, x=x):
            return self.ops.router_wgrad(g, x)
        return _undifferentiable("router_wgrad", lambda: self.launcher.router_wgrad(g, x).launch(), g, x)

    def prepare_gemm(self, a, b, out, transposed_out, accumulate, backend):
        """The plan object of `gemm`."""
        contract.check_gemm(a, b, out, transposed_out, accumulate)
        self._check_strict_backend(backend, a=a, b=b)
        return self._prepare_gemm(a, b, out, transposed_out, accumulate)

    def prepare_forward(self, x, w, out, backend):
        """The plan object of `forward`."""
        contract.check_forward(x, w)
        contract.check_out(out, (*x.shape[:-1], w.shape[0]), x.device, _BF16, _FP32)
        self._check_strict_backend(backend, x=x, w=w)
        return self.launcher.forward(x, w, out, repair=False)

    def prepare_dgrad(self, g, w, out, backend):
        """The plan object of `dgrad`."""
        contract.check_dgrad(g, w)
        contract.check_out(out, (*g.shape[:-1], w.shape[1]), g.device, _BF16, _FP32)
        self._check_strict_backend(backend, g=g, w=w)
        return self.launcher.dgrad(g, w, out, repair=False)

    def prepare_wgrad(self, g, x, out, out_dtype, accumulate, backend):
        """The plan object of `wgrad`."""
        contract.check_wgrad(g, x)
        dtype = contract.check_wgrad_out(g, x, out, out_dtype, accumulate)
        self._check_strict_backend(backend, g=g, x=x)
        return self.launcher.wgrad(g, x, out, dtype, accumulate, repair=False)

    def prepare_router_forward(self, x, w, out, backend):
        """The plan object of `router_forward`."""
        contract.check_forward(x, w, contract.ROUTER_FORWARD)
        contract.check_out(out, (*x.shape[:-1], w.shape[0]), x.device, _FP32)
        self._check_strict_backend(backend, x=x, w=w)
        return self.launcher.router_forward(x, w, out, repair=False)

    def prepare_router_dgrad(self, g, w, out, backend):
        """The plan object of `router_dgrad`."""
        contract.check_dgrad(g, w, contract.ROUTER_DGRAD)
        contract.check_out(out, (*g.shape[:-1], w.shape[1]), g.device, _FP32)
        self._check_strict_backend(backend, g=g, w=w)
        return self.launcher.router_dgrad(g, w, out, repair=False)

    def prepare_router_wgrad(self, g, x, out, backend):
        """The plan object of `router_wgrad`."""
        contract.check_wgrad(g, x, contract.ROUTER_WGRAD)
        contract.check_out(out, (g.shape[-1], x.shape[-1]), g.device, _FP32)
        self._check_strict_backend(backend, g=g, x=x)
        return self.launcher.router_wgrad(g, x, out, repair=False)


def _undifferentiable(name, run, *operands):
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return autograd.Undifferentiable.apply(name, run, *operands)
    return run()
