"""From checked tensors to a running program: builds the problem, asks the planner, allocates, runs.

A `Launcher` belongs to one package: it holds that package's planner and its CUDA module. Its methods take real tensors
whose shapes and dtypes are checked, never record autograd, and read operands where they lie or, under `repair=True`,
from a legal copy.
"""

import torch

from cake_shared.gemm import cpu, layout, router_cpu
from cake_shared.gemm.check import check_no_overlap, dtype_name
from cake_shared.gemm.problem import BackwardPlan, GemmProblem, RouterProblem
from cake_shared.gemm.recipes import Recipes, backward_signature, signature


class Prepared:
    """A GEMM whose plan is made and whose workspace is allocated: `launch()` runs it on what the operands hold then.

    Attributes
    ----------
    plan : object
        The package's `GemmPlan` or `RouterPlan`, or one of both gradients; prints every choice.
    out : torch.Tensor or tuple of torch.Tensor
        What `launch()` writes and returns.
    """

    def __init__(self, plan, out, run, views=None, stage=None, problem=None):
        self.plan = plan
        self.out = out
        self._run = run
        self.views, self.stage, self.problem = views, stage, problem  # of what a GPU runs: for Recipes

    def launch(self):
        """Run once; allocates nothing, records no autograd, returns `out`.

        Operands and output are those given to `prepare_*`: change what they hold between launches, not the tensors.
        One `Prepared` has one workspace, so its launches must not overlap in time.
        """
        self._run()
        return self.out

    def __reduce__(self):
        """Refuse copies and pickles: they would launch into the memory of the original and return another `out`."""
        raise TypeError("Prepared: got asked for a copy or a pickle, takes neither; prepare another one")

    def __repr__(self):
        return f"Prepared({self.plan!r})"


