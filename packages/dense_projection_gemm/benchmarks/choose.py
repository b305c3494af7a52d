"""Decides on this GPU which problems run a split program, and writes the package's measured.json.

Run in the package's folder of a checkout: python benchmarks/choose.py [--write]. A split program (the challenger) takes
a problem from the deterministic one only with proof, in one process and in a fresh one with the opposite order of arms:

- it wins by graph replay and eagerly: one-sided paired sign test below 0.05, median ratio below 0.99;
- beside a kernel that holds 8, 16 or 32 SMs, started before or after it, it is at most 3 % slower;
- the whole backward and the checkpointed step, where it is part of them, are at most 1.3 % slower.

Whatever is not proven, or was not measured, runs the deterministic program.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.bench.environment import commit
from cake_shared.bench.gemm import STEPS, Row, cell, function, in_turn, ours_arms, prepared
from cake_shared.bench.gpu import Flush, captured, gpu_facts, sample, sign_test
from cake_shared.bench.result import Result, Table
from cake_shared.target import target_of
from cake_shared.workloads import HEAD_PROJECTIONS, PROJECTIONS
from dense_projection_gemm import cuda_plan

PACKAGE = "dense_projection_gemm"
OPERATIONS = ("wgrad FP32", "wgrad BF16")
WHOLES = ("bwd", "2fwd+bwd")
HELD = (8, 16, 32)
GROUPS, SCREENING = 20, 6
WINS, BESIDE, WHOLE = 0.99, 1.03, 1.013
FREE = {"deterministic": False}
FREE_FAMILY = free.api._FREE

HOLD = r"""
extern "C" __global__ void hold(int ns) {
  __shared__ char room[16384];  // so that no program of a whole multiprocessor's shared memory fits beside it
  volatile char* touched = room;
  touched[threadIdx.x] = 0;
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < ns);
}
"""


class Holder:
    """Holds some SMs for a while, on a stream of its own, from the moment that the current stream is at now."""

    def __init__(self):
        self._kernel = torch.cuda._compile_kernel(HOLD, "hold")
        self._stream = torch.cuda.Stream()

    def ready(self):
        """Mark the moment."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def start(self, multiprocessors, nanoseconds):
        """Enqueue the hold."""
        with torch.cuda.stream(self._stream):
            self._kernel(grid=(multiprocessors, 1, 1), block=(64, 1, 1), args=[nanoseconds])

    def join(self):
        """Make the current stream wait for its end."""
        torch.cuda.current_stream().wait_stream(self._stream)


def problem_of(row):
    """The problem that the row's one step hands to the backend."""
    return prepared(det, row, row.operation, {}).plan.problem


def candidates(problem, multiprocessors):
    """Choices of the split plan worth a look: stage, whole units, pieces."""
    m = problem.n if problem.out_major == "m" else problem.m
    plan = cuda_plan.plan_split(problem, multiprocessors, "split_slim" if m <= 64 else "split_wide")
    found = {(plan.stage, plan.whole_units, plan.pieces), (plan.stage, plan.whole_units, plan.clusters)}
    if plan.whole_units >= plan.clusters:
        found.add((plan.stage, plan.whole_units - plan.clusters, plan.clusters))
    return sorted(found)


class Forced:
    """Makes `deterministic=False` run one choice for one problem, whatever measured.json says."""

    def __init__(self, architecture, multiprocessors):
        self._device = (architecture, multiprocessors)
        self._rows = {}
        cuda_plan.measured_rows = lambda: self._rows

    def set(self, problem, choice):
        key = tuple(getattr(problem, name) for name in cuda_plan.KEY)
        self._rows = {(*self._device, *key): dict(zip(("stage", "whole_units", "pieces"), choice))}
        cuda_plan.plan_measured.cache_clear()
        FREE_FAMILY.launcher.recipes.forget()


def arms(row, mode):
    """Challenger and incumbent on one row."""
    steps = STEPS[row.operation]
    made = {}
    for name, module, keywords in (("split", free, FREE), ("deterministic", det, {})):
        if mode == "graph":
            made[name] = captured(in_turn([prepared(module, row, step, keywords).launch for step in steps]))
        else:
            made[name] = in_turn([function(module, row, step, keywords) for step in steps])
    return made


