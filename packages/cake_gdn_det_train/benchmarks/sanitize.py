"""Runs small forwards and backwards under compute-sanitizer's four tools, side by side, and writes what they said.

    python packages/cake_gdn_det_train/benchmarks/sanitize.py --write

The parts launch every program: packs with empty and ragged sequences, both widths of the chains, every option,
segments; once by the programs of this GPU's records, and where some of them are native once more by portable programs
alone, which serve every architecture. Each part under each tool is a process of its own; racecheck and synccheck look
at the kernels of the set, not at torch's. Each tensor has an allocation
of its own, so that a tool sees where one ends and which was written. Nothing that a tool says is left out: its reports
are counted by the places in the source that they name. The result is written whenever a process ends.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared import jit
from cake_shared.bench.environment import commit
from cake_shared.bench.gdn_bench import gpu_name
from cake_shared.bench.gpu import gpu_facts
from cake_shared.bench.result import write_whole
from cake_shared.gdn.cuda.rule import uses_native
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.gdn_cuda import moved, portable_backend, rule_through
from cake_shared.testing.gdn_inputs import GdnCase, base, packed, states
from cake_shared.testing.gdn_run import run
from cake_shared.testing.sanitizer import TOOLS, WORDS, ToolRun, ToolSaid, run_side_by_side, version_of

PACKAGE = "cake_gdn_det_train"
WIDE, NARROW = 3, 1000  # multiprocessors that the plan counts with: chains of 8 or of 4 warps
NOTE = (
    "Of native programs racecheck reports pairs of accesses: behind one of them stand __syncwarp and the arrival of "
    "one lane at an mbarrier, before the other a wait for it. The tool seems to follow the arriving lane's accesses "
    "alone: of 64 sums that lanes write once and another warp reads once it reports 56. The pairs are listed by the "
    "places that they name. The other evidence is the emulator's: its detector follows mbarriers, bulk copies, wgmma "
    "and proxy fences from warp to warp, and finds no race in these programs under any order tried; it takes the "
    "lanes of a warp as ordered. initcheck sees the stores of bulk copies from version 2025.4 of compute-sanitizer "
    "on."
)


def _pack() -> GdnCase:
    case = packed(base(140, 1, 2), (70, 0, 65))
    h0, ds = states(case, 3)
    return case.with_(initial_state=h0, d_state=ds)


def _options() -> GdnCase:
    case = base(70, 2, 6)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-0.5, 1.0, 6),
        "dt_bias": torch.linspace(-0.3, 0.3, 6),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    return case.with_(options=options, beta=case.beta.bfloat16())


def _segments() -> GdnCase:
    case = packed(base(8193 + 66, 1, 1), (8193, 66))
    h0, ds = states(case, 2)
    return case.with_(initial_state=h0, d_state=ds)


PARTS = {
    "pack of 70, 0 and 65 tokens, 5 rows past them, wide chains": (_pack, WIDE, TOOLS),
    "the same, narrow chains": (_pack, NARROW, TOOLS),
    "every option, H/HV 2/6": (_options, NARROW, TOOLS),
    "segments: 8193 and 66 tokens, wide chains": (_segments, WIDE, TOOLS),
    "segments: the same, narrow chains": (_segments, NARROW, ("memcheck", "initcheck", "synccheck")),
}
# racecheck follows every access of shared memory by processors of the host, and a segmented sequence has 129 chunks of
# them: of its two widths it has one, and each of these stages, and all others together, are a process's own there.
LONG_STAGES = (
    "segment_pairs",
    "chunk_output",
    "segment_gradients",
    "value_gradients",
    "chunk_states",
    "token_gradients",
)


def program_sets(architecture: str) -> dict[str, list[str]]:
    """The programs by set: `portable` ones, and where some of the architecture's are native, those of its records."""
    programs = programs_of(PACKAGE)
    portable = {record.stage: record.program for record in programs.records if record.kind == "portable"}
    found = {"portable": [portable[stage] for stage in programs.stages]}
    if uses_native(PACKAGE, architecture):
        found["native"] = [record.program for record in programs.records_for(architecture)]
    return found


def launch(programs: str, part: str):
    """Forward and backward of one part."""
    begin = time.monotonic()
    make, multiprocessors, _ = PARTS[part]
    if programs == "portable":
        backend = portable_backend(PACKAGE)
        rule = rule_through(PACKAGE, backend)
    else:
        backend, rule = cuda.rule_backend(torch.device("cuda")), chunk_gated_delta_rule
    backend.multiprocessors = multiprocessors
    case = moved(make(), "cuda")
    torch.cuda.synchronize()
    print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
    run(rule, case)
    torch.cuda.synchronize()
    print(f"done after {time.monotonic() - begin:.1f} s", flush=True)


def must_find_nothing(programs: str, tool: str) -> bool:
    """Whether a report is a fault: of native programs racecheck reports what it does not follow, see NOTE."""
    return programs == "portable" or tool != "racecheck"


