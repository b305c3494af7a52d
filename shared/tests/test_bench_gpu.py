"""The bench on a GPU: what its tables say of given figures and, where there is a GPU, that it times what it calls."""

import pytest
import torch

from cake_shared.bench.gemm import LIBRARY, rows
from cake_shared.bench.gemm_tables import (
    error_table,
    published_table,
    ratio_grid,
    ratios_of,
    summary_table,
    workload_table,
)
from cake_shared.bench.gpu import geometric_mean, sample, summary
from cake_shared.bench.grid import plot_grid
from cake_shared.bench.timing import SAME_ARM


def figures(ratio_of):
    """Cells of every row, ours at 40 us and the library at that times `ratio_of(row)`."""
    made = {}
    for row in rows():
        ratio = ratio_of(row)
        verdict = "at parity" if ratio == 1 else "ours is faster" if ratio > 1 else "ours is slower"
        mode = {
            "median_us": {"ours": 40.0, LIBRARY: 40.0 * ratio},
            "ratio_to_ours": {LIBRARY: ratio},
            "same_arm_spread": 0.01,
            "verdict": {LIBRARY: verdict},
        }
        made[row.name] = {"checks": {LIBRARY: (2e-3, 9.0), "ours": (1e-3, 2e-3)}, "graph": mode, "eager": mode}
    return made


def test_rows_are_those_of_the_workloads():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == 33 * 6 + 6 * 3 + 2 * 3


def test_tables_of_known_figures():
    found = figures(lambda row: 2.0 if row.kind == "router" else 0.5 if row.operation == "dgrad" else 1.0)
    table = workload_table(found, "graph", "projection", "title")
    assert table.columns == ["workload", "forward", "dgrad", "wgrad BF16", "wgrad FP32", "bwd", "2fwd+bwd"]
    assert table.rows[0][:3] == ["4096 -> 32, 16172 tokens", "40.0 us, ~1.00", "40.0 us, 0.50"]
    assert workload_table({}, "graph", "heads", "title") is None
    verdicts = {"graph": {name: cell["graph"]["verdict"][LIBRARY] for name, cell in found.items()}}
    lines = {line[0]: line for line in summary_table({"graph": ratios_of(found, "graph")}, verdicts, "t", "").rows}
    assert lines["router"][2:4] == ["6", "2.000"]
    assert lines["projections, dgrad"][3] == "0.500"
    assert lines["projections, dgrad"][-1] == "0 / 0 / 33"
    assert lines["projections and heads"][2] == "216"
    assert error_table(found).rows[0] == ["projection, forward", "1.00e-03", "2.00e-03"]


def test_published_figures_stand_beside_the_row_of_their_name():
    line = {
        "sm_count": "212",
        "d_in": "4096",
        "d_out": "512",
        "wgrad_out": "FP32",
        "tokens": "16231",
        "op": "bwd",
        "mode": "graph",
        "deterministic_us": "50",
        "nondeterministic_us": "40",
        "best_library_us": "60",
    }
    table = published_table([line, {**line, "mode": "eager"}], figures(lambda row: 1.5), "some GPU")
    assert table.rows == [
        ["4096 -> 512, 16231 tokens, bwd", "212", "50.0 us, 1.20", "40.0 us, 1.50", "40.0 us, 1.50"],
    ]
    assert "sm_107a" in table.note


def test_the_plot_shows_every_workload(tmp_path):
    found = figures(lambda row: 1.1)
    del found[rows()[0].name]
    grid = ratio_grid(found)
    assert len(grid["rows"]) == 33 + 6 + 2
    assert grid["columns"][:2] == ["dgrad", "wgrad BF16"]
    assert grid["values"][0][grid["columns"].index("forward")] is None
    plot_grid(grid, tmp_path / "grid.png", "title")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([]) == 1.0


def test_summary_names_ratios_and_spread():
    run = {"ours": [1.0] * 10, SAME_ARM: [1.0] * 10, "peer": [2.0] * 10}
    assert summary(run) == "ours 1000.0 us, peer 2000.0 (2.000, ours is faster), A/A 0.0 %"


@pytest.mark.gpu
def test_samples_follow_the_work():
    """Twice the work takes about twice the time, as a graph and eagerly; a captured call computes what it did."""
    from cake_shared.bench.gpu import Flush, captured, enqueue_microseconds, gpu_facts

    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    out = torch.empty_like(a)

    def once():
        torch.mm(a, a, out=out)

    def twice():
        once()
        once()

    expected = a @ a
    replay = captured(once)
    out.zero_()
    replay()
    assert torch.equal(out, expected)
    flush = Flush()
    for calls in ({"once": once, "twice": twice}, {"once": replay, "twice": captured(twice)}):
        taken = sample(calls, groups=10, flush=flush)
        assert set(taken) == {"once", SAME_ARM, "twice"}
        ratio = sorted(taken["twice"])[5] / sorted(taken["once"])[5]
        assert 1.6 < ratio < 2.4, summary(taken)
    assert 0 < enqueue_microseconds(once, calls=20, tries=3) < 1000
    assert set(gpu_facts()) >= {"driver", "sm_clock", "throttle_reasons"}
