"""Times the free form beside the deterministic one on the CPU, where they are the same program."""

import sys
from pathlib import Path

import torch

import dense_projection_gemm as free
from cake_shared.bench import Arm, Cell, Suite
from cake_shared.gemm import oracle
from cake_shared.testing import relative_l2

BF16 = torch.bfloat16
LIMIT = 5e-3
TOKENS, D_IN, D_OUT = 2048, 1024, 1024


def operands():
    """x, w and g of one projection."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, D_IN), (D_OUT, D_IN), (TOKENS, D_OUT))
    return [torch.randn(shape, generator=generator).to(BF16) for shape in shapes]


def call(direction, deterministic):
    """One direction in one form."""
    x, w, g = operands()
    return {
        "forward": lambda: free.projection_forward(x, w, deterministic=deterministic),
        "dgrad": lambda: free.projection_dgrad(g, w, deterministic=deterministic),
        "wgrad": lambda: free.projection_wgrad(g, x, deterministic=deterministic),
    }[direction]


def cell(direction):
    """Free against deterministic."""
    arms = [
        Arm("deterministic=False", lambda: call(direction, False)),
        Arm("deterministic=True", lambda: call(direction, True)),
    ]

    def check():
        x, w, g = operands()
        exact = {"forward": oracle.forward(x, w), "dgrad": oracle.dgrad(g, w), "wgrad": oracle.wgrad(g, x)}[direction]
        return {arm.name: (relative_l2(arm.make()(), exact), LIMIT) for arm in arms}

    return Cell(f"{direction}, {TOKENS} x {D_IN} -> {D_OUT}", arms, check)


if __name__ == "__main__":
    cells = [cell(direction) for direction in ("forward", "dgrad", "wgrad")]
    note = "On the CPU both forms run the same program: a difference beyond the spread would be a fault of the bench."
    sys.exit(Suite("dense_projection_gemm", Path(__file__), cells, notes=[note]).main())
