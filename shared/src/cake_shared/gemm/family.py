"""The functions that both GEMM packages offer, on one package's planner: checks, then eager or operator."""

import functools

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
        """A plan runs on memory: ValueError for tensors without any; None is no tensor."""
        served = check_backend(self.package, backend, next(iter(tensors.values())))
        for name, tensor in tensors.items():
            if tensor is not None and (served == "meta" or not is_plain(tensor)):
                raise ValueError(
                    f"{name}: got a {type(tensor).__name__} on {tensor.device}, takes a plain tensor in memory (the "
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
        if type(transposed_out) is bool and type(accumulate) is bool:
            kind = "gemm, transposed out" if transposed_out else "gemm"
            recipe = self._recipe(backend, kind, a, b, out, None, accumulate)
            if recipe is not None:
                contract.refuse_autograd("out", a, b, out)
                return recipe(a, b, out)
        contract.check_gemm(a, b, out, transposed_out, accumulate)
        contract.refuse_autograd("out", a, b, out)
        if self._as_operator(backend, a=a, b=b, out=out):
            self.ops.gemm(a, b, out, transposed_out, accumulate)
        else:
            prepared = self._prepare_gemm(a, b, out, transposed_out, accumulate)
            prepared.launch()
            self.launcher.learn(prepared, kind, a, b, out, None, accumulate)
        return out

    def _recipe(self, backend, *call):
        """What an earlier call of this signature found out, where that is all there is to ask; else None."""
        return self.launcher.recipes.find(*call) if backend in (None, "cuda") else None

    def forward(self, x, w, main_grad, backend):
        """`x @ w.T` with autograd."""
        recipe = self._recipe(backend, "forward", x, w) if main_grad is None else None
        if recipe is not None:
            if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
                return autograd.Projection.apply(self.launcher, x, w, None)
            return recipe(x, w)
        contract.check_forward(x, w)
        if main_grad is not None:
            contract.check_main_grad(main_grad, w)
        if self._as_operator(backend, x=x, w=w):
            if main_grad is None:
                return self.ops.projection_forward(x, w)
            return self.ops.projection_forward_main_grad(x, w, main_grad)
        if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
            return autograd.Projection.apply(self.launcher, x, w, main_grad)
        return self.launcher.run("forward", x, w)

    def dgrad(self, g, w, backend):
        """`g @ w`."""
        recipe = self._recipe(backend, "dgrad", g, w)
        if recipe is not None:
            return autograd.undifferentiable("projection_dgrad", recipe, g, w)
        contract.check_dgrad(g, w)
        if self._as_operator(backend, g=g, w=w):
            return self.ops.projection_dgrad(g, w)
        return autograd.undifferentiable("projection_dgrad", functools.partial(self.launcher.run, "dgrad"), g, w)

    def wgrad(self, g, x, out, out_dtype, accumulate, backend):
        """`g.T @ x`, into `out` where given."""
        if type(accumulate) is bool and (out_dtype is None or isinstance(out_dtype, torch.dtype)):
            recipe = self._recipe(backend, "wgrad", g, x, out, out_dtype, accumulate)
            if recipe is not None and out is None:
                return autograd.undifferentiable("projection_wgrad", recipe, g, x)
            if recipe is not None:
                contract.refuse_autograd("out", g, x, out)
                return recipe(g, x, out)
        contract.check_wgrad(g, x)
        dtype = contract.check_wgrad_out(g, x, out, out_dtype, accumulate)
        through_operator = self._as_operator(backend, g=g, x=x, out=out)
        if out is None:
            if through_operator:
                return self.ops.projection_wgrad(g, x, dtype)
            run = functools.partial(self.launcher.run, "wgrad", out=None, dtype=out_dtype)
            return autograd.undifferentiable("projection_wgrad", run, g, x)
        contract.refuse_autograd("out", g, x, out)
        if through_operator:
            self.ops.projection_wgrad_out(g, x, out, accumulate)
            return out
        return self.launcher.run("wgrad", g, x, out, out_dtype, accumulate)

    def backward(self, g, x, w, dw, out_dtype, accumulate, backend):
        """`g @ w` and `g.T @ x`, the latter into `dw` where given."""
        known_type = out_dtype is None or isinstance(out_dtype, torch.dtype)
        if type(accumulate) is bool and known_type and backend in (None, "cuda"):
            recipe = self.launcher.recipes.find_backward(g, x, w, dw, out_dtype, accumulate)
            if recipe is not None and dw is None:
                return autograd.undifferentiable("projection_backward", recipe, g, x, w)
            if recipe is not None:
                contract.refuse_autograd("dw", g, x, w, dw)
                return recipe(g, x, w, dw)
        contract.check_backward(g, x, w)
        dtype = contract.check_wgrad_out(g, x, dw, out_dtype, accumulate, "dw")
        through_operator = self._as_operator(backend, g=g, x=x, w=w, dw=dw)
        if dw is None:
            if through_operator:
                return self.ops.projection_backward(g, x, w, dtype)
            run = functools.partial(self.launcher.run_backward, dtype=out_dtype)
            return autograd.undifferentiable("projection_backward", run, g, x, w)
        contract.refuse_autograd("dw", g, x, w, dw)
        if through_operator:
            return self.ops.projection_backward_out(g, x, w, dw, accumulate), dw
        return self.launcher.run_backward(g, x, w, dw, out_dtype, accumulate)

    def router_forward(self, x, w, backend):
        """`x @ w.T` to FP32 accuracy, with autograd."""
        recipe = self._recipe(backend, "router_forward", x, w)
        if recipe is not None:
            if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
                return autograd.Router.apply(self.launcher, x, w)
            return recipe(x, w)
        contract.check_forward(x, w, contract.ROUTER_FORWARD)
        if self._as_operator(backend, x=x, w=w):
            return self.ops.router_forward(x, w)
        if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
            return autograd.Router.apply(self.launcher, x, w)
        return self.launcher.run("router_forward", x, w)

    def router_dgrad(self, g, w, backend):
        """`g @ w` to FP32 accuracy."""
        recipe = self._recipe(backend, "router_dgrad", g, w)
        if recipe is not None:
            return autograd.undifferentiable("router_dgrad", recipe, g, w)
        contract.check_dgrad(g, w, contract.ROUTER_DGRAD)
        if self._as_operator(backend, g=g, w=w):
            return self.ops.router_dgrad(g, w)
        return autograd.undifferentiable("router_dgrad", functools.partial(self.launcher.run, "router_dgrad"), g, w)

    def router_wgrad(self, g, x, backend):
        """`g.T @ x` to FP32 accuracy."""
        recipe = self._recipe(backend, "router_wgrad", g, x)
        if recipe is not None:
            return autograd.undifferentiable("router_wgrad", recipe, g, x)
        contract.check_wgrad(g, x, contract.ROUTER_WGRAD)
        if self._as_operator(backend, g=g, x=x):
            return self.ops.router_wgrad(g, x)
        return autograd.undifferentiable("router_wgrad", functools.partial(self.launcher.run, "router_wgrad"), g, x)

    def prepare_gemm(self, a, b, out, transposed_out, accumulate, backend):
        """The plan object of `gemm`."""
        contract.check_gemm(a, b, out, transposed_out, accumulate)
        self._check_strict_backend(backend, a=a, b=b, out=out)
        return self._prepare_gemm(a, b, out, transposed_out, accumulate)

    def prepare_forward(self, x, w, out, backend):
        """The plan object of `forward`."""
        contract.check_forward(x, w)
        contract.check_out(out, (*x.shape[:-1], w.shape[0]), x.device, _BF16, _FP32)
        self._check_strict_backend(backend, x=x, w=w, out=out)
        return self.launcher.forward(x, w, out, repair=False)

    def prepare_dgrad(self, g, w, out, backend):
        """The plan object of `dgrad`."""
        contract.check_dgrad(g, w)
        contract.check_out(out, (*g.shape[:-1], w.shape[1]), g.device, _BF16, _FP32)
        self._check_strict_backend(backend, g=g, w=w, out=out)
        return self.launcher.dgrad(g, w, out, repair=False)

    def prepare_wgrad(self, g, x, out, out_dtype, accumulate, backend):
        """The plan object of `wgrad`."""
        contract.check_wgrad(g, x)
        dtype = contract.check_wgrad_out(g, x, out, out_dtype, accumulate)
        self._check_strict_backend(backend, g=g, x=x, out=out)
        return self.launcher.wgrad(g, x, out, dtype, accumulate, repair=False)

    def prepare_backward(self, g, x, w, dx, dw, out_dtype, accumulate, backend):
        """The plan object of `backward`."""
        contract.check_backward(g, x, w)
        contract.check_out(dx, (*g.shape[:-1], w.shape[1]), g.device, _BF16, _FP32, name="dx")
        dtype = contract.check_wgrad_out(g, x, dw, out_dtype, accumulate, "dw")
        self._check_strict_backend(backend, g=g, x=x, w=w, dx=dx, dw=dw)
        return self.launcher.backward(g, x, w, dx, dw, dtype, accumulate, repair=False)

    def prepare_router_forward(self, x, w, out, backend):
        """The plan object of `router_forward`."""
        contract.check_forward(x, w, contract.ROUTER_FORWARD)
        contract.check_out(out, (*x.shape[:-1], w.shape[0]), x.device, _FP32)
        self._check_strict_backend(backend, x=x, w=w, out=out)
        return self.launcher.router_forward(x, w, out, repair=False)

    def prepare_router_dgrad(self, g, w, out, backend):
        """The plan object of `router_dgrad`."""
        contract.check_dgrad(g, w, contract.ROUTER_DGRAD)
        contract.check_out(out, (*g.shape[:-1], w.shape[1]), g.device, _FP32)
        self._check_strict_backend(backend, g=g, w=w, out=out)
        return self.launcher.router_dgrad(g, w, out, repair=False)

    def prepare_router_wgrad(self, g, x, out, backend):
        """The plan object of `router_wgrad`."""
        contract.check_wgrad(g, x, contract.ROUTER_WGRAD)
        contract.check_out(out, (g.shape[-1], x.shape[-1]), g.device, _FP32)
        self._check_strict_backend(backend, g=g, x=x, out=out)
        return self.launcher.router_wgrad(g, x, out, repair=False)
