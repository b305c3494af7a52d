"""The router's bits belong to a version: fixed products against hashes that were taken before, on a GPU and emulated.

The native and the portable programs give the same bits, except where the weight gradient is cut. A failure means other
bits than those of the version in router_golden.json; if that is meant, the version goes up and the file is renewed.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import dense_projection_det_gemm as det
from cake_shared.gemm.problem import RouterProblem
from cake_shared.target import TARGETS
from cake_shared.testing.emulated import emulated_or_skip
from dense_projection_det_gemm import cuda

GOLDEN = json.loads(Path(__file__).with_name("router_golden.json").read_text())["sha256"]


def pattern(rows, cols, seed):
    """FP32 in [-1, 1) from integers, the same with every version of torch."""
    n = torch.arange(rows * cols, dtype=torch.int64) * 2654435761 + seed * 40503
    n = (n ^ (n >> 13)) * 1274126177 % (1 << 32)
    return (n.double() / 2**31 - 1).float().reshape(rows, cols)


def digest(x):
    return hashlib.sha256(x.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]


def hashes(forward, dgrad, wgrad, device, kind):
    """The hash of every case of the file that a kind of program has."""
    found = {}
    for experts in (136, 40):
        x, w, g = (p.to(device) for p in (pattern(140, 200, 1), pattern(experts, 200, 2), pattern(140, experts, 3)))
        for suffix, x_in in (("", x), (" bf16", x.to(torch.bfloat16))):
            found[f"forward{suffix} {experts}"] = digest(forward(x_in, w))
            found[f"wgrad{suffix} {experts}"] = digest(wgrad(g, x_in))
        found[f"dgrad {experts}"] = digest(dgrad(g, w))
    x, g = pattern(700, 136, 1).to(device), pattern(700, 136, 3).to(device)
    found[f"wgrad cut, {kind}"] = digest(wgrad(g, x))
    return found


def compare(found, kind):
    assert found == {name: value for name, value in GOLDEN.items() if "cut" not in name or name.endswith(kind)}


@pytest.mark.gpu
def test_bits_of_this_gpu():
    kind = "native" if cuda.gemm_backend(torch.device("cuda")).router.native else "portable"
    compare(hashes(det.router_forward, det.router_dgrad, det.router_wgrad, "cuda", kind), kind)


@pytest.mark.parametrize("architecture", TARGETS)
def test_emulated_bits(architecture):
    package = emulated_or_skip(cuda.PACKAGE)(architecture)
    with package:
        backend = cuda.GemmBackend(package.module, architecture, 4, lambda: 0)

        def multiply(a, b):
            out = torch.full((a.shape[0], b.shape[1]), float("nan"))
            majors = "k" if a.stride(1) == 1 else "m", "n" if b.stride(1) == 1 else "k"
            terms = (1 if t.dtype == torch.bfloat16 else 3 for t in (a, b))
            problem = RouterProblem(a.shape[0], b.shape[1], a.shape[1], *majors, *terms, "cuda")
            backend.router.prepare(problem, a, b, out)[1]()
            return out

        kind = "native" if backend.router.native else "portable"
        found = hashes(
            lambda x, w: multiply(x, w.t()), multiply, lambda g, x: multiply(g.t(), x), torch.device("cpu"), kind
        )
    compare(found, kind)
