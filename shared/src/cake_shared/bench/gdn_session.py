"""One process's share of a GPU bench of the gated delta rule: checks, memory and samples of every case, in a budget."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cake_shared.bench.gdn_check import check_arms
from cake_shared.bench.gdn_gpu import BETAS, Call, make_tensors, peak_bytes, release, sample_eager, title
from cake_shared.bench.gdn_peers import GdnArm
from cake_shared.bench.gpu import Flush, captured, sample
from cake_shared.workloads import GdnWorkload

# Ours again under torch's deterministic switch: an arm of forward+backward.
DETERMINISTIC = "deterministic switch"
LEAST_GROUPS, MOST_GROUPS = 5, 25


@dataclass(frozen=True)
class Case:
    """A workload, the dtype of beta, an operation and a way to launch, as in `gdn_gpu`."""

    workload: GdnWorkload
    beta: str
    operation: str
    launch: str

    @property
    def rank(self) -> tuple:
        """What is measured first: FP32 before BF16 before offsets that are kept; small workloads before large ones."""
        late = 2 if self.launch == "same" else int(self.beta != "FP32")
        return late, self.workload.tokens * self.workload.hv, self.key

    @property
    def weight(self) -> float:
        """What a sample of it takes, roughly: getting ready, and what grows with the tokens."""
        return 1.0 + self.workload.tokens * self.workload.hv / 2**19

    @property
    def key(self) -> str:
        """`workload, H/HV | beta | operation | launch`."""
        return " | ".join([title(self.workload), self.beta, self.operation, self.launch])


@dataclass
class Session:
    """What one process found.

    Attributes
    ----------
    arms : sequence of GdnArm
        Ours first.
    reverse : bool
        Whether arms run in the opposite order in every group.
    admitted : dict
        Names of the arms to time, by `workload, H/HV | beta`.
    checks, memory_bytes : dict
        Errors, and peak bytes of forward+backward, by the same key and arm; filled where the checks are made.
    failures : list of str
        A sentence for every arm that could not run a case.
    """

    arms: Sequence[GdnArm]
    reverse: bool = False
    admitted: dict[str, list[str]] = field(default_factory=dict)
    checks: dict[str, dict] = field(default_factory=dict)
    memory_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def prepare(self, cases: Sequence[Case], check: bool):
        """First calls of every arm on every workload and dtype of beta: kernels are compiled or loaded here.

        With `check` the arms are checked, those that pass are admitted, and their peaks of memory are taken.
        """
        groups = dict.fromkeys((case.workload, case.beta) for case in sorted(cases, key=lambda case: case.rank))
        for workload, beta in groups:
            group = f"{title(workload)} | {beta}"
            release()
            tensors = make_tensors(workload, BETAS[beta])
            if check:
                self._check(workload, group, tensors)
            for arm in self.arms:
                if check and arm.name not in self.admitted[group]:
                    continue
                try:
                    for operation in ("fwd",) if check else ("fwd", "fwd+bwd"):
                        Call(arm, operation, tensors)()
                except Exception as problem:  # said by the process that checks, and when it is to be timed
                    print(f"{group}: {arm.name}: {problem!r}"[:400], file=sys.stderr, flush=True)
        torch.cuda.synchronize()
        release()

    def run(self, cases: Sequence[Case], seconds: float, most_seconds: float) -> dict[str, dict]:
        """Samples by case key: `{"events": {arm: ms}, "walls": {arm: ms}}`, no walls for graphs.

        Each case gets its share of what is left of the budget by its weight, within 5 to 25 groups; what has not begun
        after `most_seconds` is left out, and said.
        """
        flush = Flush()
        begin = time.monotonic()
        found: dict[str, dict] = {}
        ordered = sorted(cases, key=lambda case: case.rank)
        weights = [case.weight for case in ordered]
        tensors, held = None, ""
        for place, case in enumerate(ordered):
            if time.monotonic() - begin > most_seconds:
                self._note(f"{len(ordered) - place} cases are left out for want of time, the first is {case.key}")
                break
            group = f"{title(case.workload)} | {case.beta}"
            if held != group:
                tensors = None
                release()
                tensors, held = make_tensors(case.workload, BETAS[case.beta]), group
            left = max(begin + seconds - time.monotonic(), 0.0)
            share = left * case.weight / sum(weights[place:])
            found[case.key] = self._time(case, tensors, self.admitted[group], share, flush)
        return found

    def _check(self, workload: GdnWorkload, group: str, tensors):
        self.checks[group], self.admitted[group] = check_arms(self.arms, workload, tensors)
        release()
        self.memory_bytes[group] = {}
        for arm in self.arms:
            if arm.name in self.admitted[group]:
                self.memory_bytes[group][arm.name] = peak_bytes(arm, tensors)
            else:
                self._note(f"{group}: {arm.name} is not timed: {self.checks[group][arm.name]}")

    def _time(self, case: Case, tensors, names: list[str], share: float, flush: Flush) -> dict:
        started = time.monotonic()
        plain = case.launch == "graph" and case.beta == "FP32"
        timed = [arm for arm in self.arms if arm.name in names and (plain or not arm.sparing)]
        calls = {arm.name: Call(arm, case.operation, tensors) for arm in timed}
        ours = self.arms[0]
        if case.operation == "fwd+bwd" and case.beta == "FP32" and case.launch != "same":
            calls[DETERMINISTIC] = Call(ours, case.operation, tensors, deterministic=True)
        ready, group_seconds = {}, 0.0
        for name, call in calls.items():
            try:
                ready[name], taken = self._prepare(call, case.launch)
            except Exception as problem:
                if name == ours.name:
                    raise
                self._note(f"{case.key}: {name} failed: {problem!r}")
                continue
            group_seconds += taken * (2 if name == ours.name else 1)
        left = share - (time.monotonic() - started)
        groups = int(max(LEAST_GROUPS, min(MOST_GROUPS, left / (group_seconds + 3e-4 * len(ready)))))
        if case.launch == "graph":
            return {"events": sample(ready, groups=groups, reverse=self.reverse, warm=1, flush=flush)}
        events, walls = sample_eager(ready, groups, self.reverse, flush, case.launch == "eager")
        return {"events": events, "walls": walls}

    @staticmethod
    def _prepare(call: Call, launch: str):
        """Warms a call up; returns what to sample and the seconds that one takes."""
        with call.surroundings():
            call()
            prepared = captured(call, warm=1) if launch == "graph" else call
            torch.cuda.synchronize()
            begin = time.monotonic()
            prepared()
            torch.cuda.synchronize()
        return prepared, time.monotonic() - begin

    def _note(self, sentence: str):
        self.failures.append(" ".join(sentence.split())[:400])
        print(self.failures[-1], file=sys.stderr, flush=True)
