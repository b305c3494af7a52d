"""Golden bits of the gated delta rule: SHA-256 of every result of fixed calls, by architecture and package version.

    python -m cake_shared.testing.gdn_golden cake_gdn_det_train packages/cake_gdn_det_train/tests/golden.json

renews the hashes of this machine's GPU, and with `--emulator` those of the emulator for the architectures named. Inputs
are made of integers, so that they are the same on every machine and in every release of torch. A hash moves only
together with the package's version.
"""

import argparse
import hashlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from cake_shared.bench.result import write_whole
from cake_shared.testing.bits import bits_of
from cake_shared.testing.gdn_cuda import moved, on_cpu
from cake_shared.testing.gdn_inputs import GdnCase
from cake_shared.testing.gdn_run import run

_MODULUS = 2**31 - 1  # prime: a multiplicative generator of period one less


def integers(count: int, stream: int, bound: int) -> torch.Tensor:
    """`count` integers in [0, bound), a function of the position and `stream` alone."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * 48271 + stream * 69621
    for multiplier in (16807, 39373, 48271):
        x = (x % _MODULUS) * multiplier % _MODULUS
        x = x ^ (x >> 15)
    return x % bound


def unit_rows(shape: tuple[int, ...], stream: int) -> torch.Tensor:
    """BF16 rows of 128 whose norm is exactly 1: 64 entries of 1/8 or -1/8, every other one, the rest zero."""
    rows = shape[0] * shape[1] * shape[2]
    signs = integers(rows * 128, stream, 2).view(rows, 128) * 2 - 1
    odd = integers(rows, stream + 1, 2)
    taken = torch.arange(128)[None] % 2 == odd[:, None]
    return torch.where(taken, signs / 8.0, 0.0).to(torch.bfloat16).view(shape)


def golden_case(lengths: tuple[int, ...], heads: int, value_heads: int, rows_past: int = 0) -> GdnCase:
    """A pack of those lengths with states, in host memory; gates in (-1/4, 0], betas in [0, 1)."""
    tokens = sum(lengths) + rows_past

    def grid(shape, stream, low, high, over):
        count = torch.Size(shape).numel()
        return (integers(count, stream, high - low) + low).view(shape) / float(over)

    q, k = (unit_rows((1, tokens, heads, 128), stream) for stream in (10, 20))
    v, do = (grid((1, tokens, value_heads, 128), s, -128, 129, 64).to(torch.bfloat16) for s in (30, 40))
    g, beta = grid((1, tokens, value_heads), 50, -255, 1, 1024), grid((1, tokens, value_heads), 60, 0, 256, 256)
    states = (grid((len(lengths), value_heads, 128, 128), stream, -128, 129, 128) for stream in (70, 80))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return GdnCase(q, k, v, g, beta, 128**-0.5, do, *states, cu_seqlens=offsets)


def _options() -> GdnCase:
    case = golden_case((129,), 1, 2)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.25, -0.125]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    return case.with_(g=case.g.bfloat16(), beta=case.beta.bfloat16(), options=options)


CASES: dict[str, Callable[[], GdnCase]] = {
    "pack": lambda: golden_case((70, 0, 65, 1, 129), 2, 6, rows_past=5),
    "every option, BF16 gates and betas": _options,
    "segments": lambda: golden_case((8193, 130), 1, 2),
}
# What the emulator repeats in seconds.
SMALL = {"short": lambda: golden_case((66,), 1, 2)}


def digest(results: dict[str, torch.Tensor | None]) -> str:
    """SHA-256 of all results in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(name for name, x in results.items() if x is not None):
        sha.update(name.encode())
        sha.update(bits_of(results[name]).numpy().tobytes())
    return sha.hexdigest()


def gpu_hashes(package: str) -> dict[str, str]:
    """The hash of every case on the current GPU."""
    rule = importlib.import_module(package).chunk_gated_delta_rule
    return {name: digest(on_cpu(run(rule, moved(make(), "cuda")))) for name, make in CASES.items()}


def emulated_hashes(package: str, architecture: str) -> dict[str, str]:
    """The hash of every small case in the emulator of one architecture."""
    from cake_shared.emulator import Options
    from cake_shared.gdn.cuda.devices import ErrorWord
    from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
    from cake_shared.testing.emulated import EmulatedPackage
    from cake_shared.testing.gdn_cuda import rule_through

    emulated = EmulatedPackage(package, architecture, Options(order="eager"))
    word = ErrorWord(torch.zeros(1, dtype=torch.int32))
    backend = RuleBackend(emulated.module, word, 132, lambda: 0, uses_native(package, architecture))
    with emulated:
        return {name: digest(run(rule_through(package, backend), make())) for name, make in SMALL.items()}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Renews golden hashes of the gated delta rule.")
    parser.add_argument("package")
    parser.add_argument("file", type=Path, help="the package's tests/golden.json; other places are kept as they are")
    parser.add_argument("--emulator", nargs="+", default=[], help="architectures to renew in the emulator")
    options = parser.parse_args()
    version = importlib.import_module(options.package).__version__
    known = json.loads(options.file.read_text()) if options.file.exists() else {}
    if options.emulator:
        for architecture in options.emulator:
            hashes = emulated_hashes(options.package, architecture)
            known[f"emulator {architecture}"] = {"version": version, "sha256": hashes}
    else:
        from cake_shared.target import target_of

        known[target_of().name] = {"version": version, "sha256": gpu_hashes(options.package)}
    write_whole(options.file, json.dumps(known, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
