"""Fills the caches of FLA (Triton) and FlashQLA (TileLang) for the published workloads: a bench then compiles nothing.

    python warm_peers.py              compile in parallel processes, then let FLA choose its configurations undisturbed
    python warm_peers.py --compile    only what the choices already in the cache need

Each peer compiles anew for every head count and dtype of beta. FLA's choices are timings, so they are made by one
process alone on the GPU; Triton keeps them in its cache as *.autotune.json.
"""

import argparse
import os
import subprocess
import sys
import time
from itertools import product

import torch

from cake_shared.bench.gdn_gpu import BETAS, Call, make_tensors
from cake_shared.bench.gdn_peers import PEERS, installed_peers
from cake_shared.workloads import GDN, GdnWorkload

HEADS = sorted({(w.h, w.hv) for w in GDN})
TUNING_LENGTHS = (4096,) * 4


def quick_benchmarks(warmup_ms: int, rep_ms: int):
    """Makes Triton's tuner spend that long on each configuration; 0 ms runs each once and tells them not apart."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def once(call, quantiles):
        call()
        return [0.0] * len(quantiles)

    def short(call, quantiles):
        return do_bench(call, warmup=warmup_ms, rep=rep_ms, quantiles=quantiles)

    Autotuner.do_bench = property(lambda self: short if rep_ms else once)


def run_both(arm, workload: GdnWorkload, beta: str):
    """Forward without gradients, and forward and backward."""
    tensors = make_tensors(workload, BETAS[beta])
    for operation in ("fwd", "fwd+bwd"):
        Call(arm, operation, tensors)()
    torch.cuda.synchronize()


def tune(heads, betas):
    """FLA on one pack for each head count and dtype of beta, in this process."""
    (arm,), _ = installed_peers(("FLA",))
    for (h, hv), beta in product(heads, betas):
        begin = time.monotonic()
        run_both(arm, GdnWorkload("tuning", h, hv, TUNING_LENGTHS), beta)
        print(f"FLA {h}/{hv} {beta}: {time.monotonic() - begin:.1f} s", flush=True)


def compile_one(name: str, h: int, hv: int, beta: str):
    """A peer on packs of one head count: whatever is not in its cache is compiled."""
    arms, missing = installed_peers((name,))
    print("; ".join(missing), end="", flush=True)
    tuning = GdnWorkload("tuning", h, hv, TUNING_LENGTHS)
    for arm in arms:
        begin = time.monotonic()
        # FlashQLA chooses kernels by the pack, FLA does not.
        for workload in [tuning] if name == "FLA" else [w for w in GDN if (w.h, w.hv) == (h, hv)]:
            run_both(arm, workload, beta)
        print(f"{name} {h}/{hv} {beta}: {time.monotonic() - begin:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="keep the choices of configurations in the cache")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--betas", default=",".join(BETAS))
    parser.add_argument("--tune", choices=("only", "never"), help="only choose configurations, or leave that out")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    peers, betas = options.peers.split(","), options.betas.split(",")
    begin = time.monotonic()
    if options.one:
        if not options.compile:
            quick_benchmarks(0, 0)
        name, h, hv, beta = options.one
        compile_one(name, int(h), int(hv), beta)
        return 0
    codes = [0]
    if options.tune != "only":
        # Without their timings: what a process beside others measures must not be kept.
        kept = {} if options.compile else {"FLA_CACHE_RESULTS": "0"}
        same = [sys.executable, __file__, *(["--compile"] if options.compile else []), "--one"]
        started = [
            subprocess.Popen([*same, name, str(h), str(hv), beta], env={**os.environ, **kept})
            for name, (h, hv), beta in product(peers, HEADS, betas)
        ]
        codes = [process.wait() for process in started]
        print(f"compiled in {time.monotonic() - begin:.0f} s, exit codes {codes}", flush=True)
    if "FLA" in peers and not options.compile and options.tune != "never":
        quick_benchmarks(5, 25)
        tune(HEADS, betas)
        print(f"tuned after {time.monotonic() - begin:.0f} s", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
