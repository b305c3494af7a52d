"""Keeps what the tests said on a GPU: python tools/suite_result.py REPORT.xml [AGAIN.xml] [--out docs/tests_h200.json]

REPORT.xml is what `nox -s tests -- --junitxml REPORT.xml` leaves behind; this runs on the same machine, so that the
file names the GPU and the versions. What AGAIN.xml, of a later run, has counts instead, and the file says what the
first run had said of those tests; `--facts` takes GPU and versions from a result that was written there.
"""

import argparse
import datetime
import json
import platform
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import torch

import cake_shared
from cake_shared.bench.gdn_bench import describe_gpu
from cake_shared.bench.gpu import gpu_facts

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"^(packages\.\w+|shared|examples|tests)\b")


def outcome(case: ET.Element) -> str:
    """Passed, failed or skipped; what was expected to fail counts as skipped, as pytest reports it."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def result_of(cases: list[ET.Element]) -> dict:
    """Counts by outcome and by package, the names of failures, and skipped tests by reason."""
    counts, by_place, failures, reasons = Counter(), {}, [], Counter()
    for case in cases:
        found, name = outcome(case), case.get("classname", "")
        counts[found] += 1
        place = PLACE.match(name)
        package = place[1].removeprefix("packages.") if place else name or "at collection"
        by_place.setdefault(package, Counter())[found] += 1
        if found == "failed":
            failures.append(f"{name}::{case.get('name')}")
        if found == "skipped":
            reasons[case.find("skipped").get("message", "").removeprefix("Skipped: ")] += 1
    return {
        **{key: counts[key] for key in ("passed", "failed", "skipped")},
        "failures": failures,
        "skipped_because": dict(reasons.most_common()),
        "by_package": {place: dict(by_place[place]) for place in sorted(by_place)},
    }


def merged(first: list[ET.Element], again: list[ET.Element], why: str) -> tuple[list[ET.Element], dict]:
    """The cases with those that ran again in their second form, and what is to be said of these."""
    key = lambda case: (case.get("classname"), case.get("name"))  # noqa: E731
    latest = {key(case): case for case in again}
    before = Counter(outcome(case) for case in first if key(case) in latest)
    after = Counter(outcome(case) for case in again)
    said = {"tests": len(again), "first": dict(before), "then": dict(after), "why": why}
    known = {key(case) for case in first}
    return [latest.get(key(case), case) for case in first] + [c for c in again if key(c) not in known], said


def facts_here(options: argparse.Namespace) -> dict:
    """What ran, on which GPU and of which versions."""
    return {
        "what": "the tests of the repository on a machine with a GPU",
        "command": options.command,
        **describe_gpu(ROOT, options.commit),
        "driver": gpu_facts()["driver"],
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "cake_shared": cake_shared.__version__,
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    """Writes the result; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="pytest's JUnit file")
    parser.add_argument("again", type=Path, nargs="?", help="that of a later run of some of the tests")
    parser.add_argument("--why", default="", help="why they ran again")
    parser.add_argument("--facts", type=Path, help="a result that has GPU and versions, written on that machine")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "tests_h200.json")
    parser.add_argument("--command", default="nox -s tests", help="what was run, as a reader would type it")
    parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
    options = parser.parse_args()
    cases = list(ET.parse(options.report).getroot().iter("testcase"))
    if not cases:
        parser.error(f"{options.report} has no test case in it")
    extra = {}
    if options.again:
        cases, extra["ran_again"] = merged(cases, list(ET.parse(options.again).getroot().iter("testcase")), options.why)
    facts = json.loads(options.facts.read_text()) if options.facts else facts_here(options)
    result = {**facts, **result_of(cases), **extra}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.out}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
