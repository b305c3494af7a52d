"""The GPU bench of the gated delta rule, as far as a CPU can run it: reference, checks, digests, tables, options."""

import dataclasses
from pathlib import Path

import pytest
import torch

from cake_shared.bench import gdn_peers
from cake_shared.bench.gdn_bench import GdnBench
from cake_shared.bench.gdn_check import check_arms
from cake_shared.bench.gdn_gpu import Call, make_tensors
from cake_shared.bench.gdn_oracle import float64_rule
from cake_shared.bench.gdn_peers import GdnArm, installed_peers
from cake_shared.bench.gdn_published import Published
from cake_shared.bench.gdn_report import digest, floor_ms, memory_table, plotted, summary_table, time_table
from cake_shared.bench.result import Result, Table
from cake_shared.bench.timing import SAME_ARM
from cake_shared.testing import assert_bitwise_equal, assert_near
from cake_shared.testing.gdn_inputs import GATES, base, packed, states
from cake_shared.testing.gdn_reference import reference, widened
from cake_shared.testing.gdn_run import run
from cake_shared.workloads import GDN, GdnWorkload, gdn_workload

SMALL = GdnWorkload("small", 1, 2, (70, 33))


def arm(name, rule=float64_rule, **changes):
    return dataclasses.replace(GdnArm(name, rule, torch.int64, "1"), **changes)


@pytest.mark.parametrize("gate", GATES)
def test_the_reference_is_the_recurrence(gate):
    case = packed(base(140, 1, 2, K=16, V=16, gate=gate), (70, 0, 65))
    h0, ds = states(case, 3)
    case = case.with_(initial_state=h0, d_state=ds)
    results, expected = run(float64_rule, widened(case)), reference(case)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state"):
        if name == "dg" and gate == "Gtiny":  # e^-26 of the others: what cancels decides its digits
            assert float((results[name] - expected[name]).abs().max()) < 1e-14
            continue
        assert_near(results[name], expected[name], 1e-12, name)


def test_the_reference_of_a_batch():
    case = base(70, 2, 4, B=2, K=16, V=16)
    results, expected = run(float64_rule, widened(case)), reference(case)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert_near(results[name], expected[name], 1e-12, name)


def rounded(*tensors, **keywords):
    o, state = float64_rule(*tensors, **keywords)
    return o.to(tensors[2].dtype), state


def test_right_arms_are_timed_and_wrong_ones_are_not():
    def late(*tensors, **keywords):
        o, state = rounded(*tensors, **keywords)
        return o.roll(1, 1), state

    def broken(*tensors, **keywords):
        raise ValueError("out of order")

    arms = [arm("ours", rounded), arm("right", rounded), arm("late", late), arm("broken", broken)]
    checks, admitted = check_arms(arms, SMALL, make_tensors(SMALL, torch.float32, device="cpu"))
    assert admitted == ["ours", "right"]
    assert max(checks["ours"].values()) < 3e-3
    assert checks["late"]["o"] > 0.5
    assert "out of order" in checks["broken"]["failed"]


def test_nothing_is_timed_when_ours_is_wrong_or_moves_its_bits():
    tensors = make_tensors(SMALL, torch.float32, device="cpu")

    def scaled(*inputs, **keywords):
        o, state = rounded(*inputs, **keywords)
        return o * 1.1, state

    with pytest.raises(RuntimeError, match="small, 1/2: ours has errors"):
        check_arms([arm("ours", scaled)], SMALL, tensors)
    calls = []

    def drifting(*inputs, **keywords):
        o, state = rounded(*inputs, **keywords)
        calls.append(None)
        return o * (1.0 + 2.5e-3 * (len(calls) % 2)), state

    with pytest.raises(RuntimeError, match="ours has other bits on a repeat in o"):
        check_arms([arm("ours", drifting)], SMALL, tensors)


def test_all_operations_are_one_function():
    tensors = make_tensors(SMALL, torch.bfloat16, device="cpu")
    both, again, o = (Call(arm("ours", rounded), name, tensors)() for name in ("fwd+bwd", "ckpt", "fwd"))
    for one, other in zip(both, again, strict=True):
        assert_bitwise_equal(one, other)
    assert_bitwise_equal(o, both[0])
    assert not o.requires_grad


def test_an_eager_call_has_offsets_of_its_own():
    seen = []

    def rule(*inputs, cu_seqlens, **keywords):
        seen.append(cu_seqlens)
        return rounded(*inputs, cu_seqlens=cu_seqlens, **keywords)

    call = Call(arm("ours", rule), "fwd", make_tensors(SMALL, torch.float32, device="cpu"))
    for step in (call.reuse, call.reuse, call.renew, call.renew):
        step()
        call()
    assert seen[0] is seen[1]
    assert len({id(x) for x in seen}) == 3
    assert all(x.tolist() == [0, 70, 103] for x in seen)