class Launcher:
    """Runs one package's plans.

    Parameters
    ----------
    plan_gemm, plan_router : callable
        `GemmProblem -> plan`, `RouterProblem -> plan` of the CPU backend.
    cuda : module
        The package's `cuda.py`, with `prepare(stage, problem, a, b, out) -> (plan, callable)`, and for the calls after
        the first `launcher(stage, problem, out)`, which returns what launches `(a, b, out)`. For both gradients
        `prepare_backward(dgrad, wgrad)` of a `(problem, a, b, out)` each, and `backward_launcher(problem, problem,
        out)`, which returns what launches `(a, b, out, a, b, out)`.
    """

    def __init__(self, plan_gemm, plan_router, cuda):
        self._plan_gemm = plan_gemm
        self._plan_router = plan_router
        self._cuda = cuda
        self.recipes = Recipes()

    def run(self, kind, left, right, out=None, dtype=None, accumulate=False):
        """Run the function of that name, operands copied where their layout needs it; returns the output.

        Not for tensors that autograd or a dispatch mode watches. The first call of a signature on a GPU goes through a
        `Prepared`, the next ones through what it found out.
        """
        recipe = self.recipes.find(kind, left, right, out, dtype, accumulate)
        if recipe is not None:
            return recipe(left, right, out)
        if kind == "wgrad":
            prepared = self.wgrad(left, right, out, dtype or torch.bfloat16, accumulate)
        else:
            prepared = getattr(self, kind)(left, right)
        result = prepared.launch()
        self.learn(prepared, kind, left, right, out, dtype, accumulate)
        return result

    def learn(self, prepared, kind, left, right, out=None, dtype=None, accumulate=False):
        """Keep for calls of this signature what `prepared` found out, where a GPU runs it."""
        if prepared.views is None:
            return
        key = signature(kind, left, right, out, dtype, accumulate)
        launch = self._cuda.launcher(prepared.stage, prepared.problem, prepared.views[2])
        self.recipes.learn(key, left, right, prepared.out, prepared.views, launch)

    def run_backward(self, g, x, w, dw=None, dtype=None, accumulate=False):
        """Run both gradients, as `run` does one; returns `(dx, dw)`."""
        recipe = self.recipes.find_backward(g, x, w, dw, dtype, accumulate)
        if recipe is not None:
            return recipe(g, x, w, dw)
        prepared = self.backward(g, x, w, None, dw, dtype or torch.bfloat16, accumulate)
        result = prepared.launch()
        if prepared.views is not None:
            key = backward_signature(g, x, w, dw, dtype, accumulate)
            launch = self._cuda.backward_launcher(*prepared.problem, result[0])
            self.recipes.learn_backward(key, (g, x, w), result, prepared.views, launch)
        return result

    def gemm(self, names, a, b, out, accumulate=False):
        """Prepare `out (+)= a @ b` on `[L, M, K]`, `[L, K, N]`, `[L, M, N]` views (or without L) that keep the rule.

        `names` are the three arguments' names for messages.
        """
        problem, *views = _gemm_problem(names, a, b, out, accumulate)
        if problem.target == "cuda":
            plan, run = self._cuda.prepare("gemm_out", problem, *views)
            return Prepared(plan, out, run, tuple(views), "gemm_out", problem)
        plan, run = self._on_cpu(problem, *views)
        return Prepared(plan, out, run)

    def _on_cpu(self, problem, a, b, out):
        plan = self._plan_gemm(problem)
        buffers = cpu.allocate(plan)
        return plan, torch.no_grad()(lambda: cpu.run_gemm(plan, a, b, out, buffers))

    def router(self, names, a, b, out):
        """Prepare `out = a @ b` on `[M, K]`, `[K, N]` FP32 or BF16, `[M, N]` FP32, views that keep the layout rule."""
        a, b, target = a.detach(), b.detach(), out.detach()
        layout.require_major(names[2], target, "m", "n")
        problem = RouterProblem(
            m=target.shape[0],
            n=target.shape[1],
            k=a.shape[1],
            a_major=layout.require_major(names[0], a, "m", "k"),
            b_major=layout.require_major(names[1], b, "k", "n"),
            a_terms=_terms(a),
            b_terms=_terms(b),
            target=target.device.type,
        )
        check_no_overlap(names[2], target, **{names[0]: a, names[1]: b})
        if problem.target == "cuda":
            plan, run = self._cuda.prepare("router_out", problem, a, b, target)
            return Prepared(plan, out, run, (a, b, target), "router_out", problem)
        plan = self._plan_router(problem)
        buffers = cpu.allocate(plan)
        return Prepared(plan, out, torch.no_grad()(lambda: router_cpu.run_router(plan, a, b, target, buffers)))

    def forward(self, x, w, out=None, repair=True):
        """Prepare `x @ w.T`, x `[..., K]`, w `[N, K]`; `out` BF16 unless given."""
        x2, w2 = _operand("x", x, repair), _operand("w", w, repair)
        out, target = _output(out, (*x.shape[:-1], w.shape[0]), torch.bfloat16, x.device)
        return _returning(out, self.gemm(("x", "w", "out"), x2, w2.t(), target))

    def dgrad(self, g, w, out=None, repair=True):
        """Prepare `g @ w`, g `[..., N]`, w `[N, K]`; `out` BF16 unless given."""
        g2, w2 = _operand("g", g, repair), _operand("w", w, repair)
        out, target = _output(out, (*g.shape[:-1], w.shape[1]), torch.bfloat16, g.device)
        return _returning(out, self.gemm(("g", "w", "out"), g2, w2, target))

    def wgrad(self, g, x, out=None, dtype=torch.bfloat16, accumulate=False, repair=True):
        """Prepare `g.T @ x` summed over the leading axes, g `[..., N]`, x `[..., K]`."""
        g2, x2 = _operand("g", g, repair), _operand("x", x, repair)
        out, target = _output(out, (g.shape[-1], x.shape[-1]), dtype, g.device)
        return _returning(out, self.gemm(("g", "x", "out"), g2.t(), x2, target, accumulate))

    def backward(self, g, x, w, dx=None, dw=None, dtype=torch.bfloat16, accumulate=False, repair=True):
        """Prepare `dgrad` and `wgrad` of one g as one launch; its `out` is `(dx, dw)`."""
        g2, x2, w2 = _operand("g", g, repair), _operand("x", x, repair), _operand("w", w, repair)
        dx, dx2 = _output(dx, (*g.shape[:-1], w.shape[1]), torch.bfloat16, g.device, "dx")
        dw, dw2 = _output(dw, (g.shape[-1], x.shape[-1]), dtype, g.device, "dw")
        dgrad = _gemm_problem(("g", "w", "dx"), g2, w2, dx2)
        wgrad = _gemm_problem(("g", "x", "dw"), g2.t(), x2, dw2, accumulate)
        check_no_overlap("dx", dx2, x=x2)
        check_no_overlap("dw", dw2, w=w2, dx=dx2)
        if dgrad[0].target == "cuda":
            plan, run = self._cuda.prepare_backward(dgrad, wgrad)
            problems = dgrad[0], wgrad[0]
            return Prepared(plan, (dx, dw), run, (dgrad[1:], wgrad[1:]), "backward", problems)
        (dgrad_plan, run_dgrad), (wgrad_plan, run_wgrad) = self._on_cpu(*dgrad), self._on_cpu(*wgrad)

        def run():
            run_dgrad()
            run_wgrad()

        return Prepared(BackwardPlan(dgrad_plan, wgrad_plan), (dx, dw), run)

    def router_forward(self, x, w, out=None, repair=True):
        """Prepare `x @ w.T` to FP32 accuracy; x `[..., K]` FP32 or BF16, w `[N, K]` FP32."""
        x2, w2 = _operand("x", x, repair), _operand("w", w, repair)
        out, target = _output(out, (*x.shape[:-1], w.shape[0]), torch.float32, x.device)
        return _returning(out, self.router(("x", "w", "out"), x2, w2.t(), target))

    def router_dgrad(self, g, w, out=None, repair=True):
        """Prepare `g @ w` to FP32 accuracy; g `[..., N]`, w `[N, K]` FP32."""
        g2, w2 = _operand("g", g, repair), _operand("w", w, repair)
        out, target = _output(out, (*g.shape[:-1], w.shape[1]), torch.float32, g.device)
        return _returning(out, self.router(("g", "w", "out"), g2, w2, target))

    def router_wgrad(self, g, x, out=None, repair=True):
        """Prepare `g.T @ x` to FP32 accuracy; g `[..., N]` FP32, x `[..., K]` FP32 or BF16."""
        g2, x2 = _operand("g", g, repair), _operand("x", x, repair)
        out, target = _output(out, (g.shape[-1], x.shape[-1]), torch.float32, g.device)
        return _returning(out, self.router(("g", "x", "out"), g2.t(), x2, target))


