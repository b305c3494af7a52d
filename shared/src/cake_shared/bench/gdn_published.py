"""Times of the gated delta rule that others published for another GPU, beside ours."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cake_shared.bench.gdn_gpu import OPERATIONS, title
from cake_shared.bench.gpu import geometric_mean
from cake_shared.bench.result import Table
from cake_shared.workloads import GdnWorkload


@dataclass(frozen=True)
class Published:
    """A CSV file with the columns beta_dtype, workload, heads_h_hv, op and `column`, in milliseconds.

    Attributes
    ----------
    path : pathlib.Path
        Of the file.
    gpu : str
        That its times were taken on.
    column : str
        Whose times to compare with.
    """

    path: Path
    gpu: str
    column: str

    def milliseconds(self) -> dict[tuple[str, str, str], float]:
        """Times by `workload, H/HV` as a title has it, dtype of beta and operation."""
        with self.path.open(newline="") as file:
            return {
                (f"{line['workload']}, {line['heads_h_hv']}", line["beta_dtype"], line["op"]): float(line[self.column])
                for line in csv.DictReader(file)
            }

    def table(self, cases: dict[str, dict], workloads: Sequence[GdnWorkload], beta: str, ours: str) -> Table | None:
        """One row a workload: our graph replay, the published time and its ratio to ours; None without such cases."""
        theirs = self.milliseconds()
        columns, rows, ratios = ["workload, H/HV"], [], {op: [] for op in OPERATIONS}
        for operation in OPERATIONS:
            columns += [f"{operation} ms", f"{operation} {self.gpu} ms", f"{operation} {self.gpu} over ours"]
        for workload in workloads:
            row, known = [title(workload)], False
            for operation in OPERATIONS:
                case = cases.get(f"{title(workload)} | {beta} | {operation} | graph")
                other = theirs.get((title(workload), beta, operation))
                mine = case["median_ms"][ours] if case else None
                row += [f"{mine:.3f}" if case else "not measured", f"{other:.3f}" if other else "not published"]
                if case and other:
                    known = True
                    ratios[operation].append(other / mine)
                    ratio = f"{other / mine:.2f}"
                    row.append(ratio if mine <= other else f"**{ratio}**")
                else:
                    row.append("")
            if known:
                rows.append(row)
        if not rows:
            return None
        rows.append(["geometric mean"])
        for operation in OPERATIONS:
            rows[-1] += ["", "", f"{geometric_mean(ratios[operation]):.2f}" if ratios[operation] else ""]
        note = (
            f"Graph replay, beside the times published for the deterministic package on one {self.gpu}: another GPU "
            "and other programs, not a peer of the same run. Bold where ours takes longer."
        )
        return Table(f"Beside times published for a {self.gpu}, {beta} beta", columns, rows, note, beta == "FP32")