KEY = "small, 1/2 | FP32 | fwd | graph"


def samples(**medians):
    names = {"ours": medians["ours"], SAME_ARM: medians["ours"], **{n: x for n, x in medians.items() if n != "ours"}}
    return {KEY: {"events": {name: [x, 1.01 * x, 0.99 * x, x, x] for name, x in names.items()}}}


def test_a_digest_compares_what_both_processes_have():
    found = digest([samples(ours=1.0, fast=0.5, slow=2.0, lost=1.0), samples(ours=1.0, fast=0.5, slow=2.0)], "ours")
    case = found[KEY]
    assert case["ratio_to_ours"] == pytest.approx({"ours": 1.0, SAME_ARM: 1.0, "fast": 0.5, "slow": 2.0})
    assert case["verdict"] == {"fast": "ours is slower", "slow": "ours is faster"}
    assert (case["samples"], case["orders"]) == (10, 2)
    assert digest([{}, samples(ours=1.0, fast=0.5)], "ours")[KEY]["orders"] == 1
    assert "lost" not in case["median_ms"]


def test_tables_mark_what_is_slower_or_no_different():
    found = digest([samples(ours=1.0, fast=0.5, slow=2.0, equal=1.0)] * 2, "ours")
    table = time_table(found, [SMALL], "FP32", "graph", "ours", True)
    assert table.columns == ["workload, H/HV", "fwd ms", "fwd fast", "fwd slow", "fwd equal", "fwd over floor"]
    assert table.rows[0][:5] == ["small, 1/2", "1.000", "**0.50**", "2.00", "1.00 ="]
    assert time_table(found, [SMALL], "BF16", "graph", "ours", True) is None
    rows = {row[1]: row[2:4] for row in summary_table(found, "ours").rows}
    assert rows == {"fast": ["0.50", "1 of 1"], "slow": ["2.00", "0 of 1"], "equal": ["1.00", "1 of 1"]}


def test_an_arm_has_columns_only_where_it_takes_part():
    graph, eager = (
        digest([samples(ours=1.0, **arms)] * 2, "ours")[KEY] for arms in ({"twin": 1.0, "slow": 2.0}, {"slow": 2.0})
    )
    cases = {KEY: graph, KEY.replace("| graph", "| eager"): eager}
    assert time_table(cases, [SMALL], "FP32", "graph", "ours", True).columns[1:4] == ["fwd ms", "fwd twin", "fwd slow"]
    assert time_table(cases, [SMALL], "FP32", "eager", "ours", True).columns[1:] == ["fwd ms", "fwd slow"]


def test_the_plot_has_a_field_for_every_workload_operation_and_peer():
    grid = plotted(digest([samples(ours=1.0, FLA=2.0, cake_gdn_train=1.0)] * 2, "ours"), [SMALL], "ours")
    assert grid["rows"] == ["small, 1/2"]
    assert grid["columns"][0] == "graph\nfwd\nFLA"
    assert grid["values"] == [[pytest.approx(2.0), None, None, None, None, None]]


def test_memory_names_arms_that_failed_and_marks_what_is_larger():
    sizes = {
        "a | FP32": {"ours": 2**30, "peer": 2**31},
        "b | FP32": {"ours": 2**29},
        "c | FP32": {"ours": 2**30, "peer": 2**29},
    }
    rows = memory_table(sizes, "FP32", True).rows
    assert rows == [["a", "1.000", "2.000"], ["b", "0.500", "failed"], ["c", "**1.000**", "0.500"]]


def test_the_floor_of_the_largest_workload():
    """0.43 ms of arithmetic forward and 1.8 ms with the backward: sums done by hand for H/HV 16/32."""
    workload = gdn_workload("16 x 4096", 32)
    assert floor_ms(workload, "fwd") == pytest.approx(0.43, abs=5e-3)
    assert floor_ms(workload, "fwd+bwd") == pytest.approx(1.775, abs=5e-3)
    assert floor_ms(workload, "ckpt") == floor_ms(workload, "fwd") + floor_ms(workload, "fwd+bwd")


def test_published_times_stand_beside_ours(tmp_path):
    """Ratios and their mean; what is slower is bold, what one side lacks is said; no table where nothing meets."""
    path = tmp_path / "published.csv"
    path.write_text(
        "beta_dtype,workload,heads_h_hv,op,theirs\n"
        'FP32,small,1/2,fwd,2.0\nFP32,small,1/2,ckpt,9.0\nFP32,"1, other",1/2,fwd,1.0\nBF16,small,1/2,fwd+bwd,3.0\n'
    )
    published = Published(path, "B200", "theirs")
    cases = {
        f"small, 1/2 | FP32 | {operation} | graph": {"median_ms": {"ours": ours}}
        for operation, ours in (("fwd", 4.0), ("fwd+bwd", 1.0), ("ckpt", 3.0))
    }
    table = published.table(cases, [SMALL], "FP32", "ours")
    assert table.rows == [
        ["small, 1/2", "4.000", "2.000", "**0.50**", "1.000", "not published", "", "3.000", "9.000", "3.00"],
        ["geometric mean", "", "", "0.50", "", "", "", "", "", "3.00"],
    ]
    assert published.table(cases, [SMALL], "BF16", "ours") is None