def _gemm_problem(names, a, b, out, accumulate=False):
    """The problem of `Launcher.gemm`, then a, b and out as batches of matrices."""
    a, b, target = a.detach(), b.detach(), out.detach()
    a_major = layout.require_major(names[0], a, "m", "k")
    b_major = layout.require_major(names[1], b, "k", "n")
    out_major = layout.require_major(names[2], target, "m", "n")
    if a.dim() == 2:
        a, b, target = a[None], b[None], target[None]
    problem = GemmProblem(
        batch=target.shape[0],
        m=target.shape[1],
        n=target.shape[2],
        k=a.shape[2],
        a_major=a_major,
        b_major=b_major,
        out_dtype=dtype_name(target.dtype),
        out_major=out_major,
        accumulate=accumulate,
        target=target.device.type,
    )
    check_no_overlap(names[2], target, **{names[0]: a, names[1]: b})
    return problem, a, b, target


def _terms(operand):
    return 1 if operand.dtype == torch.bfloat16 else 3


def _operand(name, tensor, repair):
    tensor = tensor.detach()
    if repair:
        return layout.readable(layout.as_matrix(tensor))
    matrix = layout.view_matrix(name, tensor)
    layout.require_major(name, matrix, "its rows", "its columns")
    return matrix


def _output(out, shape, dtype, device, name="out"):
    """The output and its `[rows, cols]` view."""
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    return out, layout.view_matrix(name, out.detach())


def _returning(out, prepared):
    prepared.out = out
    return prepared
