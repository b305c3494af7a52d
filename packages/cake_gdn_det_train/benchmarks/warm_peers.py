"""Fills the caches of FLA (Triton) and FlashQLA (TileLang) for the published workloads: a bench then compiles nothing.

    python warm_peers.py           compile on all processors, then let FLA choose its configurations undisturbed
    python warm_peers.py --used    print the folders of Triton's cache that its choices need

Each peer compiles anew for every head count, FLA for every configuration that it chooses from unless the cache has its
choice. So that all processors have work to the end, every worker walks through all workloads without launching
anything, and whoever meets a kernel first compiles it. FLA's choices are timings, so they are made by one process alone
on the GPU; Triton keeps them in its cache as *.autotune.json.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

import torch

from cake_shared.bench.gdn_gpu import BETAS, Call, make_tensors, release
from cake_shared.bench.gdn_peers import PEERS, installed_peers
from cake_shared.workloads import GDN, GdnWorkload

HEADS = sorted({(w.h, w.hv) for w in GDN}, key=lambda heads: -heads[1])
TUNING_LENGTHS = (4096,) * 4
Heads = list[tuple[int, int]]


class Share:
    """One worker's share of the kernels: those whose file in a common folder it was the first to make."""

    def __init__(self, folder: str, deadline: float):
        self._folder, self._deadline = Path(folder), deadline
        self.seconds: Counter = Counter()
        self.kernels: Counter = Counter()
        self.left = 0

    def takes(self, kernel: str) -> bool:
        """Whether this worker compiles it."""
        if time.time() > self._deadline:
            self.left += 1
            return False
        try:
            (self._folder / hashlib.sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def spent(self, name: str, begin: float):
        """Count a kernel of that name as compiled since `begin`."""
        self.seconds[name] += time.monotonic() - begin
        self.kernels[name] += 1

    def divide_triton(self):
        """Makes launches of Triton's kernels compile what this worker takes, and launch nothing."""
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.cache import FileCacheManager
        from triton.runtime.jit import JITFunction

        def once(call, quantiles):
            call()
            return [0.0] * len(quantiles)

        put = FileCacheManager.put

        def put_kernels(manager, data, filename, binary=True):
            return "" if filename.endswith(".autotune.json") else put(manager, data, filename, binary)

        compile_only = JITFunction.run

        def run(function, *args, grid, warmup, **kwargs):
            begin = time.monotonic()
            known = len(taken)
            kernel = compile_only(function, *args, grid=grid, warmup=True, **kwargs)
            if len(taken) > known:
                _ = kernel.run  # its launcher is compiled too
                self.spent(function.__name__, begin)
            return kernel

        taken = []

        def leave(*, compile, **_):  # Triton's name for what it is about to compile
            if not self.takes(compile["specialization_data"]):
                return True
            taken.append(compile["key"])
            return False

        Autotuner.do_bench = property(lambda _: once)
        FileCacheManager.put = put_kernels  # what is no timing must not be kept as one
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = leave

    def divide_tilelang(self):
        """The same for TileLang's kernels."""
        from tilelang.jit import JITImpl

        whole = JITImpl.compile

        def compile(function, *args, **kwargs):
            name = function.func.__name__
            begin = time.monotonic()
            if self.takes(f"{name} {args} {kwargs}"):
                whole(function, *args, **kwargs)
                self.spent(name, begin)
            return lambda *_, **__: None

        JITImpl.compile = compile


def run_both(arm, workload: GdnWorkload, beta: str):
    """Forward without gradients, and forward and backward."""
    tensors = make_tensors(workload, BETAS[beta])
    for operation in ("fwd", "fwd+bwd"):
        Call(arm, operation, tensors)()
    torch.cuda.synchronize()


def workloads_of(name: str, heads: tuple[int, int]) -> list[GdnWorkload]:
    """What makes a peer compile all kernels of one head count: FlashQLA chooses them by the pack, FLA does not."""
    if name == "FLA":
        return [GdnWorkload("tuning", *heads, TUNING_LENGTHS)]
    return [w for w in GDN if (w.h, w.hv) == heads]


def work(peers: tuple[str, ...], every_heads: Heads, betas: list[str], share: Share):
    """One worker: all workloads of all peers, launching nothing."""
    torch.set_num_threads(1)
    arms, missing = installed_peers(peers)
    print("".join(f"{sentence}\n" for sentence in missing), end="", flush=True)
    if any(arm.name == "FLA" for arm in arms):
        share.divide_triton()
    share.divide_tilelang()  # FLA has a kernel of TileLang's too
    for arm, heads, beta in product(arms, every_heads, betas):
        for workload in workloads_of(arm.name, heads):
            try:
                run_both(arm, workload, beta)
            except Exception as problem:  # a kernel that does not compile: the bench says so
                what = " ".join(str(problem).split())[:200]
                print(f"{arm.name} {heads} {beta}: {type(problem).__name__}: {what}", flush=True)
            release()
    parts = ", ".join(f"{n} {name} {share.seconds[name]:.1f} s" for name, n in share.kernels.items())
    print(f"compiled {sum(share.kernels.values())} in {sum(share.seconds.values()):.0f} s, left {share.left}: {parts}")


def tune(every_heads: Heads, betas: list[str], deadline: float):
    """FLA on one pack for each head count and dtype of beta, in this process."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def short(call, quantiles):
        return do_bench(call, warmup=3, rep=15, quantiles=quantiles)

    Autotuner.do_bench = property(lambda _: short)
    (arm,), _ = installed_peers(("FLA",))
    for heads, beta in product(every_heads, betas):
        begin = time.monotonic()
        if time.time() > deadline:
            print(f"FLA {heads} {beta}: not tuned, no time left")
            continue
        run_both(arm, *workloads_of("FLA", heads), beta)
        print(f"FLA {heads} {beta}: {time.monotonic() - begin:.1f} s", flush=True)


def used(every_heads: Heads, betas: list[str]):
    """Prints every folder of Triton's cache that FLA opens where its choices are there."""
    from triton.runtime.cache import FileCacheManager

    opened = {}
    get_file, get_group = FileCacheManager.get_file, FileCacheManager.get_group

    def note(method):
        def noted(manager, name):
            opened[manager.cache_dir] = None
            return method(manager, name)

        return noted

    FileCacheManager.get_file, FileCacheManager.get_group = note(get_file), note(get_group)
    (arm,), _ = installed_peers(("FLA",))
    for heads, beta in product(every_heads, betas):
        run_both(arm, *workloads_of("FLA", heads), beta)
    print("\n".join(opened))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--used", action="store_true", help="print the folders of Triton's cache that are needed")
    parser.add_argument("--peers", default=",".join(reversed(PEERS)))  # the longest compilations first
    parser.add_argument("--heads", default=",".join(f"{h}/{hv}" for h, hv in HEADS), help="key and value heads")
    parser.add_argument("--betas", default=",".join(BETAS))
    parser.add_argument("--tune", choices=("only", "never"), help="only choose configurations, or leave that out")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing later than that")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--share", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    peers, betas = tuple(options.peers.split(",")), options.betas.split(",")
    heads = [tuple(map(int, pair.split("/"))) for pair in options.heads.split(",")]
    if options.share:
        folder, deadline = options.share
        work(peers, heads, betas, Share(folder, float(deadline)))
        return 0
    if options.used:
        used(heads, betas)
        return 0
    begin = time.monotonic()
    deadline = time.time() + options.seconds
    codes = [0]
    if options.tune != "only":
        same = [sys.executable, __file__, "--peers", options.peers, "--heads", options.heads, "--betas", options.betas]
        with tempfile.TemporaryDirectory() as folder:
            started = [subprocess.Popen([*same, "--share", folder, str(deadline)]) for _ in range(options.workers)]
            codes = [process.wait() for process in started]
        print(f"compiled in {time.monotonic() - begin:.0f} s, exit codes {codes}", flush=True)
    if "FLA" in peers and options.tune != "never":
        tune(heads, betas, deadline)
        print(f"tuned after {time.monotonic() - begin:.0f} s", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
