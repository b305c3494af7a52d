"""Measures the rule beside Hugging Face transformers: `python -m cake_shared.bench run cake-gdn-det-train`."""

import functools
import sys
from pathlib import Path

import torch

from cake_gdn_det_train import chunk_gated_delta_rule
from cake_shared.bench import Suite, Table
from cake_shared.bench.gdn import cells, error_table, memory_cases, transformers_rule
from cake_shared.bench.host import import_table, least_microseconds
from cake_shared.testing.gdn_inputs import base

PACKAGE = "cake_gdn_det_train"
SHAPE = {"tokens": 4096, "heads": 4, "value_heads": 8}

PEER = transformers_rule()
ARMS = {"ours": chunk_gated_delta_rule, **({"transformers": PEER} if PEER else {})}
NOTES = [
    "B = 1, T = 4096, H = 4, HV = 8, K = V = 128, mild gates.",
    "The peer is torch_chunk_gated_delta_rule of transformers' Qwen3-Next.",
]
MISSING = [] if PEER else ["transformers is not installed: the peer is not measured."]


def host_time():
    """What a call costs besides the arithmetic: one token of one small head."""
    case = base(1, 1, 1, K=16, V=16, dtype=torch.float32)
    inputs = [case.q, case.k, case.v, case.g, case.beta]
    wanted = [x.clone().requires_grad_() for x in inputs]
    calls = {
        "without gradients": lambda: chunk_gated_delta_rule(*inputs),
        "with gradients wanted": lambda: chunk_gated_delta_rule(*wanted),
        "forward and backward": lambda: chunk_gated_delta_rule(*wanted)[0].sum().backward(),
    }
    micros = {name: least_microseconds(call, calls=50) for name, call in calls.items()}
    rows = [[name, f"{value:.0f} us"] for name, value in micros.items()]
    note = "Least mean of 50 calls over 20 tries on one token of one 16 x 16 head, its arithmetic included."
    return Table("Time of the smallest call", ["call", "time"], rows, note), micros


FINDINGS = [
    functools.partial(error_table, chunk_gated_delta_rule, "FP32"),
    functools.partial(error_table, chunk_gated_delta_rule, "BF16"),
    functools.partial(import_table, PACKAGE),
    host_time,
]

if __name__ == "__main__":
    suite = Suite(
        PACKAGE,
        Path(__file__),
        cells(ARMS, ("ours",), **SHAPE),
        memory_cases(ARMS, **SHAPE),
        FINDINGS,
        ("transformers",),
        NOTES,
        MISSING,
    )
    sys.exit(suite.main())
