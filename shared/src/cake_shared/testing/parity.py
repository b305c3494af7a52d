"""Compares each package that promises accuracy with its deterministic twin, and both with float64.

`python -m cake_shared.testing.parity [--device cuda] [PACKAGE ...]` prints one table for each pair of twins (all pairs,
or those of the packages named) and exits with 1 when a row fails. Where both run one program that is said, and then
their bits must be equal: such a comparison shows that the hand-over is right, and nothing about the program, which
float64 judges.
"""

import argparse
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from cake_shared.program import programs_of
from cake_shared.testing.bits import relative_l2, same_bits
from cake_shared.testing.gdn_cuda import moved, on_cpu
from cake_shared.testing.gdn_inputs import base, generator, packed, states
from cake_shared.testing.gdn_reference import reference
from cake_shared.testing.gdn_run import run

# The free twin may be this much less accurate than the deterministic one.
SLACK = 1.5


@dataclass(frozen=True)
class Row:
    """One result of one case: errors of both twins against float64, and what lies between them.

    `limit` is the relative L2 error that the result's dtype allows; `equal` whether the twins' bits agree.
    `same_program` says whether both ran one program here, where that is not the same for all rows of the pair.
    """

    case: str
    result: str
    deterministic_error: float
    free_error: float
    difference: float
    equal: bool
    limit: float
    same_program: bool | None = None

    def faults(self, same_program: bool) -> list[str]:
        """What is wrong with this row; nothing when it is right."""
        found = []
        if not self.deterministic_error <= self.limit:
            found.append("the deterministic twin is too far from float64")
        if not self.free_error <= max(self.limit, SLACK * self.deterministic_error):
            found.append("the free twin is too far from float64")
        if not self.difference <= SLACK * max(self.limit, self.deterministic_error):
            found.append("the twins are too far from each other")
        if (same_program if self.same_program is None else self.same_program) and not self.equal:
            found.append("one program, but not the same bits")
        return found


@dataclass(frozen=True)
class Pair:
    """Two packages with one contract for accuracy.

    `program_of(module, device)` names what runs there, `rows(deterministic, free, device)` compares the imported
    packages.
    """

    deterministic: str
    free: str
    program_of: Callable
    rows: Callable
    devices: tuple[str, ...] = ("cpu",)


def compare(case: str, deterministic: dict, free: dict, right: dict, limit_of: Callable) -> Iterator[Row]:
    """Rows of one case from three dictionaries of tensors by result name; results that are None in all are left out."""
    for name, wanted in right.items():
        a, b = deterministic[name], free[name]
        if a is None and b is None and wanted is None:
            continue
        errors = relative_l2(a, wanted), relative_l2(b, wanted)
        yield Row(case, name, *errors, relative_l2(b, a), same_bits(a, b), limit_of(name, a.dtype))


def _gdn_limit(name: str, dtype: torch.dtype) -> float:
    return 2.5e-3 if dtype == torch.bfloat16 else 1e-5


def _gdn_cuda_limit(name: str, dtype: torch.dtype) -> float:
    """Operands of products are BF16 on CUDA, whatever the dtype of a result; dg and sums of it may cancel."""
    return 2e-2 if name in ("dg", "dA_log", "ddt_bias") else 6e-3


def _gdn_cases(dtypes: tuple[torch.dtype, ...], gates: tuple[str, ...], head_dim: int) -> Iterator[tuple]:
    for dtype in dtypes:
        for gate in gates:
            case = packed(base(300, 2, 6, K=head_dim, V=head_dim, gate=gate, dtype=dtype), (130, 0, 1, 169))
            h0, ds = states(case, 4)
            name = "FP32" if dtype == torch.float32 else "BF16"
            yield f"{name}, {gate}", case.with_(initial_state=h0, d_state=ds)
    raw = base(200, 2, 4, K=head_dim, V=head_dim)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-1, 1, 4),
        "dt_bias": torch.linspace(0, 1, 4),
        "use_beta_sigmoid_in_kernel": True,
    }
    yield "BF16, options", raw.with_(g=torch.randn(raw.g.shape, generator=generator(3)), options=options)


def _gdn_rows(deterministic, free, device: str) -> Iterator[Row]:
    """Gates of strong decay leave dg too small to be judged by its own size with BF16 operands: on the CPU alone."""
    if device == "cpu":
        cases, limit_of = _gdn_cases((torch.float32, torch.bfloat16), ("G0", "Gmild", "Gqwen"), 64), _gdn_limit
    else:
        cases, limit_of = _gdn_cases((torch.bfloat16,), ("G0", "Gmild"), 128), _gdn_cuda_limit
    for name, case in cases:
        there = moved(case, device)
        runs = (on_cpu(run(module.chunk_gated_delta_rule, there)) for module in (deterministic, free))
        yield from compare(name, *runs, reference(case), limit_of)


def _gdn_program(module, device: str) -> str:
    if device == "cpu":
        return importlib.import_module(f"{module.__name__}.plan").program_identity()
    return _cuda_programs(module.__name__)


def _cuda_programs(package: str) -> str:
    """Names the CUDA programs of a package for the device here, by their number and a hash of all their sources."""
    from cake_shared.jit.sources import include_directories, kernel_units, reached_files
    from cake_shared.target import target_of

    target = target_of()
    files = reached_files(kernel_units(package, target), include_directories(package))
    sha = hashlib.sha256()
    for name, path in files.items():
        sha.update(name.encode())
        sha.update(path.read_bytes())
    return f"{len(programs_of(package).records_for(target.name))} for {target.name}, {sha.hexdigest()[:12]}"