def ratio_of(samples):
    """Median of the paired ratios, the challenger's time over the incumbent's, and the sign test's p."""
    pairs = list(zip(samples["split"], samples["deterministic"]))
    return statistics.median(a / b for a, b in pairs), sign_test([a < b for a, b in pairs])


def beside(row, holder, held, holder_first, reverse, flush, microseconds):
    """Median paired ratio beside a kernel that holds SMs, enqueued before or after the call."""
    calls = arms(row, "graph")
    names = list(calls)[::-1] if reverse else list(calls)
    nanoseconds = int(3000 * microseconds + 30000)
    taken = {name: [] for name in names}
    for _ in range(SCREENING):
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            holder.ready()
            if holder_first:
                holder.start(held, nanoseconds)
            begin.record()
            calls[name]()
            end.record()
            if not holder_first:
                holder.start(held, nanoseconds)
            holder.join()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return statistics.median(a / b for a, b in zip(taken["split"], taken["deterministic"]))


def screen(row, table, flush, multiprocessors):
    """The fastest choice of a row and its ratio; RuntimeError where one is wrong."""
    problem, best = problem_of(row), None
    for choice in candidates(problem, multiprocessors):
        table.set(problem, choice)
        error, limit = cell(row, [ours_arms(free, "split", FREE)]).check()["split"]
        if not error <= limit:
            raise RuntimeError(f"{row.name}: {choice} has error {error:.2g}, the limit is {limit:.2g}")
        ratio, _ = ratio_of(sample(arms(row, "graph"), groups=SCREENING, flush=flush))
        if best is None or ratio < best[1]:
            best = choice, ratio
    return best


