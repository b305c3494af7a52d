"""Tables of a GPU bench of the gated delta rule, from the samples of two processes."""

from collections.abc import Sequence

from cake_shared.bench.gdn_gpu import LAUNCHES, OPERATIONS, title
from cake_shared.bench.gdn_peers import PEERS
from cake_shared.bench.gdn_session import DETERMINISTIC
from cake_shared.bench.gpu import geometric_mean
from cake_shared.bench.result import Table
from cake_shared.bench.timing import SAME_ARM, compare
from cake_shared.plan import CHUNK_TOKENS
from cake_shared.workloads import GdnWorkload

GIB = 2**30
LAUNCH_NAMES = {
    "graph": "graph replay",
    "eager": "eager, new cu_seqlens each call",
    "same": "eager, the same cu_seqlens tensor",
}

# Of one H200, as measured: BF16 products on random data, and a copy, bytes read plus written.
PRODUCTS_PER_SECOND, BYTES_PER_SECOND = 720e12, 4.3e12


def floor_ms(workload: GdnWorkload, operation: str) -> float:
    """What the arithmetic and the bytes of a workload take at the least on an H200, in milliseconds.

    A 64-token chunk of one value head at K = V = 128 needs 8.4 MFLOP forward and its share of the group's two
    64 x 64 products; forward+backward 36.9 MFLOP and twice that share. Bytes are those of the inputs and results, each
    once a direction. ckpt is a forward more.
    """
    if operation == "ckpt":
        return floor_ms(workload, "fwd") + floor_ms(workload, "fwd+bwd")
    ratio = workload.hv // workload.h
    chunks = sum(-(-n // CHUNK_TOKENS) for n in workload.seqlens_tokens) * workload.hv
    row, both = 64 * 128 * 2, operation == "fwd+bwd"
    flop = 36.9e6 + 4.2e6 / ratio if both else 8.4e6 + 2.1e6 / ratio
    rows = (5 + 6 / ratio) if both else (2 + 2 / ratio)  # forward v, o, q, k; backward v, dO, dv, q, k, dq, dk
    return 1e3 * chunks * max(flop / PRODUCTS_PER_SECOND, rows * row / BYTES_PER_SECOND)


def digest(runs: Sequence[dict[str, dict]], ours: str) -> dict[str, dict]:
    """By case key: medians, quartiles, ratios to ours, the spread of ours against itself, verdicts, walls, samples."""
    found = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        taken = [run[key] for run in runs if key in run]
        arms = set.intersection(*(set(run["events"]) for run in taken))
        result = compare(ours, [{name: run["events"][name] for name in run["events"] if name in arms} for run in taken])
        merged = {name: sorted(x for run in taken for x in run["events"][name]) for name in result.median_ms}
        case = {
            "median_ms": _rounded(result.median_ms),
            "quartiles_ms": {name: [x[len(x) // 4], x[-1 - len(x) // 4]] for name, x in merged.items()},
            "ratio_to_ours": _rounded(result.ratio_to_ours),
            "same_arm_spread": round(result.same_arm_spread, 5),
            "verdict": result.verdict,
            "samples": len(merged[ours]),
            "orders": len(taken),
        }
        if "walls" in taken[0]:
            walls = compare(ours, [{n: run["walls"][n] for n in run["walls"] if n in arms} for run in taken])
            case["wall_median_ms"] = _rounded(walls.median_ms)
        found[key] = case
    return found


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{x:.5g}") for name, x in figures.items()}


def peers_of(cases: dict[str, dict], ours: str) -> list[str]:
    """Arms beside ours, in the order in which they appear."""
    return list(dict.fromkeys(n for c in cases.values() for n in c["median_ms"] if n not in (ours, SAME_ARM)))


def _processes(orders: list[int]) -> str:
    """In which processes the samples of cases were taken, each of which had so many orders of the arms."""
    if min(orders) > 1:
        return "two processes with opposite orders"
    if max(orders) == 1:
        return "one process, in one order"
    return f"two processes with opposite orders, of {orders.count(1)} of {len(orders)} cases in one order alone"


def time_table(
    cases: dict[str, dict], workloads: Sequence[GdnWorkload], beta: str, launch: str, ours: str, readme: bool
) -> Table | None:
    """One row a workload: our milliseconds, each peer's over ours, ours over the floor; None without such cases."""
    # An arm that takes no part in this launch or dtype has no column, one that failed in some cells says so there.
    shown = {key: case for key, case in cases.items() if f" | {beta} | " in key and key.endswith(f" | {launch}")}
    peers = [name for name in peers_of(shown, ours) if name != DETERMINISTIC]
    columns, rows = ["workload, H/HV"], []
    operations = [op for op in OPERATIONS if any(f"| {beta} | {op} | {launch}" in key for key in cases)]
    for operation in operations:
        columns += [f"{operation} ms", *(f"{operation} {peer}" for peer in peers)]
        columns += [f"{operation} over floor"] * (launch == "graph")
    measured = [w for w in workloads if any(f"{title(w)} | {beta} | {op} | {launch}" in cases for op in operations)]
    for workload in measured:
        row = [title(workload)]
        for operation in operations:
            case = cases.get(f"{title(workload)} | {beta} | {operation} | {launch}")
            if case is None:
                row += ["not measured"] * (1 + len(peers) + (launch == "graph"))
                continue
            row.append(f"{case['median_ms'][ours]:.3f}")
            row += [_ratio(case, peer) for peer in peers]
            if launch == "graph":
                row.append(f"{case['median_ms'][ours] / floor_ms(workload, operation):.2f}")
        rows.append(row)
    if not operations:
        return None
    orders = [case["orders"] for case in shown.values()]
    note = (
        "Our milliseconds, then each peer's time over ours (= where our own spread does not tell them apart, bold "
        f"where ours is slower). Medians of samples taken in turn in {_processes(orders)}, L2 cold."
    )
    if len(measured) < len(workloads):
        note += f" Of {len(workloads)} workloads the other {len(workloads) - len(measured)} were not timed."
    if launch == "graph":
        note += " The floor is the larger of arithmetic at 720 TFLOP/s and bytes at 4.3 TB/s."
    return Table(f"Time with {beta} beta, {LAUNCH_NAMES[launch]}", columns, rows, note, readme)


def _ratio(case: dict, peer: str) -> str:
    if peer not in case["ratio_to_ours"]:
        return "failed"
    text = f"{case['ratio_to_ours'][peer]:.2f}"
    marks = {"at parity": f"{text} =", "ours is slower": f"**{text}**"}
    return marks.get(case["verdict"][peer], text)


def summary_table(cases: dict[str, dict], ours: str) -> Table:
    """Geometric means over the workloads of each peer's time over ours, and in how many cells ours is not faster."""
    peers = peers_of(cases, ours)
    columns, rows = ["beta, launch", "arm"], []
    columns += [text for operation in OPERATIONS for text in (operation, f"{operation}: not faster")]
    betas = list(dict.fromkeys(key.split(" | ")[1] for key in cases))
    for beta in betas:
        for launch in LAUNCHES:
            for peer in peers:
                row = [f"{beta}, {LAUNCH_NAMES[launch]}", peer]
                for operation in OPERATIONS:
                    suffix = f"| {beta} | {operation} | {launch}"
                    found = [c for key, c in cases.items() if key.endswith(suffix) and peer in c["ratio_to_ours"]]
                    if not found:
                        row += ["", ""]
                        continue
                    row.append(f"{geometric_mean(c['ratio_to_ours'][peer] for c in found):.2f}")
                    slow = sum(c["verdict"][peer] != "ours is faster" for c in found)
                    row.append(f"{slow} of {len(found)}")
                if any(row[2:]):
                    rows.append(row)
    note = (
        "Geometric mean over the timed workloads of an arm's time over ours, and cells in which ours is not "
        f"faster than it. The arm '{DETERMINISTIC}' is ours under torch.use_deterministic_algorithms(True): its bits "
        "were compared with those without it in every workload."
    )
    return Table("Peers' time over ours, over the timed workloads", columns, rows, note)


def memory_table(memory: dict[str, dict[str, int]], beta: str, readme: bool) -> Table:
    """Peak memory of forward+backward, one row a workload."""
    kept = {key.rsplit(" | ", 1)[0]: by for key, by in memory.items() if key.endswith(f"| {beta}")}
    arms = list(dict.fromkeys(name for by in kept.values() for name in by))
    rows = []
    for title_, by in kept.items():
        texts = [f"{by[a] / GIB:.3f}" if a in by else "failed" for a in arms]
        if any(by[arms[0]] > size for size in by.values()):
            texts[0] = f"**{texts[0]}**"
        rows.append([title_, *texts])
    note = (
        "GiB allocated by forward+backward at its peak beyond the inputs, less the gradients that stay; ours is bold "
        "where another takes less."
    )
    return Table(f"Peak memory with {beta} beta", ["workload, H/HV", *arms], rows, note, readme)


def check_table(checks: dict[str, dict]) -> Table:
    """The largest error of each arm and result over the workloads."""
    worst: dict[str, dict[str, float]] = {}
    for by_arm in checks.values():
        for arm, errors in by_arm.items():
            for name, error in errors.items():
                if isinstance(error, float):
                    row = worst.setdefault(arm, {})
                    row[name] = max(error, row.get(name, 0.0))
    names = list(next(iter(worst.values())))
    rows = [[arm, *(f"{errors.get(name, float('nan')):.2e}" for name in names)] for arm, errors in worst.items()]
    note = (
        "The largest relative L2 error against float64 over all workloads, on the shortest sequence and the last value "
        "group of each; what was above its limit was not timed."
    )
    return Table("Errors of the timed calls", ["arm", *names], rows, note)


def plotted(cases: dict[str, dict], workloads: Sequence[GdnWorkload], ours: str) -> dict:
    """What the plot of a result shows: peers' times over ours with FP32 beta, graph replay and eager."""
    peers = [name for name in peers_of(cases, ours) if name in PEERS]
    columns = [(launch, op, peer) for launch in ("graph", "eager") for op in OPERATIONS for peer in peers]

    def ratio(workload, launch, operation, peer):
        case = cases.get(f"{title(workload)} | FP32 | {operation} | {launch}", {})
        return case.get("ratio_to_ours", {}).get(peer)

    return {
        "rows": [title(workload) for workload in workloads],
        "columns": [f"{launch}\n{operation}\n{peer}" for launch, operation, peer in columns],
        "values": [[ratio(workload, *column) for column in columns] for workload in workloads],
        "label": "peer's time over ours, FP32 beta",
    }
