"""Keeps what the root README says of packages and of the quickstart equal to records and the runs kept in docs/."""

import argparse
import json
import re
import sys
from pathlib import Path

from cake_shared.bench.result import write_whole
from cake_shared.program import programs_of
from cake_shared.target import TARGETS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
# Report and plot of the run that is shown, on a CPU and on a GPU; the second may be missing.
RUNS = {"cpu": ("docs/quickstart.json", "docs/loss.png"), "gpu": ("docs/quickstart_gpu.json", "docs/loss_gpu.png")}
STRENGTH = ("measured", "emulated", "compiled")


def package_table() -> str:
    """One row a package: what it is, its version, and for each architecture how many stages have a program."""
    lines = ["| package | version | what it is | " + " | ".join(TARGETS) + " |", "|---" * (3 + len(TARGETS)) + "|"]
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        name = project.parent.name
        text = project.read_text()
        description = re.search(r'^description = "(.*)"$', text, re.MULTILINE)[1]
        version = re.search(r'"(.*)"', (project.parent / "src" / name / "_version.py").read_text())[1]
        cells = [architecture_cell(name, architecture) for architecture in TARGETS]
        lines.append(f"| [{name}](packages/{name}/README.md) | {version} | {description} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def architecture_cell(package: str, architecture: str) -> str:
    """How many of a package's CUDA stages have a program there, and the weakest of their strongest evidence."""
    programs = programs_of(package)
    if not programs.stages:
        return "none of its own"
    records = programs.records_for(architecture)
    if not records:
        return f"0 of {len(programs.stages)} stages"
    best = [next((k for k in STRENGTH if k in {e.kind for e in record.evidence}), "not checked") for record in records]
    weakest = max(best, key=[*STRENGTH, "not checked"].index)
    return f"{len(records)} of {len(programs.stages)} stages, {weakest}"


def run_text(report: dict, plot: str) -> str:
    """What one run of the quickstart found, with its plot; of a run on a GPU also the hashes that must agree."""
    losses, config = report["loss_nats_per_byte"], report["config"]
    tail = losses[-max(1, len(losses) // 20) :]
    equal = all(proof["holds"] for proof in report["proofs"])
    speed = len(losses) * config["tokens"] / report["training_seconds"]
    found = (
        f"From {losses[0]:.2f} nats a byte to {sum(tail) / len(tail):.2f} "
        f"(mean of the last {len(tail)} of {len(losses)} steps), "
        f"{report['held_out']['loss_nats_per_byte']:.2f} on held-out documents; "
        f"{report['training_seconds']:.0f} s of training ({speed:,.0f} tokens a second) and "
        f"{report['proof_seconds']:.0f} s of proofs on {place_of(report)}. "
        f"{'All' if equal else 'NOT all'} of its hashes that must agree did."
    )
    parts = [f"![Loss of every step]({plot})", found]
    if report["backend"] != "cpu":
        parts.append("Hashes of the last of these runs; another machine gives other ones:")
        lines = ["| what must agree | runs and places | SHA-256 | agree |", "|---|---|---|---|"]
        for proof in report["proofs"]:
            hashes = ", ".join(f"`{text[:16]}`" for text in dict.fromkeys(proof["hashes"].values()))
            answer = "yes" if proof["holds"] else "NO"
            lines.append(f"| {proof['title']} | {', '.join(proof['hashes'])} | {hashes} | {answer} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def place_of(report: dict) -> str:
    """Where a run was: its GPU, or its cores and what else kept them busy."""
    environment = report["environment"]
    if report["backend"] != "cpu":
        return f"one {environment['gpu']} (torch {environment['torch']}, commit {environment['commit']})"
    # The run itself keeps its cores busy; what is beyond that was other work.
    load = environment["load_average"]
    busy = f", while other work kept them busy (load {load:.0f})" if load > environment["cores"] + 1 else ""
    return f"{environment['cores']} cores ({environment['processor']}, torch {environment['torch']}){busy}"


def quickstart_text() -> str:
    """What the kept runs found."""
    kept = [(ROOT / report, plot) for report, plot in RUNS.values()]
    return "\n\n".join(run_text(json.loads(path.read_text()), plot) for path, plot in kept if path.exists())


def fresh(text: str) -> str:
    """The README with its generated parts up to date; raises `ValueError` where a pair of markers is missing."""
    for name, content in (("packages", package_table()), ("quickstart", quickstart_text())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md: needs the lines {begin} and {end} once each")
        text = text[: text.index(begin)] + f"{begin}\n{content}\n{end}" + text[text.index(end) + len(end) :]
    return text


def take_run(folder: Path, commit: str = ""):
    """Keeps report and plot of a finished run of the quickstart in docs/, apart for the CPU and for a GPU.

    `commit` is that of its tree, where the run could not tell.
    """
    # The examples are no installed package.
    sys.path.insert(0, str(ROOT / "examples"))
    from quickstart.report import plot_loss

    report = json.loads((folder / "report.json").read_text())
    if not report["proofs"]:
        raise ValueError(f"{folder}: got a run without proofs, takes a whole one")
    if commit:
        if report["environment"]["commit"] not in ("unknown", commit):
            raise ValueError(f"commit: got {commit}, the run says {report['environment']['commit']}")
        report["environment"]["commit"] = commit
    kept, plot = (ROOT / path for path in RUNS["cpu" if report["backend"] == "cpu" else "gpu"])
    write_whole(kept, json.dumps(report, indent=1) + "\n")
    plot_loss(plot, report["loss_nats_per_byte"], report["held_out"]["loss_nats_per_byte"])


def main() -> int:
    """Updates or checks the README; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where the README is stale")
    parser.add_argument("--run", type=Path, metavar="DIR", help="first take this run of the quickstart for the README")
    parser.add_argument("--commit", default="", help="of that run's tree, where the run could not tell")
    options = parser.parse_args()
    try:
        if options.run:
            take_run(options.run, options.commit)
        text = README.read_text()
        new = fresh(text)
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if new == text:
        return 0
    if options.check:
        print("README.md is stale. remedy: python tools/readme.py", file=sys.stderr)
        return 1
    write_whole(README, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
