"""Bits of the BF16 GEMM belong to a version: fixed products against hashes taken before, emulated and on a GPU.

A failure means other bits than those of the version in gemm_golden.json; if that is meant, the version goes up and the
file is renewed. The weight gradient's cut depends on the program's tile, and so does its hash.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from cake_shared.gemm.problem import GemmProblem
from cake_shared.target import TARGETS
from cake_shared.testing.emulated import emulated_or_skip
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_plan import plan_gemm_cuda

GOLDEN = json.loads(Path(__file__).with_name("gemm_golden.json").read_text())["sha256"]
# m, n, k, unit strides of a and b, dtype of the result, whether it accumulates
CASES = {
    "forward": (70, 72, 304, "k", "k", "bfloat16", False),
    "dgrad": (70, 136, 72, "k", "n", "bfloat16", False),
    "wgrad": (72, 136, 304, "m", "n", "bfloat16", False),
    "accumulated": (40, 72, 304, "m", "n", "float32", True),
    "cut": (40, 72, 6000, "m", "n", "float32", False),
}


def pattern(rows, cols, seed):
    """BF16 in [-1, 1) from integers, the same with every version of torch."""
    n = torch.arange(rows * cols, dtype=torch.int64) * 2654435761 + seed * 40503
    n = (n ^ (n >> 13)) * 1274126177 % (1 << 32)
    return (n.double() / 2**31 - 1).to(torch.bfloat16).reshape(rows, cols)


def hashes(backend, device):
    """The hash of every case, run by a backend; the cut one bears the kind of its program."""
    found = {}
    for name, (m, n, k, a_major, b_major, dtype, accumulate) in CASES.items():
        a = pattern(m, k, 1) if a_major == "k" else pattern(k, m, 1).t()
        b = pattern(n, k, 2).t() if b_major == "k" else pattern(k, n, 2)
        out = pattern(m, n, 3).to(getattr(torch, dtype))
        a, b, out = (t.to(device)[None] for t in (a, b, out))
        problem = GemmProblem(1, m, n, k, a_major, b_major, dtype, accumulate=accumulate, target="cuda")
        assert (plan_gemm_cuda(problem, backend.native).cut.pieces > 1) == (name == "cut")
        backend.prepare("gemm_out", problem, a, b, out)[1]()
        key = name if name != "cut" else f"cut, {'native' if backend.native else 'portable'}"
        found[key] = hashlib.sha256(out.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return found


def compare(found):
    assert found == {name: GOLDEN[name] for name in found}


@pytest.mark.gpu
def test_bits_of_this_gpu():
    compare(hashes(cuda.gemm_backend(torch.device("cuda")), "cuda"))


@pytest.mark.parametrize("architecture", TARGETS)
def test_emulated_bits(architecture):
    package = emulated_or_skip(cuda.PACKAGE)(architecture)
    with package:
        compare(hashes(cuda.GemmBackend(package.module, architecture, 132, lambda: 0), "cpu"))
