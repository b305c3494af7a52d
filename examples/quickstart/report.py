"""What a run leaves behind: report.json for machines, loss.png for people."""

import json
import os
import tempfile
from pathlib import Path

from cake_shared.bench.environment import describe_environment
from quickstart.proofs import Proof
from quickstart.train import CHECKPOINT, Run

REPORT, PLOT = "report.json", "loss.png"
UNIFORM = "guessing all 256 bytes alike costs ln 256 = 5.545"


def new_folder(asked: Path | None) -> Path:
    """A fresh folder for a run: the asked one, else runs/quickstart, runs/quickstart-2, and so on.

    Raises `FileExistsError` when the asked one is there and not empty: a run overwrites nothing.
    """
    if asked is not None:
        if asked.exists() and (not asked.is_dir() or any(asked.iterdir())):
            advice = f" (or --resume {asked})" if (asked / CHECKPOINT).is_file() else ""
            raise FileExistsError(f"out: {asked} is there already, takes a new or an empty folder{advice}")
        asked.mkdir(parents=True, exist_ok=True)
        return asked
    number = 1
    while True:
        folder = Path("runs") / ("quickstart" if number == 1 else f"quickstart-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def write_report(
    folder: Path, run: Run, *, reason: str, seconds: dict[str, float], proofs: list[Proof] | None, held_out: dict
):
    """Writes report.json, whole or not at all.

    `seconds` holds the time of the training and, once made, of the proofs; `proofs` is None when none were made.
    """
    report = {
        "config": run.config.as_dict(),
        "backend": run.backend,
        "why_this_backend": reason,
        "environment": describe_environment(Path(__file__).resolve().parents[2]),
        "data": {
            "source": run.corpus.source,
            "sha256": run.corpus.fingerprint,
            "documents": len(run.corpus.train),
            "documents_held_out": len(run.corpus.held_out),
            "bytes": run.corpus.bytes_total,
            "files_skipped": run.corpus.skipped_files,
        },
        "parameters": sum(parameter.numel() for parameter in run.parameters.values()),
        "step": run.step,
        **{f"{name}_seconds": round(value, 2) for name, value in seconds.items()},
        "loss_nats_per_byte": run.losses,
        "held_out": held_out,
        "weights_sha256": run.weights_sha256(),
        "proofs": None
        if proofs is None
        else [{"title": p.title, "why": p.why, "hashes": p.hashes, "holds": p.holds} for p in proofs],
    }
    handle, name = tempfile.mkstemp(dir=folder, prefix=REPORT, suffix=".part")
    with os.fdopen(handle, "w") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    os.replace(name, folder / REPORT)


def smooth(losses: list[float], over: int) -> list[float]:
    """The running mean of the last `over` values."""
    means = []
    for i in range(len(losses)):
        window = losses[max(0, i + 1 - over) : i + 1]
        means.append(sum(window) / len(window))
    return means


def plot_loss(path: Path, losses: list[float], held_out: float):
    """Draws the loss of every step, its running mean, and the loss on held-out documents into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(losses) + 1)
    chart, axes = pyplot.subplots(figsize=(8, 4.2))
    axes.plot(steps, losses, color="#9dbfe0", linewidth=1, label="each step")
    axes.plot(steps, smooth(losses, max(1, len(losses) // 20)), color="#1f5f9e", linewidth=2, label="running mean")
    axes.axhline(held_out, color="#c8553d", linestyle="--", linewidth=1.2, label=f"held-out documents: {held_out:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title("A byte-level Gated DeltaNet on packed documents")
    axes.set_ylim(bottom=min(1.0, *losses))
    axes.grid(alpha=0.25)
    axes.legend()
    chart.tight_layout()
    chart.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(chart)