def _gemm_limit(name: str, dtype: torch.dtype) -> float:
    return 2.5e-3 if dtype == torch.bfloat16 else 2e-6


def _gemm_cuda_limit(name: str, dtype: torch.dtype) -> float:
    """A tensor core cuts what it adds instead of rounding it: 1.9e-5 over 16384 terms, in cuBLAS too."""
    return 2.5e-3 if dtype == torch.bfloat16 else 3e-5


def _gemm_rows(deterministic, free, device: str) -> Iterator[Row]:
    from cake_shared.gemm import oracle

    rng = generator(0)
    limit_of = _gemm_limit if device == "cpu" else _gemm_cuda_limit
    for tokens, d_in, d_out in ((100, 128, 48), (1, 64, 256), (333, 256, 64)):
        x, w, g = (torch.randn(shape, generator=rng) for shape in ((tokens, d_in), (d_out, d_in), (tokens, d_out)))
        for kind, dtype in (("projection", torch.bfloat16), ("router", torch.float32)):
            x, w, g = (t.to(device, dtype) for t in (x, w, g))
            right = {"forward": oracle.forward(x, w), "dgrad": oracle.dgrad(g, w), "wgrad": oracle.wgrad(g, x)}
            both = []
            for module, keywords in ((deterministic, {}), (free, {"deterministic": False})):
                call = {name: getattr(module, f"{kind}_{name}") for name in right}
                both.append(
                    {
                        "forward": call["forward"](x, w, **keywords),
                        "dgrad": call["dgrad"](g, w, **keywords),
                        "wgrad": call["wgrad"](g, x, **keywords),
                    }
                )
            yield from compare(f"{kind} {tokens} x {d_in} -> {d_out}", *both, right, limit_of)
    if device == "cuda":
        yield from _published_weight_gradients(deterministic, free, limit_of)


def _published_weight_gradients(deterministic, free, limit_of: Callable) -> Iterator[Row]:
    """Where the free form may run a program of its own; where it does not, its bits are the twin's."""
    from cake_shared.gemm import oracle
    from cake_shared.workloads import PROJECTIONS

    for workload in (w for w in PROJECTIONS if w.d_out <= 1024):
        draw = torch.Generator("cuda").manual_seed(0)
        g, x = (
            torch.randn(workload.tokens, width, generator=draw, device="cuda").bfloat16()
            for width in (workload.d_out, workload.d_in)
        )
        twin = deterministic.prepare_wgrad(g, x, out_dtype=torch.float32)
        own = free.prepare_wgrad(g, x, out_dtype=torch.float32, deterministic=False)
        name = "wgrad, FP32 out"
        results = ({name: prepared.launch()} for prepared in (twin, own))
        case = f"{workload.tokens} x {workload.d_in} -> {workload.d_out}"
        for row in compare(case, *results, {name: oracle.wgrad(g, x)}, limit_of):
            yield replace(row, same_program=type(own.plan) is type(twin.plan))


def _gemm_program(module, device: str) -> str:
    if device == "cuda":
        # What the free form takes from its twin it takes by a call; it has its own for what was measured.
        return _cuda_programs("dense_projection_det_gemm")
    from cake_shared.gemm.problem import GemmProblem, RouterProblem

    plan = importlib.import_module(f"{module.__name__}.plan")
    plans = (
        plan.plan_gemm(GemmProblem(1, 64, 64, 64, "k", "n", "bfloat16")),
        plan.plan_router(RouterProblem(64, 64, 64, "k", "n", 3, 3)),
    )
    # A program without a package in its name is the planning package's own.
    return ", ".join(p.program if "." in p.program else f"{module.__name__}.{p.program}" for p in plans)


PAIRS = (
    Pair("cake_gdn_det_train", "cake_gdn_train", _gdn_program, _gdn_rows, ("cpu", "cuda")),
    Pair("dense_projection_det_gemm", "dense_projection_gemm", _gemm_program, _gemm_rows, ("cpu", "cuda")),
)


def report(pair: Pair, write: Callable[[str], object] = print, device: str = "cpu") -> list[str]:
    """Compare one pair, write its table line by line, and return what is wrong."""
    deterministic, free = (importlib.import_module(name) for name in (pair.deterministic, pair.free))
    programs = pair.program_of(deterministic, device), pair.program_of(free, device)
    same_program = programs[0] == programs[1]
    says = f"same program, {programs[0]}" if same_program else f"programs {programs[0]} and {programs[1]}"
    write(f"{pair.free} against {pair.deterministic} on {'the CPU' if device == 'cpu' else 'CUDA'}: {says}")
    write(f"  {'case':28} {'result':16} {'error det.':>10} {'error free':>10} {'difference':>10}  bits")
    faults = []
    for row in pair.rows(deterministic, free, device):
        found = row.faults(same_program)
        faults += [f"{row.case}, {row.result}: {fault}" for fault in found]
        write(
            f"  {row.case:28} {row.result:16} {row.deterministic_error:10.2e} {row.free_error:10.2e} "
            f"{row.difference:10.2e}  {'equal' if row.equal else 'differ'}{'  FAILS' if found else ''}"
        )
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.testing.parity", description=__doc__)
    names = [name for pair in PAIRS for name in (pair.deterministic, pair.free)]
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    chosen = options.packages
    for name in chosen:
        if name not in names:
            parser.error(f"PACKAGE: got {name}, takes one of {', '.join(names)}")
    faults = []
    for pair in PAIRS:
        if options.device in pair.devices and (not chosen or {pair.deterministic, pair.free} & set(chosen)):
            faults += report(pair, device=options.device)
    for fault in faults:
        print(f"FAILS: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
