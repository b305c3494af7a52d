"""Tables of the projection and router benches: one row a workload, one column an operation, and what they sum to."""

from collections.abc import Callable, Iterable

from cake_shared.bench.gemm import LIBRARY, STEPS, Row, rows
from cake_shared.bench.gpu import geometric_mean
from cake_shared.bench.result import Table

NARROW_COLUMNS = 64
_NO_VALUE = "not measured"


def ratio(found: dict, mode: str, arm: str = LIBRARY) -> float:
    """Time of an arm over ours."""
    return found[mode]["ratio_to_ours"][arm]


def entry(found: dict, mode: str) -> str:
    """Our time and the library's over it, marked where the A/A arm does not tell them apart."""
    ours = next(iter(found[mode]["median_us"].values()))
    mark = "~" if found[mode]["verdict"][LIBRARY] == "at parity" else ""
    return f"{ours:.1f} us, {mark}{ratio(found, mode):.2f}"


def workload_table(figures: dict, mode: str, kind: str, title: str, note: str = "") -> Table | None:
    """All workloads of a kind under all their operations; None where no cell of the kind was measured."""
    chosen = [row for row in rows() if row.kind == kind and row.name in figures]
    if not chosen:
        return None
    operations = list(dict.fromkeys(row.operation for row in chosen))
    lines: dict[str, dict[str, str]] = {}
    for row in chosen:
        lines.setdefault(row.workload.name, {})[row.operation] = entry(figures[row.name], mode)
    body = [[name, *(by.get(operation, _NO_VALUE) for operation in operations)] for name, by in lines.items()]
    return Table(title, ["workload", *operations], body, note)


def is_narrow(row: Row) -> bool:
    """Whether the projection writes few columns forward."""
    return row.kind == "projection" and row.workload.d_out <= NARROW_COLUMNS


def groups_of_rows() -> dict[str, Callable[[Row], bool]]:
    """What the summary takes together."""
    return {
        "projections and heads": lambda row: row.kind != "router",
        "projections, d_out above 64": lambda row: row.kind == "projection" and not is_narrow(row),
        "projections, d_out at most 64": is_narrow,
        **{
            f"projections, {operation}": (lambda row, o=operation: row.kind == "projection" and row.operation == o)
            for operation in STEPS
        },
        "heads": lambda row: row.kind == "heads",
        "router": lambda row: row.kind == "router",
    }


def summary_table(ratios: dict[str, dict[str, float]], verdicts: dict[str, list[str]], title: str, note: str) -> Table:
    """Geometric means and extremes of ratios by mode and row name, over the groups of `groups_of_rows`."""
    body = []
    for label, belongs in groups_of_rows().items():
        for mode, by_name in ratios.items():
            names = [row.name for row in rows() if belongs(row) and row.name in by_name]
            if not names:
                continue
            values = {name: by_name[name] for name in names}
            least = min(values, key=values.__getitem__)
            kinds = [verdicts[mode][name] for name in names] if verdicts else []
            counts = " / ".join(str(kinds.count(v)) for v in ("ours is faster", "at parity", "ours is slower"))
            body.append(
                [
                    label,
                    mode,
                    str(len(names)),
                    f"{geometric_mean(values.values()):.3f}",
                    f"{values[least]:.3f} ({least})",
                    f"{max(values.values()):.3f}",
                    counts,
                ]
            )
    columns = ["rows", "mode", "count", "geometric mean", "least", "largest", "faster / parity / slower"]
    return Table(title, columns, body, note)


def ratios_of(figures: dict, mode: str) -> dict[str, float]:
    """The library's time over ours of every measured row."""
    return {name: ratio(found, mode) for name, found in figures.items()}


def ratio_grid(figures: dict, mode: str = "graph") -> dict:
    """What `plot_grid` draws: the library's time over ours of every workload and operation."""
    columns: list[str] = []
    lines: dict[str, dict[str, float]] = {}
    for row in (row for row in rows() if row.name in figures):
        # The router's only weight gradient is FP32.
        column = "wgrad FP32" if row.operation == "wgrad" else row.operation
        columns += [column] if column not in columns else []
        lines.setdefault(row.workload.name, {})[column] = ratio(figures[row.name], mode)
    return {
        "label": f"{LIBRARY}'s time over ours, {mode}",
        "rows": list(lines),
        "columns": columns,
        "values": [[line.get(column) for column in columns] for line in lines.values()],
    }


def error_table(figures: dict, title: str = "Errors against float64") -> Table:
    """The largest relative L2 error of each kind of result, ours beside the library's."""
    lines: dict[tuple[str, str], list[float]] = {}
    for row in rows():
        checks = figures.get(row.name, {}).get("checks")
        if not checks:
            continue
        ours = next(value for arm, (value, _) in checks.items() if arm != LIBRARY)
        line = lines.setdefault((row.kind, row.operation), [0.0, 0.0])
        line[0], line[1] = max(line[0], ours), max(line[1], checks[LIBRARY][0])
    body = [[f"{kind}, {operation}", f"{a:.2e}", f"{b:.2e}"] for (kind, operation), (a, b) in lines.items()]
    return Table(title, ["result", "ours", LIBRARY], body, "Relative L2 error, the largest over the workloads.")


def published_table(published: Iterable[dict], figures: dict, gpu: str) -> Table:
    """Published graph times of other hardware beside ours on this GPU; rows that both have."""
    names = {"wgrad": "wgrad FP32", "bwd": "bwd", "2fwd+bwd": "2fwd+bwd"}
    body = []
    for line in published:
        if line["mode"] != "graph" or line["wgrad_out"] != "FP32":
            continue
        row = next(
            r
            for r in rows()
            if r.kind == "projection"
            and (r.workload.d_in, r.workload.d_out, r.workload.tokens)
            == tuple(int(line[k]) for k in ("d_in", "d_out", "tokens"))
            and r.operation == names[line["op"]]
        )
        if row.name not in figures:
            continue
        theirs, best = float(line["deterministic_us"]), float(line["best_library_us"])
        found = figures[row.name]["graph"]
        ours = next(iter(found["median_us"].values()))
        body.append(
            [
                row.name,
                line["sm_count"],
                f"{theirs:.1f} us, {best / theirs:.2f}",
                f"{float(line['nondeterministic_us']):.1f} us, {best / float(line['nondeterministic_us']):.2f}",
                f"{ours:.1f} us, {found['ratio_to_ours'][LIBRARY]:.2f}",
            ]
        )
    columns = ["row", "SMs there", "deterministic there", "non-deterministic there", f"deterministic, {gpu}"]
    note = (
        "Each with its best library's time over it, by graph replay. The published figures were taken on sm_107a GPUs "
        f"with that many SMs, ours on one {gpu}: compare ratios, not times."
    )
    return Table("Published figures of another GPU", columns, body, note)
