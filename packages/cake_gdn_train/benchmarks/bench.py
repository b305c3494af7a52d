"""Measures the rule beside its deterministic twin: `python -m cake_shared.bench run cake-gdn-train`."""

import functools
import sys
from pathlib import Path

import cake_gdn_det_train
import cake_gdn_train
from cake_shared.bench import Suite
from cake_shared.bench.gdn import cells
from cake_shared.bench.host import import_table

PACKAGE = "cake_gdn_train"
ARMS = {
    "ours": cake_gdn_train.chunk_gated_delta_rule,
    "deterministic twin": cake_gdn_det_train.chunk_gated_delta_rule,
}
NOTES = ["B = 1, T = 2048, H = 2, HV = 4, K = V = 128, mild gates. On the CPU both run the same program."]

if __name__ == "__main__":
    timed = cells(ARMS, tuple(ARMS), tokens=2048, heads=2, value_heads=4)
    findings = [functools.partial(import_table, PACKAGE)]
    sys.exit(Suite(PACKAGE, Path(__file__), timed, findings=findings, notes=NOTES).main())
