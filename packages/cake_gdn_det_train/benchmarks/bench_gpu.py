"""Measures the CUDA programs beside FLA, FlashQLA and the twin: `nox -s bench` where there is a GPU.

`python packages/cake_gdn_det_train/benchmarks/bench_gpu.py --help` names what it can be restricted to.
"""

import sys
from pathlib import Path

import torch

import cake_gdn_det_train
from cake_gdn_det_train import chunk_gated_delta_rule
from cake_shared.bench.gdn_bench import GdnBench
from cake_shared.bench.gdn_host import host_table
from cake_shared.bench.gdn_peers import GdnArm
from cake_shared.bench.gdn_published import Published
from cake_shared.errors import BuildError, UnsupportedArchError

PACKAGE = "cake_gdn_det_train"
PUBLISHED = Published(Path(__file__).parent / "results" / "published_b200.csv", "B200", "deterministic_ms")


def arms(names: list[str]) -> list[GdnArm]:
    """Ours, and the twin where it is wanted and serves this GPU."""
    found = [GdnArm("ours", chunk_gated_delta_rule, torch.int32, cake_gdn_det_train.__version__)]
    if names and "cake_gdn_train" not in names:
        return found
    import cake_gdn_train

    rule, version = cake_gdn_train.chunk_gated_delta_rule, cake_gdn_train.__version__
    twin = GdnArm("cake_gdn_train", rule, torch.int32, version, sparing=True)
    try:
        x = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device="cuda")
        twin.rule(x, x, x, *(torch.zeros(1, 1, 1, device="cuda") for _ in range(2)))
    except (BuildError, UnsupportedArchError) as problem:
        print(f"{twin.name} is not measured: {problem}", file=sys.stderr)
        return found
    return [*found, twin]


def host_time():
    """Host time of our calls."""
    return host_table(PACKAGE, chunk_gated_delta_rule)


if __name__ == "__main__":
    sys.exit(GdnBench(PACKAGE, Path(__file__), arms, [host_time], published=PUBLISHED).main())
