"""What a long run sees on a GPU: no compilation, no driver allocation, no wait for the device after warm-up."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared import jit
from cake_shared.bench.gdn_gpu import make_tensors, peak_bytes, title
from cake_shared.bench.gdn_peers import GdnArm
from cake_shared.jit.settings import cache_directory
from cake_shared.target import target_of
from cake_shared.testing.gdn_cuda import moved
from cake_shared.testing.gdn_inputs import base, packed
from cake_shared.testing.gdn_run import run
from cake_shared.workloads import GDN

pytestmark = pytest.mark.gpu

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "h200.json"

FIFTY_PACKS = """
import torch
from cake_gdn_det_train import chunk_gated_delta_rule
for n in range(50):
    lengths = [37 * n + 5 * i + 1 for i in range(n % 7 + 1)]
    tokens = sum(lengths)
    q, k = (torch.randn(1, tokens, 2, 128, device="cuda").bfloat16() / 12 for _ in range(2))
    v = torch.randn(1, tokens, 2 * (n % 3 + 1), 128, device="cuda").bfloat16().requires_grad_()
    g, beta = (torch.full(v.shape[:3], x, device="cuda") for x in (-0.1, 0.5))
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets)
    o.sum().backward()
    assert torch.isfinite(v.grad).all()
print("fifty packs")
"""


def test_U40_fifty_packs_in_a_fresh_process_without_a_compiler(tmp_path):
    """A warm cache is all that a process needs, whatever T, N and the number of heads; it adds no file to the cache."""
    entry = jit.build_module(cuda.PACKAGE, target_of().name)
    cache = tmp_path / "cache"
    kept = cache / entry.relative_to(cache_directory()) if entry.is_relative_to(cache_directory()) else None
    if kept is not None:  # else the module lies inside the package
        shutil.copytree(entry, kept)
    before = sorted(str(path) for path in cache.rglob("*"))
    python = tmp_path / "bin"
    python.mkdir()
    hidden = ("CUDA_HOME", "CUDA_PATH", "CAKE_NVCC")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment.update(PATH=str(python), CAKE_NVCC=str(tmp_path / "no" / "nvcc"), CAKE_CACHE_DIR=str(cache))
    done = subprocess.run([sys.executable, "-c", FIFTY_PACKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fifty packs" in done.stdout
    assert sorted(str(path) for path in cache.rglob("*")) == before


def packs():
    for n in range(12):
        lengths = [64 * n + 7 * i + 1 for i in range(n % 5 + 1)]
        yield moved(packed(base(sum(lengths), 2, 4, seed=n), lengths), "cuda")


DRIVER_ALLOCATIONS = ("cudaMalloc", "cudaHostAlloc", "cudaHostRegister", "cuMemAlloc", "cuMemCreate", "cuMemHostAlloc")


def driver_allocations(call):
    """Names of the runtime's and the driver's allocating functions that this process calls meanwhile."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.name.startswith(DRIVER_ALLOCATIONS)]


def test_no_driver_allocation_after_warm_up():
    """Neither torch's allocator nor the module asks the driver for memory again."""
    cases = list(packs())

    def run_all():
        for case in reversed(cases):
            run(chunk_gated_delta_rule, case)

    run_all()
    torch.cuda.synchronize()
    segments = torch.cuda.memory_stats()["segment.all.allocated"]
    assert driver_allocations(run_all) == []
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments

    def allocate():  # what the profiler must see to say anything
        torch.cuda.empty_cache()
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    assert driver_allocations(allocate)


def test_nothing_waits_for_the_device():
    """Under torch's own check for synchronising calls, with offsets that only the device knows."""
    (case, *_) = packs()
    leaves = [getattr(case, name).requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def step():
        o, _ = chunk_gated_delta_rule(*leaves, cu_seqlens=case.cu_seqlens.clone())
        torch.autograd.grad(o, leaves, case.do)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # A kernel that runs for longer than the host needs: a hidden wait would show in the events' order.
        torch.cuda._sleep(200_000_000)
        done = torch.cuda.Event()
        done.record()
        step()
        assert not done.query(), "the call returned only after the device had finished what was queued before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.parametrize("workload", GDN, ids=lambda w: f"{w.name} {w.h}/{w.hv}")
def test_peak_memory_is_at_most_that_of_fla(workload):
    """Forward and backward of the published workloads, against the peaks that the bench measured of FLA."""
    measured = json.loads(RESULT.read_text())["data"]["memory_bytes"][f"{title(workload)} | FP32"]["FLA"]
    tensors = make_tensors(workload, torch.float32)
    assert peak_bytes(GdnArm("ours", chunk_gated_delta_rule, torch.int32), tensors) <= measured


def held_bytes(function, leaves):
    """What stays allocated between forward and backward beyond the output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o = function(*leaves)
    held = torch.cuda.memory_allocated() - before - o.numel() * o.element_size()
    o.backward(torch.ones_like(o))
    for x in leaves:
        x.grad = None
    return held


@pytest.mark.parametrize("reentrant", [False, True])
def test_U46_checkpointing_holds_less_memory(reentrant):
    """A long sequence keeps the states at its segments' entries for the backward; under checkpointing nothing."""
    case = moved(base(16384, 1, 4), "cuda")
    leaves = [getattr(case, name).requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def plain(*inputs):
        return chunk_gated_delta_rule(*inputs)[0]

    def checkpointed(*inputs):
        return checkpoint(plain, *inputs, use_reentrant=reentrant)

    held_bytes(plain, leaves)
    entries = 3 * 4 * 128 * 128 * 4
    assert held_bytes(plain, leaves) >= entries
    assert held_bytes(checkpointed, leaves) < entries
