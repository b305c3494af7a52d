"""The split programs in the emulator: host chain and kernels on CPU tensors, against float64."""

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.gemm_cuda import GemmCase
from dense_projection_gemm.cuda import PACKAGE, SplitBackend
from dense_projection_gemm.cuda_plan import plan_split

BF16, FP32 = torch.bfloat16, torch.float32
ARCHITECTURES = ["sm_90a"]


def problem_of(case):
    return GemmProblem(
        case.batch,
        case.m,
        case.n,
        case.k,
        case.a_major,
        case.b_major,
        str(case.out_dtype).removeprefix("torch."),
        case.out_major,
        case.accumulate,
        "cuda",
    )


def check(package, case, multiprocessors, **choices):
    backend = SplitBackend(package.module, multiprocessors, lambda: 0)
    plan = plan_split(problem_of(case), multiprocessors, **choices)

    def gemm(a, b, out, transposed_out, accumulate):
        backend.prepare(plan, a, b, out)()

    case.check(gemm, "cpu")
    return plan


CASES = {
    "whole and split tiles, FP32": (GemmCase(260, 264, 140, "m", "n", FP32), 6, 3, {}),
    "whole and split tiles, BF16": (GemmCase(260, 264, 140, "k", "n", BF16, pad=1), 6, 3, {}),
    "one tile by five clusters": (GemmCase(72, 40, 400, "m", "n", FP32, pad=1), 10, 0, {"stage": "split_wide"}),
    "pieces of two tiles": (GemmCase(72, 520, 260, "m", "n", FP32), 8, 0, {"stage": "split_wide", "pieces": 4}),
    "slim, accumulating": (GemmCase(48, 520, 200, "m", "n", FP32, accumulate=True), 8, 0, {}),
    "slim, BF16, k-major": (GemmCase(40, 264, 200, "k", "k", BF16), 6, 0, {}),
    "two batches, transposed out": (GemmCase(72, 64, 130, "k", "k", FP32, "m", batch=2), 6, 0, {}),
    "accumulating whole tiles": (GemmCase(130, 264, 70, "m", "k", FP32, accumulate=True), 2, 2, {}),
    "nothing split": (GemmCase(130, 264, 70, "k", "n", BF16), 4, 2, {"whole_units": 2}),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("name", CASES)
def test_split_gemm(name, order, architecture):
    case, multiprocessors, whole_units, choices = CASES[name]
    with EmulatedPackage(PACKAGE, architecture, Options(order=order)) as package:
        plan = check(package, case, multiprocessors, **choices)
    assert plan.whole_units == whole_units