def is_long(tool: str, part: str) -> bool:
    """Whether the tool takes the longest for that part."""
    return tool == "racecheck" and part.startswith("segments")


def kernels_apart(programs: list[str], tool: str, part: str) -> dict[str, tuple[str, ...]]:
    """The kernels of each process for a part under a tool, by what its name adds to the part's; () for all kernels.

    Tools that follow global memory must see who else writes it; the others look at the programs alone, not at torch's.
    """
    if tool not in ("racecheck", "synccheck"):
        return {"": ()}
    if not is_long(tool, part):
        return {"": tuple(programs)}
    stages = {program.rsplit("_", 1)[0]: program for program in programs}
    apart = {f", {stage}": (stages[stage],) for stage in LONG_STAGES}
    return {**apart, ", other stages": tuple(stages[stage] for stage in stages if stage not in LONG_STAGES)}


def in_order(sets: dict[str, list[str]], tools: list[str]) -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    """Set, tool, part, what its name adds, kernels of every process: long ones first, then what must find nothing."""
    runs = [
        (name, tool, part, adds, kernels)
        for name, programs in sets.items()
        for tool in tools
        for part in PARTS
        if tool in PARTS[part][2]
        for adds, kernels in kernels_apart(programs, tool, part).items()
    ]
    return sorted(runs, key=lambda x: (not is_long(*x[1:3]), not must_find_nothing(*x[:2])))


class Findings:
    """What the tools have said so far, written when each of them ends."""

    def __init__(self, facts: dict, sets: dict[str, list[str]], path: Path | None):
        self.facts, self.path, self.begin = facts, path, time.monotonic()
        self.failed: list[str] = []
        self.sets = {
            name: {"programs": programs, "said": {}, "seconds": {}, "reports": {}} for name, programs in sets.items()
        }

    def add(self, run: ToolRun, said: ToolSaid):
        """Takes one process's outcome and writes the file."""
        programs, part = run.name
        here = self.sets[programs]
        here["said"].setdefault(run.tool, {})[part] = said.summary
        here["seconds"].setdefault(run.tool, {})[part] = said.seconds
        reports = here["reports"].setdefault(run.tool, {})
        for place, count in said.reports.items():
            reports[place] = reports.get(place, 0) + count
        if not said.nothing and must_find_nothing(programs, run.tool):
            self.failed.append(f"{run.tool} of {programs} programs, {part}: {said.summary}")
        print(f"{time.monotonic() - self.begin:5.1f} s  {programs}, {run.tool}, {part}: {said.summary}", flush=True)
        if self.path:
            write_whole(self.path, self.text())

    def text(self) -> str:
        """The result as it stands."""
        result = {**self.facts, "sets": self.sets, "failed": self.failed}
        return json.dumps({**result, "seconds": round(time.monotonic() - self.begin)}, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the summary in benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the summary to this file instead")
    parser.add_argument("--logs", type=Path, help="keep the tools' whole output in this folder")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {','.join(TOOLS)}")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="its program; default: the one on PATH")
    parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
    parser.add_argument("--seconds", type=float, default=100.0, help="what all processes together may take (100)")
    parser.add_argument("--each", type=float, default=90.0, help="what one process may take (90)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 4, help="processes at a time (one a core)")
    parser.add_argument("--only", default="", help="the parts whose names hold this")
    parser.add_argument("--launch", nargs=2, metavar=("SET", "PART"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(*options.launch)
        return 0
    target = target_of()
    sets = program_sets(target.name)
    for name in sets:  # before the tools, not under them
        manifest = json.loads(
            (jit.build_module(PACKAGE, target.name, portable=name == "portable") / "manifest.json").read_text()
        )
    facts = {
        "what": "compute-sanitizer on forward and backward, every allocation its own",
        "note": NOTE,
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": gpu_facts()["driver"],
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or commit(Path(__file__).resolve().parents[3]),
        "torch": torch.__version__,
        "nvcc": manifest["compiler"],
        "compute_sanitizer": version_of(options.sanitizer),
        "words": list(WORDS),
    }
    kept = Path(__file__).parent / "results" / f"sanitizer_{gpu_name()}.json"
    found = Findings(facts, sets, options.out or (kept if options.write else None))
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        parts = list(PARTS)
        runs = [
            ToolRun(
                (programs, part + adds),
                tool,
                (sys.executable, __file__, "--launch", programs, part),
                logs / f"{programs}-{tool}-{parts.index(part)}{adds.replace(', ', '-').replace(' ', '_')}.txt",
                kernels,
            )
            for programs, tool, part, adds, kernels in in_order(sets, options.tools.split(","))
            if options.only in part + adds
        ]
        run_side_by_side(
            runs,
            found.add,
            workers=options.workers,
            seconds=options.seconds,
            each=options.each,
            sanitizer=options.sanitizer,
            extra=WORDS,
        )
    print(found.text())
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