def prove(row, reverse, flush, holder):
    """Every figure that the rule asks for, in one order of arms."""
    figures = {}
    for mode in ("graph", "eager"):
        taken = sample(arms(row, mode), groups=GROUPS, reverse=reverse, flush=flush)
        figures[mode], figures[f"{mode} p"] = ratio_of(taken)
        if mode == "graph":
            microseconds = 1e3 * statistics.median(taken["deterministic"])
    for held in HELD:
        for first in (True, False):
            name = f"beside {held} SMs, held {'before' if first else 'after'}"
            figures[name] = beside(row, holder, held, first, reverse, flush, microseconds)
    if row.operation == "wgrad FP32" and row.kind == "projection":
        for whole in WHOLES:
            for mode in ("graph", "eager"):
                taken = sample(arms(Row(row.workload, whole), mode), groups=GROUPS // 2, reverse=reverse, flush=flush)
                figures[f"{whole}, {mode}"], _ = ratio_of(taken)
    return figures


def objections(figures):
    """Why these figures prove nothing; empty where they prove that the challenger is faster."""
    found = []
    for mode in ("graph", "eager"):
        if not (figures[mode] < WINS and figures[f"{mode} p"] < 0.05):
            found.append(f"{mode}: {figures[mode]:.3f}, p {figures[f'{mode} p']:.3f}")
    for name, ratio in figures.items():
        if name.startswith("beside") and not ratio <= BESIDE:
            found.append(f"{name}: {ratio:.3f}")
        if name.startswith(WHOLES) and not ratio <= WHOLE:
            found.append(f"{name}: {ratio:.3f}")
    return found


def measure(order, chosen, only, seconds):
    """In the first order every row is screened, and the promising ones proven; in the second those in `chosen`.

    After so many seconds no further row is begun.
    """
    begin = time.monotonic()
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    table, flush, holder = Forced(target_of().name, multiprocessors), Flush(), Holder()
    answer = {}
    workloads = [(w, o) for w in PROJECTIONS for o in OPERATIONS] + [(w, "wgrad FP32") for w in HEAD_PROJECTIONS]
    for workload, operation in workloads:
        row = Row(workload, operation)
        if not any(text in row.name for text in only.split(";")) or time.monotonic() - begin > seconds:
            continue
        if order == "reverse":
            if row.name not in chosen:
                continue
            choice, screened = chosen[row.name]["choice"], chosen[row.name]["screened"]
        else:
            choice, screened = screen(row, table, flush, multiprocessors)
        entry = {"choice": choice, "screened": screened}
        if screened < WINS:
            problem = problem_of(row)
            table.set(problem, choice)
            entry["problem"] = {name: getattr(problem, name) for name in cuda_plan.KEY}
            entry["figures"] = prove(row, order == "reverse", flush, holder)
        answer[row.name] = entry
    return {"rows": answer, "facts": gpu_facts()}


def ask(order, chosen, options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        path.write_text(json.dumps(chosen))
        words = [sys.executable, __file__, "--child", order, "--request", str(path)]
        words += ["--only", options.only, "--seconds", str(options.seconds)]
        done = subprocess.run(words)
        if done.returncode:
            raise RuntimeError("the process that times failed")
        return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write measured.json and the result file")
    parser.add_argument("--only", default="", help="rows whose names contain one of these texts, separated by ;")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further row is begun")
    parser.add_argument("--out", type=Path, help="folder of the result file, instead of benchmarks/results")
    parser.add_argument("--commit", default="", help="commit of this tree, where git cannot say it")
    parser.add_argument("--child", choices=["forward", "reverse"], help=argparse.SUPPRESS)
    parser.add_argument("--request", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        chosen = json.loads(options.request.read_text())
        options.request.write_text(json.dumps(measure(options.child, chosen, options.only, options.seconds)))
        return
    first = ask("forward", {}, options)
    chosen = {name: e for name, e in first["rows"].items() if "figures" in e and not objections(e["figures"])}
    second = ask("reverse", chosen, options) if chosen else {"rows": {}, "facts": None}
    rows, verdicts, lines = [], {}, []
    for name, entry in first["rows"].items():
        reasons = objections(entry["figures"]) if "figures" in entry else ["not faster by more than 1 %"]
        again = second["rows"].get(name, {}).get("figures")
        if not reasons:
            reasons = [f"opposite order, {reason}" for reason in objections(again)]
        verdicts[name] = {**entry, "again": again, "objections": reasons}
        choice = dict(zip(("stage", "whole_units", "pieces"), entry["choice"]))
        lines.append(
            [
                name,
                f"{choice['stage']}, {choice['whole_units']} whole, {choice['pieces']} pieces",
                f"{entry['screened']:.3f}",
                "; ".join(reasons) or "the split program",
            ]
        )
        if not reasons:
            ratio = max(entry["figures"]["graph"], again["graph"])
            rows.append({**entry["problem"], **choice, "ratio": round(ratio, 4)})
    gpu = torch.cuda.get_device_name()
    name = gpu.split()[-1].lower()
    about = {
        "gpu": gpu,
        "architecture": target_of().name,
        "multiprocessors": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count,
        "date": datetime.date.today().isoformat(),
    }
    environment = {
        **about,
        **first["facts"],
        "torch": torch.__version__,
        "package": free.__version__,
        "twin": det.__version__,
        "commit": options.commit or commit(Path(__file__).resolve().parents[3]),
    }
    note = (
        "The fastest right choice of the split program, its time over the deterministic program's by graph replay "
        "(median of a few pairs), and what runs the problem: the split program, or what keeps it from that under the "
        "rule of benchmarks/choose.py."
    )
    columns = ["weight gradient", "split program", "time over the deterministic", "verdict"]
    table = Table(f"Split programs: {len(rows)} of {len(lines)} problems", columns, lines, note)
    result = Result(PACKAGE, environment, [table], {"rows": verdicts, "groups": GROUPS})
    print(result.text())
    if options.write:
        path = (options.out or Path(__file__).parent / "results") / f"choice_{name}.json"
        result.save(path)
        content = json.loads(cuda_plan.MEASURED.read_text())
        key = ("architecture", "multiprocessors")
        others = [d for d in content["devices"] if any(d[k] != about[k] for k in key)]
        content["devices"] = [*others, {**about, "result": f"benchmarks/results/choice_{name}.json", "rows": rows}]
        cuda_plan.MEASURED.write_text(text_of(content))


def text_of(content):
    """measured.json with one row a line."""
    devices = []
    for device in content["devices"]:
        head = json.dumps({name: value for name, value in device.items() if name != "rows"})[1:-1]
        rows = ",\n   ".join(json.dumps(row) for row in device["rows"])
        devices.append(f'  {{{head}, "rows": [\n   {rows}]}}')
    joined = ",\n".join(devices)
    return f'{{"what": {json.dumps(content["what"])},\n "devices": [\n{joined}]}}\n'


if __name__ == "__main__":
    main()