def test_every_published_time_is_of_a_workload():
    folder = Path(__file__).parents[2] / "packages" / "cake_gdn_det_train" / "benchmarks" / "results"
    times = Published(folder / "published_b200.csv", "B200", "deterministic_ms").milliseconds()
    assert {name for name, _, _ in times} == {f"{w.name}, {w.h}/{w.hv}" for w in GDN}
    assert len([key for key in times if key[1] == "FP32"]) == 3 * len(GDN)


def test_tables_of_a_result_are_made_again_from_its_figures(tmp_path):
    """What a table says comes from the data; those of findings stay."""
    work = GDN[0]
    group = f"{work.name}, {work.h}/{work.hv} | FP32"
    case = {
        "median_ms": {"ours": 1.0, SAME_ARM: 1.0, "FLA": 3.0},
        "ratio_to_ours": {"FLA": 3.0},
        "verdict": {"FLA": "ours is faster"},
        "orders": 1,
    }
    data = {
        "cases": {f"{group} | fwd | graph": case},
        "memory_bytes": {group: {"ours": 2**30, "FLA": 2**31}},
        "checks": {group: {"ours": {"o": 1e-3}, "FLA": {"o": 2e-3}}},
        "Host": {"a": 1},
    }
    path = tmp_path / "gpu.json"
    stale = [Table("Stale", ["a", "b"], [["x", "y"]]), Table("Host", ["call", "time"], [["a", "1"]])]
    Result("package", {"gpu": "some"}, stale, data).save(path)
    bench = GdnBench("package", Path(__file__), lambda names: [])
    assert bench.main(["--tables", str(path)]) == 0
    titles = [table.title for table in Result.load(path).tables]
    assert "Stale" not in titles
    assert titles[-1] == "Host"
    assert any(row[:3] == ["4 x 4096, 8/16", "1.000", "3.00"] for t in Result.load(path).tables for row in t.rows)
    assert "in one process, in one order" in Result.load(path).markdown("h200")


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([2, 2], "two processes with opposite orders"),
        ([1, 1], "one process, in one order"),
        ([2, 1], "of 1 of 2 cases"),
    ],
)
def test_a_note_says_in_which_processes_samples_were_taken(orders, said):
    cases = {
        f"{work.name}, {work.h}/{work.hv} | FP32 | fwd | graph": {
            "median_ms": {"ours": 1.0},
            "ratio_to_ours": {},
            "verdict": {},
            "orders": n,
        }
        for work, n in zip(GDN, orders, strict=False)
    }
    assert said in time_table(cases, GDN, "FP32", "graph", "ours", True).note


def test_tables_that_are_not_for_the_readme_stay_in_the_file(tmp_path):
    tables = [Table("Shown", ["a"], [["1"]]), Table("Detail", ["a", "b"], [["1", "2"]], readme=False)]
    result = Result("package", {}, tables)
    assert "Detail" not in result.markdown("h200")
    assert result.markdown("h200").startswith("<!-- bench-h200:begin -->")
    assert "Detail,1,b,2" in result.csv()
    result.save(tmp_path / "h200.json")
    assert Result.load(tmp_path / "h200.json") == result


def options(*words):
    return GdnBench("package", Path("/a/b/c/d/bench_gpu.py"), list)._parse(words)


def test_options_choose_cases():
    bench = GdnBench("package", Path("/a/b/c/d/bench_gpu.py"), list)
    assert len(bench.cases(options())) == len(GDN) * (3 * 2 + 2 + 3 * 2)
    chosen = bench.cases(options("--workloads", "4 x 4096, 8/16; 1/3", "--betas", "BF16", "--launches", "graph"))
    assert {case.key for case in chosen if case.operation == "fwd"} == {
        "4 x 4096, 8/16 | BF16 | fwd | graph",
        "11000 + 12000 + 9768, 1/3 | BF16 | fwd | graph",
    }
    with pytest.raises(ValueError, match="--betas: got 'FP8', takes some of FP32,BF16"):
        bench.cases(options("--betas", "FP8"))
    with pytest.raises(ValueError, match="--workloads: got 'nothing', fits none of 4 x 4096, 8/16"):
        bench.cases(options("--workloads", "nothing"))


def test_peers_that_do_not_import_are_named(monkeypatch):
    def broken():
        raise RuntimeError("no GPU\nhere")

    monkeypatch.setitem(gdn_peers.PEERS, "FLA", broken)
    assert installed_peers(("FLA",)) == ([], ["FLA is not measured: RuntimeError: no GPU here"])
